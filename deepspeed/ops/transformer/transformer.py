"""`DeepSpeedTransformerLayer`: the encoder layer of BERT, with norms before or behind, on fused kernels."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from deepspeed.accelerator import get_accelerator
from deepspeed.errors import UsageError
from deepspeed.ops.model.gated import bias_gelu
from deepspeed.ops.model.norm import layer_norm

__all__ = ["DeepSpeedTransformerConfig", "DeepSpeedTransformerLayer"]

_GIVEN = 8  # initial weights and biases: query, key, value, attention's output and norm, inner, output, norm


class DeepSpeedTransformerLayer(nn.Module):
    """Self-attention and a feed-forward part with GELU, each with dropout, a residual and a layer normalisation.

    `initial_weights` and `initial_biases` are tensors in the order: query, key, value, the attention's output, the norm
    of its sum, the inner layer, the output layer, the other norm.
    """

    attn_qkvw: nn.Parameter
    attn_qkvb: nn.Parameter
    attn_ow: nn.Parameter
    attn_ob: nn.Parameter
    attn_nw: nn.Parameter
    attn_nb: nn.Parameter
    inter_w: nn.Parameter
    inter_b: nn.Parameter
    output_w: nn.Parameter
    output_b: nn.Parameter
    norm_w: nn.Parameter
    norm_b: nn.Parameter

    def __init__(
        self,
        config: DeepSpeedTransformerConfig,
        initial_weights: Sequence[Tensor] | None = None,
        initial_biases: Sequence[Tensor] | None = None,
    ) -> None:
        super().__init__()
        config.require_usable()
        self.config = config
        if config.local_rank >= 0:
            get_accelerator().set_device(config.local_rank)
        hidden, inner = config.hidden_size, config.intermediate_size
        shapes = {
            "attn_qkvw": (3 * hidden, hidden), "attn_qkvb": (3 * hidden,),
            "attn_ow": (hidden, hidden), "attn_ob": (hidden,), "attn_nw": (hidden,), "attn_nb": (hidden,),
            "inter_w": (inner, hidden), "inter_b": (inner,),
            "output_w": (hidden, inner), "output_b": (hidden,), "norm_w": (hidden,), "norm_b": (hidden,),
        }  # fmt: skip
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        if initial_weights is None and initial_biases is None:
            self.init_transformer_weights(config.adjust_init_range)
        else:
            self._take(initial_weights, initial_biases)
        self.training = config.training

    def init_transformer_weights(self, adjust_init_range: bool = False) -> None:
        """Normal weights, biases of zero; with `adjust_init_range`, smaller by depth where the residual is added."""
        config = self.config
        spread = config.initializer_range
        if spread < 0 or (adjust_init_range and config.num_hidden_layers < 1):
            raise UsageError(
                f"DeepSpeedTransformerConfig: initializer_range is {spread} and num_hidden_layers "
                f"{config.num_hidden_layers}; both are needed for new weights"
            )
        last = spread / math.sqrt(2.0 * config.num_hidden_layers) if adjust_init_range else spread
        for name, param in self.named_parameters():
            if name in ("attn_nw", "norm_w"):
                nn.init.ones_(param)
            elif param.dim() == 1:
                nn.init.zeros_(param)
            else:
                nn.init.normal_(param, std=last if name in ("attn_ow", "output_w") else spread)

    def _take(self, weights: Sequence[Tensor] | None, biases: Sequence[Tensor] | None) -> None:
        if weights is None or biases is None or len(weights) < _GIVEN or len(biases) < _GIVEN:
            raise UsageError(
                "DeepSpeedTransformerLayer: initial_weights and initial_biases are given together, "
                f"{_GIVEN} tensors each: query, key, value, attention output, attention norm, inner, output, norm"
            )
        rest = ("attn_o", "attn_n", "inter_", "output_", "norm_")
        for ending, given in (("w", weights), ("b", biases)):
            values = {"attn_qkv": torch.cat([given[number].detach() for number in range(3)])}
            values.update(zip(rest, (given[number].detach() for number in range(3, _GIVEN)), strict=True))
            for name, value in values.items():
                param = self.get_parameter(name + ending)
                if param.shape != value.shape:
                    raise UsageError(
                        f"DeepSpeedTransformerLayer: the initial {name}{ending} is of shape {tuple(value.shape)}; "
                        f"expected {tuple(param.shape)}"
                    )
                param.data = value.clone()

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        head_mask: Any = None,
        layer_head_mask: Any = None,
        encoder_hidden_states: Any = None,
        encoder_attention_mask: Any = None,
        past_key_value: Any = None,
        output_attentions: bool = False,
        grads: Any = None,
    ) -> Any:
        """[batch, tokens, hidden] → the same, in a tuple with `return_tuple`.

        The mask is added to scores; one of bools says which take part, as torch's attention has it.
        """
        absent = {
            "head_mask": head_mask, "layer_head_mask": layer_head_mask,
            "encoder_hidden_states": encoder_hidden_states, "encoder_attention_mask": encoder_attention_mask,
            "past_key_value": past_key_value, "output_attentions": output_attentions, "grads": grads,
        }  # fmt: skip
        # encoders that hand arguments over by position have a switch, off, where this layer has one of these
        given = [name for name, value in absent.items() if value is not None and value is not False]
        if given:
            raise UsageError(f"DeepSpeedTransformerLayer: {', '.join(given)}: an encoder layer has none; leave it out")
        if hidden_states.dim() != 3 or hidden_states.shape[-1] != self.config.hidden_size:
            raise UsageError(
                f"DeepSpeedTransformerLayer: hidden_states is of shape {tuple(hidden_states.shape)}; expected [batch, "
                f"tokens, {self.config.hidden_size}]"
            )
        autocast = torch.is_autocast_enabled(hidden_states.device.type)
        if self.config.fp16 and not autocast and self.attn_qkvw.dtype != torch.float16:
            raise UsageError(
                f"DeepSpeedTransformerConfig: fp16 is true, but the parameters are {self.attn_qkvw.dtype}; call "
                ".half(), or let the config's fp16 section do it"
            )
        self.config.training = self.training
        x = hidden_states if autocast else hidden_states.to(self.attn_qkvw.dtype)
        out = (
            self._norms_first(x, attention_mask) if self.config.pre_layer_norm else self._norms_last(x, attention_mask)
        )
        return (out,) if self.config.return_tuple else out

    def _norms_first(self, x: Tensor, mask: Tensor | None) -> Tensor:
        eps = self.config.layer_norm_eps

        def queries(x: Tensor) -> Tensor:
            return functional.linear(layer_norm(x, self.norm_w, self.norm_b, eps)[0], self.attn_qkvw, self.attn_qkvb)

        qkv = self._recomputed(self.config.normalize_invertible, queries, x)
        attended = self._attend(qkv, mask)
        if self.config.normalize_invertible:
            total = attended + x
            inner = self._recomputed(
                True,
                lambda t: functional.linear(layer_norm(t, self.attn_nw, self.attn_nb, eps)[0], self.inter_w),
                total,
            )
        else:
            normal, total = layer_norm(attended, self.attn_nw, self.attn_nb, eps, residual=x)
            inner = functional.linear(normal, self.inter_w)
        return self._feed(inner) + total

    def _norms_last(self, x: Tensor, mask: Tensor | None) -> Tensor:
        eps = self.config.layer_norm_eps
        attended = self._attend(functional.linear(x, self.attn_qkvw, self.attn_qkvb), mask)
        if self.config.normalize_invertible:
            normal, inner = self._recomputed(
                True,
                lambda t: (n := layer_norm(t, self.attn_nw, self.attn_nb, eps)[0], functional.linear(n, self.inter_w)),
                attended + x,
            )
        else:
            normal, _ = layer_norm(attended, self.attn_nw, self.attn_nb, eps, residual=x)
            inner = functional.linear(normal, self.inter_w)
        return layer_norm(self._feed(inner), self.norm_w, self.norm_b, eps, residual=normal)[0]

    def _attend(self, qkv: Tensor, mask: Tensor | None) -> Tensor:
        batch, tokens, _ = qkv.shape
        heads, width = self.config.heads, self.config.hidden_size
        dropped = max(self.config.attn_dropout_ratio, 0.0) if self.training else 0.0
        added = mask if mask is None or mask.dtype == torch.bool else mask.to(qkv.dtype)

        def attention(qkv: Tensor) -> Tensor:
            q, k, v = qkv.view(batch, tokens, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
            found = functional.scaled_dot_product_attention(q, k, v, attn_mask=added, dropout_p=dropped)
            return found.transpose(1, 2).reshape(batch, tokens, width)

        found = self._recomputed(self.config.attn_dropout_checkpoint, attention, qkv)
        return self._drop(functional.linear(found, self.attn_ow, self.attn_ob))

    def _feed(self, inner: Tensor) -> Tensor:
        def out(inner: Tensor) -> Tensor:
            return functional.linear(bias_gelu(inner, self.inter_b, "gelu_tanh"), self.output_w, self.output_b)

        return self._drop(self._recomputed(self.config.gelu_checkpoint, out, inner))

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, max(self.config.hidden_dropout_ratio, 0.0), self.training)

    @staticmethod
    def _recomputed(asked: bool, run: Callable[[Tensor], Any], x: Tensor) -> Any:
        """run(x), of which only x is kept for the backward if that is asked for."""
        return checkpoint(run, x, use_reentrant=False) if asked and torch.is_grad_enabled() else run(x)


@dataclass(eq=False)
class DeepSpeedTransformerConfig:
    """Options of `DeepSpeedTransformerLayer`.

    `normalize_invertible` and `gelu_checkpoint` compute the results of norms and of GELU again in backward,
    `attn_dropout_checkpoint` those of attention. A dropout ratio of -1, the default, is no dropout. `batch_size`,
    `seed` and `stochastic_mode` change nothing: any batch fits, dropout draws from torch's random state, and the
    kernels have one way.
    """

    batch_size: int = -1
    hidden_size: int = -1
    intermediate_size: int = -1
    heads: int = -1
    attn_dropout_ratio: float = -1
    hidden_dropout_ratio: float = -1
    num_hidden_layers: int = -1
    initializer_range: float = -1
    layer_norm_eps: float = 1e-12
    local_rank: int = -1
    seed: int = -1
    fp16: bool = False
    pre_layer_norm: bool = True
    normalize_invertible: bool = False
    gelu_checkpoint: bool = False
    adjust_init_range: bool = True
    attn_dropout_checkpoint: bool = False
    stochastic_mode: bool = False
    return_tuple: bool = False
    training: bool = True

    def __post_init__(self) -> None:
        self.layer_id = -1
        self.test_gemm = False
        if self.intermediate_size <= 0:
            self.intermediate_size = 4 * self.hidden_size

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
