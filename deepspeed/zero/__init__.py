"""ZeRO: parameters, gradients and optimizer states spread over ranks."""

from deepspeed._lazy import lazy

_LAZY = {
    "GatheredParameters": "deepspeed.zero.gather:GatheredParameters",
    "Init": "deepspeed.zero.init:Init",
    "TiledLinear": "deepspeed.zero.tiling:TiledLinear",
    "TiledLinearReturnBias": "deepspeed.zero.tiling:TiledLinearReturnBias",
    "ZeroParamStatus": "deepspeed.zero.param:ZeroParamStatus",
    "ZeroParamType": "deepspeed.zero.param:ZeroParamType",
    "register_external_parameter": "deepspeed.zero.external:register_external_parameter",
    "unregister_external_parameter": "deepspeed.zero.external:unregister_external_parameter",
    "unwrap_model_for_generation": "deepspeed.zero.generation:unwrap_model_for_generation",
}

__all__ = [
    "GatheredParameters",
    "Init",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "ZeroParamType",
    "register_external_parameter",
    "unregister_external_parameter",
    "unwrap_model_for_generation",
]

__getattr__ = lazy(__name__, _LAZY)
