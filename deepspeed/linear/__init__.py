"""Linear layers over frozen weights that rest in few bits, in parts or on the host, with LoRA adapters beside them."""

from deepspeed._package import lazy

_LAZY = {
    "Init": "deepspeed.linear.context_manager:Init",
    "LoRAConfig": "deepspeed.linear.config:LoRAConfig",
    "LoRAOptimizedLinear": "deepspeed.linear.optimized_linear:LoRAOptimizedLinear",
    "OptimizedLinear": "deepspeed.linear.optimized_linear:OptimizedLinear",
    "QuantizationConfig": "deepspeed.linear.config:QuantizationConfig",
    "QuantizedLinear": "deepspeed.linear.quantization:QuantizedLinear",
    "QuantizedParameter": "deepspeed.linear.quantization:QuantizedParameter",
    "init_lora": "deepspeed.linear.context_manager:init_lora",
    "load_adapters": "deepspeed.linear.adapters:load_adapters",
    "save_adapters": "deepspeed.linear.adapters:save_adapters",
}

__all__ = sorted(_LAZY)

__getattr__ = lazy(__name__, _LAZY)
