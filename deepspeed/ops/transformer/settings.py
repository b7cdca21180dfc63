"""`DeepSpeedTransformerConfig`: the published options of the layer, each with what it does here."""

from __future__ import annotations

import json
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from deepspeed.errors import UsageError

__all__ = ["DeepSpeedTransformerConfig", "TransformerConfig"]


class TransformerConfig:
    """The shape of a model's layers."""

    def __init__(
        self,
        batch_size: int,
        hidden_size: int,
        intermediate_size: int,
        heads: int,
        attn_dropout_ratio: float,
        hidden_dropout_ratio: float,
        num_hidden_layers: int,
        initializer_range: float,
    ) -> None:
        self.layer_id = -1
        self.batch_size = batch_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.heads = heads
        self.attn_dropout_ratio = attn_dropout_ratio
        self.hidden_dropout_ratio = hidden_dropout_ratio
        self.num_hidden_layers = num_hidden_layers
        self.initializer_range = initializer_range


class DeepSpeedTransformerConfig(TransformerConfig):
    """Options of `DeepSpeedTransformerLayer`.

    `normalize_invertible` and `gelu_checkpoint` compute the results of norms and of GELU again in backward,
    `attn_dropout_checkpoint` those of attention. A dropout ratio of -1, the default, is no dropout. `batch_size`,
    `seed` and `stochastic_mode` change nothing: any batch fits, dropout draws from torch's random state, and the
    kernels have one way.
    """

    def __init__(
        self,
        batch_size: int = -1,
        hidden_size: int = -1,
        intermediate_size: int = -1,
        heads: int = -1,
        attn_dropout_ratio: float = -1,
        hidden_dropout_ratio: float = -1,
        num_hidden_layers: int = -1,
        initializer_range: float = -1,
        layer_norm_eps: float = 1e-12,
        local_rank: int = -1,
        seed: int = -1,
        fp16: bool = False,
        pre_layer_norm: bool = True,
        normalize_invertible: bool = False,
        gelu_checkpoint: bool = False,
        adjust_init_range: bool = True,
        attn_dropout_checkpoint: bool = False,
        stochastic_mode: bool = False,
        return_tuple: bool = False,
        training: bool = True,
    ) -> None:
        super().__init__(
            batch_size,
            hidden_size,
            intermediate_size if intermediate_size > 0 else 4 * hidden_size,
            heads,
            attn_dropout_ratio,
            hidden_dropout_ratio,
            num_hidden_layers,
            initializer_range,
        )
        self.layer_norm_eps = layer_norm_eps
        self.local_rank = local_rank
        self.seed = seed
        self.fp16 = fp16
        self.pre_layer_norm = pre_layer_norm
        self.normalize_invertible = normalize_invertible
        self.gelu_checkpoint = gelu_checkpoint
        self.adjust_init_range = adjust_init_range
        self.attn_dropout_checkpoint = attn_dropout_checkpoint
        self.stochastic_mode = stochastic_mode
        self.return_tuple = return_tuple
        self.training = training
        self.test_gemm = False

    @classmethod
    def from_dict(cls, json_object: dict[str, Any]) -> DeepSpeedTransformerConfig:
        """With the values of a dict by the names of the options; other names are attributes as well."""
        made = cls()
        for name, value in json_object.items():
            setattr(made, name, value)
        if "intermediate_size" not in json_object:
            made.intermediate_size = 4 * made.hidden_size
        return made

    @classmethod
    def from_json_file(cls, json_file: str) -> DeepSpeedTransformerConfig:
        """With the values of a JSON file."""
        found = json.loads(Path(json_file).read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise UsageError(f"{json_file}: a {type(found).__name__}; expected an object with the options as its keys")
        return cls.from_dict(found)

    def require_usable(self) -> None:
        """An error where a layer of such a shape cannot be."""
        for name in ("hidden_size", "heads", "intermediate_size"):
            found = getattr(self, name)
            if not isinstance(found, Integral) or found < 1:
                raise UsageError(f"DeepSpeedTransformerConfig: {name} is {found!r}; give a positive whole number")
        if self.hidden_size % self.heads:
            raise UsageError(
                f"DeepSpeedTransformerConfig: hidden_size {self.hidden_size} is no multiple of heads {self.heads}"
            )
        for name in ("attn_dropout_ratio", "hidden_dropout_ratio", "layer_norm_eps"):
            found = getattr(self, name)
            unset = found == -1 and name != "layer_norm_eps"
            if not unset and (not isinstance(found, Real) or not 0 <= float(found) < 1):
                raise UsageError(f"DeepSpeedTransformerConfig: {name} is {found!r}; give 0 or more, below 1")
