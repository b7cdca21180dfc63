"""ZeRO: parameters, gradients and optimizer states spread over ranks."""

from deepspeed._package import lazy

_LAZY = {
    "GatheredParameters": "deepspeed.zero.public.gathered:GatheredParameters",
    "Init": "deepspeed.zero.birth.init:Init",
    "MiCS_Init": "deepspeed.zero.birth.init:MiCS_Init",
    "TiledLinear": "deepspeed.zero.public.tiling:TiledLinear",
    "TiledLinearReturnBias": "deepspeed.zero.public.tiling:TiledLinearReturnBias",
    "ZeroParamStatus": "deepspeed.zero.parameters.shard:ZeroParamStatus",
    "ZeroParamType": "deepspeed.zero.parameters.shard:ZeroParamType",
    "register_external_parameter": "deepspeed.zero.parameters.module_hooks:register_external_parameter",
    "unregister_external_parameter": "deepspeed.zero.parameters.module_hooks:unregister_external_parameter",
    "unwrap_model_for_generation": "deepspeed.zero.public.gathered:unwrap_model_for_generation",
}

__all__ = sorted(_LAZY)

__getattr__ = lazy(__name__, _LAZY)
