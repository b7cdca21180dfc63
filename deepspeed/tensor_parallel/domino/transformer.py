"""Transformer layers over two halves of a batch: while a half's outputs are summed over ranks, the other one computes.

[Note: turns] A half's way through layers is a generator, which gives up its turn where it needs a sum that it has just
begun. Halves take turns, so that each sum of forward runs beside a product of the other half; in backward each runs
beside the product for a weight (see [Note: a gradient on its way] in `async_linear`).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed import comm
from deepspeed.errors import UsageError
from deepspeed.parallel.mpu import stage_of, tensor_group
from deepspeed.parallel.regions import Members, Peers
from deepspeed.tensor_parallel.domino.async_linear import (
    DominoAsyncColumnParallelLinear,
    Handle,
    NoOper,
    RowParallelLinearNoComm,
)
from deepspeed.tensor_parallel.domino.attention import (
    AttnMaskType,
    AttnType,
    CoreAttention,
    DominoModule,
    Rotate,
    ShardedAttention,
)
from deepspeed.tensor_parallel.domino.settings import Settings
from deepspeed.tensor_parallel.draws import numbers_of_its_own

__all__ = [
    "AttnMaskType",
    "AttnType",
    "CoreAttention",
    "DominoModule",
    "DominoTransformer",
    "DominoTransformerLayer",
    "LayerType",
    "ModelType",
    "NoOper",
    "ShardedAttention",
    "bias_dropout_add",
]

Turns = Generator[None, None, Tensor]


class LayerType(Enum):
    """What a layer is part of."""

    encoder = 1
    decoder = 2


class ModelType(Enum):
    """What layers a model has."""

    encoder_or_decoder = 1
    encoder_and_decoder = 2


class bias_dropout_add(nn.Module):
    """A layer's output joins the residual."""

    def __init__(self, prob: float) -> None:
        super().__init__()
        self.prob = prob

    def forward(self, x: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """The residual and what dropout leaves of the output with its bias."""
        return residual + F.dropout(x if bias is None else x + bias, self.prob, self.training)


class DominoTransformerLayer(DominoModule):
    """Attention and a perceptron, each behind a norm; `mpu` tells which ranks share them.

    All of these ranks must draw the same random numbers and get the same hidden states.
    """

    def __init__(
        self,
        config: Any,
        mpu: Any,
        apply_rotary_pos_emb: Rotate | None,
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
        settings, group = Settings.of(config), tensor_group(mpu)
        self.peers: Peers = Members(group)
        self.layer_number, self.settings = layer_number, settings
        self.input_layernorm = settings.norm()
        self.self_attention = ShardedAttention(
            config, mpu, apply_rotary_pos_emb, layer_number, attn_mask_type=self_attn_mask_type
        )
        self.bias_dropout_add_func = bias_dropout_add(settings.drop_hidden)
        self.post_attention_layernorm = settings.norm()
        _, _, inner = settings.share(self.peers.size)
        outputs = 2 * inner if settings.gated else inner
        self.linear_fc1 = DominoAsyncColumnParallelLinear(
            settings.hidden, outputs, group, config, config.init_method, settings.bias
        )
        if settings.gated:  # gate and up of a rank lie side by side, so that its rows are not one run of the whole
            for param in self.linear_fc1.parameters():
                param.partition_stride = 2  # type: ignore[attr-defined]
        with numbers_of_its_own(self.peers):
            self.linear_fc2 = RowParallelLinearNoComm(
                inner, settings.hidden, config, config.output_layer_init_method, settings.bias, skip_bias_add=True
            )
        self.handles: dict[int, Handle] = {}

    def forward(
        self, hidden_states: Tensor | Sequence[Tensor], attention_mask: Tensor | None, rotary_pos_emb: Any = None
    ) -> Any:
        """[sequence, batch, hidden], or its two halves → the same; sums are over when it returns."""
        if isinstance(hidden_states, Tensor):
            return torch.cat(self(_halves(hidden_states), attention_mask, rotary_pos_emb), 1)
        masks = _masks(attention_mask, hidden_states)
        ways = (
            self.turns(half, mask, rotary_pos_emb, at)
            for at, (half, mask) in enumerate(zip(hidden_states, masks, strict=True))
        )
        return tuple(_take_turns(list(ways)))

    def turns(self, hidden: Tensor, mask: Tensor | None, rotary: Any, number: int) -> Turns:
        """The way of a half through the layer; see [Note: turns]."""
        normed = self.input_layernorm(hidden)
        entered = NoOper.apply(normed, self.self_attention.handles, number)  # type: ignore[no-untyped-call]
        summand, bias = self.self_attention(entered, mask, number, rotary)
        output = yield from _summed(summand, self.peers)
        hidden = self.bias_dropout_add_func(output, bias, normed if self.settings.residual_of_norm else hidden)
        normed = self.post_attention_layernorm(hidden)
        entered = NoOper.apply(normed, self.handles, number)  # type: ignore[no-untyped-call]
        summand, bias = self.linear_fc2(self._inside(entered, number))
        output = yield from _summed(summand, self.peers)
        return self.bias_dropout_add_func(output, bias, normed if self.settings.residual_of_norm else hidden)  # type: ignore[no-any-return]

    def _inside(self, entered: Tensor, number: int) -> Tensor:
        wide, _ = self.linear_fc1(entered, self.handles, number)
        if not self.settings.gated:
            return self.settings.activation(wide)
        gate, up = torch.chunk(wide, 2, -1)
        return self.settings.activation(gate) * up


class DominoTransformer(DominoModule):
    """The layers of a stage, with a norm behind the last one of all (`post_process` and `post_layer_norm`).

    Where it is not the first stage (`pre_process` is False), hidden states are those of `set_input_tensor`.
    """

    def __init__(
        self,
        config: Any,
        mpu: Any,
        apply_rotary_pos_emb: Rotate | None,
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
        self.final_layernorm = Settings.of(config).norm() if post_process and post_layer_norm else None

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
        return self._end(
            _take_turns(
                [self._through(*each, rotary_pos_emb, at) for at, each in enumerate(zip(halves, masks, strict=True))]
            )
        )

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

    def _through(self, half: Tensor, mask: Tensor | None, rotary: Any, number: int) -> Turns:
        for layer in self.layers:
            half = yield from layer.turns(half, mask, rotary, number)  # type: ignore[operator]
        return half

    def _end(self, halves: Sequence[Tensor]) -> Tensor:
        hidden = torch.cat(list(halves), 1)
        return hidden if self.final_layernorm is None else self.final_layernorm(hidden)


class _Begin(torch.autograd.Function):
    """Begins the sum of summands over ranks in their own memory; whoever reads it waits for the handle before."""

    @staticmethod
    def forward(ctx: Any, summand: Tensor, peers: Peers, handle: Handle) -> Tensor:
        ctx.mark_dirty(summand)
        handle.work = comm.all_reduce(summand, group=peers.group, async_op=True)
        return summand

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None


def _summed(summand: Tensor, peers: Peers) -> Turns:
    """Begin a sum, let the other half have its turn, and wait."""
    if peers.size == 1:
        return summand
    handle = Handle()
    output = _Begin.apply(summand.contiguous(), peers, handle)  # type: ignore[no-untyped-call]
    yield
    handle.wait()
    return output  # type: ignore[no-any-return]


def _take_turns(ways: Sequence[Turns]) -> list[Tensor]:
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
