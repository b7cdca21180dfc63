"""Domino: layers in Megatron's layout, [sequence, batch, hidden], whose sums over ranks run beside products.

[Note: turns] A half's way through layers is a generator, which gives up its turn where it needs a sum that it has just
begun. Halves take turns, so that each sum of forward runs beside a product of the other half; in backward each runs
beside the product for a weight.

The gradient of a column layer's input is a sum over ranks, which `OverlappedInput` lets run beside the product for its
weight.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import UsageError
from deepspeed.parallel.mpu import stage_of, tensor_group
from deepspeed.parallel.regions import GroupMembers, RankGroup
from deepspeed.parallel.rng import RankGenerator, rank_generator
from deepspeed.tensor_parallel.layers import OverlappedInput

__all__ = ["AttnMaskType", "DominoTransformer", "DominoTransformerLayer", "LayerType", "ModelType"]

_Turns = Generator[None, None, Tensor]
_Rotate = Callable[[Tensor, Tensor], Tensor]

_NOT_HERE = {
    "apply_layernorm_1p": "norms whose weight is counted from 1",
    "layernorm_zero_centered_gamma": "norms whose weight is counted from 1",
    "fp32_residual_connection": "residuals in float32 beside layers in 16 bits",
    "num_experts": "experts",
    "num_moe_experts": "experts",
    "recompute_granularity": "recomputation inside; wrap the layers in deepspeed.checkpointing.checkpoint",
    "sequence_parallel": "sequences that stay split between split regions",
    "squared_relu": "squared ReLU; give activation_func",
}


@dataclass(frozen=True)
class _Sizes:
    """What a config in Megatron's words says of a whole layer, not of a rank's part."""

    hidden: int
    heads: int
    groups: int
    """Key-value heads."""
    head_dim: int
    inner: int
    eps: float
    drop_scores: float
    drop_hidden: float
    bias: bool
    gated: bool
    activation: Callable[[Tensor], Tensor]
    rms: bool
    residual_of_norm: bool
    dtype: torch.dtype

    @classmethod
    def of(cls, config: Any) -> _Sizes:
        """Of an object with Megatron's attributes; what is not there is as Megatron has it by default."""

        def given(name: str, default: Any) -> Any:
            value = getattr(config, name, None)
            return default if value is None else value

        for name, what in _NOT_HERE.items():
            if given(name, False):
                raise UsageError(
                    f"Domino: config.{name} is {getattr(config, name)!r}; there is no {what}. Leave it out"
                )
        kind = given("normalization", "LayerNorm")
        if kind not in ("LayerNorm", "RMSNorm"):
            raise UsageError(f"Domino: config.normalization is {kind!r}; expected LayerNorm or RMSNorm")
        hidden, heads = config.hidden_size, config.num_attention_heads
        gated = bool(given("gated_linear_unit", False) or given("swiglu", False))
        return cls(
            hidden=hidden,
            heads=heads,
            groups=given("num_query_groups", heads) if given("group_query_attention", True) else heads,
            head_dim=given("kv_channels", hidden // heads),
            inner=given("ffn_hidden_size", 4 * hidden),
            eps=given("layernorm_epsilon", 1e-5),
            drop_scores=given("attention_dropout", 0.1),
            drop_hidden=given("hidden_dropout", 0.1),
            bias=given("add_bias_linear", True),
            gated=gated,
            activation=given("activation_func", F.silu if gated else F.gelu),
            rms=kind == "RMSNorm",
            residual_of_norm=given("apply_residual_connection_post_layernorm", False),
            dtype=given("params_dtype", torch.get_default_dtype()),
        )

    def norm(self) -> nn.Module:
        """A norm over the hidden size."""
        kind = nn.RMSNorm if self.rms else nn.LayerNorm
        return kind(self.hidden, eps=self.eps, dtype=self.dtype, device=get_accelerator().current_device_name())

    def share(self, ranks: int) -> tuple[int, int, int]:
        """(query heads, key-value heads, inner width) of a rank."""
        for what, count in (("query heads", self.heads), ("key-value heads", self.groups), ("inner width", self.inner)):
            if count % ranks:
                raise UsageError(f"Domino: {count} {what} do not divide by {ranks} tensor-parallel ranks")
        if self.heads % self.groups:
            raise UsageError(f"Domino: {self.heads} query heads are no multiple of {self.groups} key-value heads")
        return self.heads // ranks, self.groups // ranks, self.inner // ranks


class AttnMaskType(Enum):
    """What a token must not see besides what the mask says."""

    padding = 1
    causal = 2


class LayerType(Enum):
    """What a layer is part of."""

    encoder = 1
    decoder = 2


class ModelType(Enum):
    """What layers a model has."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2


class _Linear(nn.Module):
    """A rank's part of a linear layer, which it draws by itself; `dim` of the weight is the one that ranks share."""

    def __init__(
        self, config: Any, init: Callable[[Tensor], Any], peers: RankGroup, shape: tuple[int, int], dim: int
    ) -> None:
        super().__init__()
        sizes = _Sizes.of(config)
        made: dict[str, Any] = {"dtype": sizes.dtype, "device": get_accelerator().current_device_name()}
        self.peers = peers
        self.weight = nn.Parameter(torch.empty(shape, **made))
        self.bias = nn.Parameter(torch.zeros(shape[0], **made)) if sizes.bias else None
        with rank_generator(peers), torch.no_grad():
            if getattr(config, "perform_initialization", True):
                init(self.weight)
        for param in (self.weight, self.bias) if dim == 0 else (self.weight,):
            if param is not None:  # as Megatron marks a parameter of which ranks hold different parts
                param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, dim, 1  # type: ignore[attr-defined]


class _Column(_Linear):
    """This rank's outputs of the whole input."""

    def forward(self, inputs: Tensor) -> Tensor:
        return OverlappedInput(self.peers).linear(inputs, self.weight, self.bias)


class _Row(_Linear):
    """A summand of all outputs from this rank's inputs, and the bias, which is added to the sum."""

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor | None]:
        return F.linear(inputs, self.weight), self.bias


class _Attention(nn.Module):
    """Projections around attention over the heads of a rank; what it returns is a summand of the output."""

    def __init__(self, config: Any, peers: RankGroup, rotate: _Rotate | None, mask_type: AttnMaskType) -> None:
        super().__init__()
        sizes = _Sizes.of(config)
        queries, self.groups, _ = sizes.share(peers.size)
        self.dim, self.rotate, self.dropout = sizes.head_dim, rotate, sizes.drop_scores
        self.causal = mask_type is AttnMaskType.causal
        outputs, inputs = (queries + 2 * self.groups) * self.dim, queries * self.dim
        self.query_key_value = _Column(config, config.init_method, peers, (outputs, sizes.hidden), 0)
        self.dense = _Row(config, config.output_layer_init_method, peers, (sizes.hidden, inputs), 1)
        self._draws = RankGenerator(peers) if sizes.drop_scores > 0 and peers.size > 1 else None

    def forward(self, hidden: Tensor, mask: Tensor | None, rotary: Any = None) -> tuple[Tensor, Tensor | None]:
        """[sequence, batch, hidden] → this rank's summand of it, and the bias of the sum."""
        return self.dense(self.attend(self.query_key_value(hidden), mask, rotary))  # type: ignore[no-any-return]

    def attend(self, mixed: Tensor, mask: Tensor | None, rotary: Any = None) -> Tensor:
        """Projected queries, keys and values → what this rank's heads saw, [sequence, batch, heads × dim].

        Each key-value head has its queries, its key and its value side by side, as Megatron has them.
        """
        grouped = mixed.unflatten(-1, (self.groups, -1))
        query, key, value = grouped.split([grouped.shape[-1] - 2 * self.dim, self.dim, self.dim], -1)
        query = query.unflatten(-1, (-1, self.dim)).flatten(2, 3)
        if rotary is not None:
            if self.rotate is None:
                raise UsageError("Domino: rotary_pos_emb is given, but the layer has no apply_rotary_pos_emb")
            turns = rotary if isinstance(rotary, tuple) else (rotary, rotary)
            query, key = self.rotate(query, turns[0]), self.rotate(key, turns[1])
        if self._draws is None:
            return self._core(query, key, value, mask)
        self._draws.begin(self)
        try:
            return self._core(query, key, value, mask)
        finally:
            self._draws.end()

    def _core(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        bias = None if mask is None else self._bias(mask, query, key)
        out = F.scaled_dot_product_attention(
            query,
            key,
            value,
            bias,
            self.dropout if self.training else 0.0,
            is_causal=self.causal and bias is None,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out.permute(2, 0, 1, 3).flatten(2)

    def _bias(self, hidden: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """What is added to scores, of a mask that is True where nothing is to be seen.

        A token that may see nothing sees everything alike, and is no NaN.
        """
        hidden = hidden.bool()
        if self.causal:
            future = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
            hidden = hidden | future.triu(1 + key.shape[2] - query.shape[2])
        zeros = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
        return zeros.masked_fill(hidden, torch.finfo(query.dtype).min)


class DominoTransformerLayer(nn.Module):
    """Attention and a perceptron, each behind a norm; `mpu` tells which ranks share them.

    All of these ranks must draw the same random numbers and get the same hidden states.
    """

    def __init__(
        self,
        config: Any,
        mpu: Any,
        apply_rotary_pos_emb: _Rotate | None,
        layer_number: int,
        layer_type: LayerType = LayerType.encoder,
        self_attn_mask_type: AttnMaskType = AttnMaskType.causal,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        if layer_type is not LayerType.encoder or drop_path_rate:
            raise UsageError(
                f"Domino: layer_type is {layer_type} and drop_path_rate {drop_path_rate}; there are layers of "
                "self-attention (LayerType.encoder) that are never left out. Leave both out"
            )
        sizes = self.sizes = _Sizes.of(config)
        self.peers: RankGroup = GroupMembers(tensor_group(mpu))
        self.layer_number = layer_number
        self.input_layernorm = sizes.norm()
        self.self_attention = _Attention(config, self.peers, apply_rotary_pos_emb, self_attn_mask_type)
        self.post_attention_layernorm = sizes.norm()
        _, _, inner = sizes.share(self.peers.size)
        outputs = 2 * inner if sizes.gated else inner
        self.linear_fc1 = _Column(config, config.init_method, self.peers, (outputs, sizes.hidden), 0)
        if sizes.gated:  # gate and up of a rank lie side by side, so that its rows are not one run of the whole
            for param in self.linear_fc1.parameters():
                param.partition_stride = 2  # type: ignore[attr-defined]
        self.linear_fc2 = _Row(config, config.output_layer_init_method, self.peers, (sizes.hidden, inner), 1)

    def forward(
        self, hidden_states: Tensor | Sequence[Tensor], attention_mask: Tensor | None, rotary_pos_emb: Any = None
    ) -> Any:
        """[sequence, batch, hidden], or its two halves → the same; sums are over when it returns."""
        if isinstance(hidden_states, Tensor):
            return torch.cat(self(_halves(hidden_states), attention_mask, rotary_pos_emb), 1)
        masks = _masks(attention_mask, hidden_states)
        ways = (self.turns(half, mask, rotary_pos_emb) for half, mask in zip(hidden_states, masks, strict=True))
        return tuple(_take_turns(list(ways)))

    def turns(self, hidden: Tensor, mask: Tensor | None, rotary: Any) -> _Turns:
        """The way of a half through the layer; see [Note: turns]."""
        normed = self.input_layernorm(hidden)
        summand, bias = self.self_attention(normed, mask, rotary)
        output = yield from _summed(summand, self.peers)
        hidden = self._joined(output, bias, normed if self.sizes.residual_of_norm else hidden)
        normed = self.post_attention_layernorm(hidden)
        wide = self.linear_fc1(normed)
        if self.sizes.gated:
            gate, up = torch.chunk(wide, 2, -1)
            inside = self.sizes.activation(gate) * up
        else:
            inside = self.sizes.activation(wide)
        summand, bias = self.linear_fc2(inside)
        output = yield from _summed(summand, self.peers)
        return self._joined(output, bias, normed if self.sizes.residual_of_norm else hidden)

    def _joined(self, output: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """The residual and what dropout leaves of the output with its bias."""
        biased = output if bias is None else output + bias
        return residual + F.dropout(biased, self.sizes.drop_hidden, self.training)


class DominoTransformer(nn.Module):
    """The layers of a stage, with a norm behind the last one of all (`post_process` and `post_layer_norm`).

    Where it is not the first stage (`pre_process` is False), hidden states are those of `set_input_tensor`.
    """

    def __init__(
        self,
        config: Any,
        mpu: Any,
        apply_rotary_pos_emb: _Rotate | None,
        model_type: ModelType,
        layer_type: LayerType = LayerType.encoder,
        self_attn_mask_type: AttnMaskType = AttnMaskType.causal,
        post_layer_norm: bool = True,
        pre_process: bool = True,
        post_process: bool = True,
        drop_path_rate: float = 0.0,
    ) -> None:
        super().__init__()
        if model_type is not ModelType.encoder_or_decoder:
            raise UsageError(f"Domino: model_type is {model_type}; there are models of one kind of layers only")
        along = getattr(config, "input_split_dim", 1)
        if along != 1:
            raise UsageError(
                f"Domino: config.input_split_dim is {along}; halves are cut along the batch, dim 1 of [sequence, "
                "batch, hidden], since tokens of a sequence see each other. Set it to 1 or leave it out"
            )
        stage, stages = stage_of(mpu)
        if config.num_layers % stages:
            raise UsageError(f"Domino: {config.num_layers} layers do not divide by {stages} pipeline stages")
        count = config.num_layers // stages
        self.pre_process = pre_process
        self.input_tensor: Tensor | None = None
        self.layers = nn.ModuleList(
            DominoTransformerLayer(
                *(config, mpu, apply_rotary_pos_emb, stage * count + at + 1),
                *(layer_type, self_attn_mask_type, drop_path_rate),
            )
            for at in range(count)
        )
        self.final_layernorm = _Sizes.of(config).norm() if post_process and post_layer_norm else None

    def set_input_tensor(self, input_tensor: Tensor | None) -> None:
        """What comes from the stage before."""
        self.input_tensor = input_tensor

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None, rotary_pos_emb: Any = None) -> Tensor:
        """[sequence, batch, hidden] → the same; no sum is waited for at the end of a layer."""
        return self.inter_layer_overlap_forward(hidden_states, attention_mask, rotary_pos_emb)

    def inter_layer_overlap_forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, rotary_pos_emb: Any = None
    ) -> Tensor:
        """Halves take turns from the first layer to the last."""
        halves = _halves(self._given(hidden_states))
        masks = _masks(attention_mask, halves)
        ways = [self._through(half, mask, rotary_pos_emb) for half, mask in zip(halves, masks, strict=True)]
        return self._end(_take_turns(ways))

    def intra_layer_overlap_forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, rotary_pos_emb: Any = None
    ) -> Tensor:
        """Halves take turns inside of a layer, and meet at its end."""
        halves: Sequence[Tensor] = _halves(self._given(hidden_states))
        for layer in self.layers:
            halves = layer(halves, attention_mask, rotary_pos_emb)
        return self._end(halves)

    def _given(self, hidden_states: Tensor) -> Tensor:
        if self.pre_process:
            return hidden_states
        if self.input_tensor is None:
            raise UsageError(
                "Domino: a stage that is not the first one computes what set_input_tensor is given; it was not"
            )
        return self.input_tensor

    def _through(self, half: Tensor, mask: Tensor | None, rotary: Any) -> _Turns:
        for layer in self.layers:
            half = yield from layer.turns(half, mask, rotary)  # type: ignore[operator]
        return half

    def _end(self, halves: Sequence[Tensor]) -> Tensor:
        hidden = torch.cat(list(halves), 1)
        return hidden if self.final_layernorm is None else self.final_layernorm(hidden)


class _Begin(torch.autograd.Function):
    """Begins the sum of summands over ranks in their own memory; its work is waited for before it is read."""

    @staticmethod
    def forward(ctx: Any, summand: Tensor, peers: RankGroup, works: list[Any]) -> Tensor:
        ctx.mark_dirty(summand)
        works.append(comm.all_reduce(summand, group=peers.group, async_op=True))
        return summand

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None


def _summed(summand: Tensor, peers: RankGroup) -> _Turns:
    """Begin a sum, let the other half have its turn, and wait."""
    if peers.size == 1:
        return summand
    works: list[Any] = []
    output = _Begin.apply(summand.contiguous(), peers, works)  # type: ignore[no-untyped-call]
    yield
    works[0].wait()
    return output  # type: ignore[no-any-return]


def _take_turns(ways: Sequence[_Turns]) -> list[Tensor]:
    """What comes out of all ways, each of which goes on until it waits for somebody."""
    found: dict[int, Tensor] = {}
    while len(found) < len(ways):
        for at, way in enumerate(ways):
            if at in found:
                continue
            try:
                next(way)
            except StopIteration as end:
                found[at] = end.value
    return [found[at] for at in range(len(ways))]


def _halves(hidden: Tensor) -> tuple[Tensor, ...]:
    """[sequence, batch, hidden] in two; a batch of one stays whole."""
    return hidden.tensor_split(2, 1) if hidden.shape[1] > 1 else (hidden,)


def _masks(mask: Tensor | None, halves: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """The mask of each half; one without a batch is that of all."""
    sizes = [half.shape[1] for half in halves]
    if mask is None or mask.shape[0] != sum(sizes):
        return [mask] * len(sizes)
    return torch.split(mask, sizes)
