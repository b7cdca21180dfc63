"""Computations that treat tokens one by one, tile by tile along the sequence: what they need inside exists for a tile.

[Note: one graph] Each tile is a checkpoint: its inside is thrown away and computed again when its gradient is due. All
tiles are parts of one autograd graph, which gives a parameter its gradient once, so that ZeRO and accumulation see what
they would see without tiles.

[Note: logits that never are] While a loss is wanted, the head of a causal model hands its input through, and the loss
function calls the head tile by tile. It insists on the very memory that the head was given, unchanged: a model that
does something to its logits in between would be wrong.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.log import log_dist
from deepspeed.sequence.inputs import IGNORED, shifted
from deepspeed.transformers.attention import has_causal_loss, models_in
from deepspeed.transformers.replacement import put_attribute

if TYPE_CHECKING:
    from deepspeed.config.parallel import SequenceParallelConfig


def sequence_tiled_compute(
    fn: Callable[..., Any],
    seqlen: int,
    shards: int,
    kwargs_to_shard: Mapping[str, Any],
    kwargs_to_pass: Mapping[str, Any],
    grad_requiring_tensor_key: str,
    compute_params: Sequence[Tensor] | None = None,
    output_unshard_dimension: int = 1,
    output_reduction: str | None = "mean",
) -> Any:
    """`fn(**kwargs)` over tiles of the sequence, dim 1 of what is in `kwargs_to_shard`.

    Outputs of tiles are concatenated along `output_unshard_dimension`, or stacked where that is 0 and where they are
    scalars; then `output_reduction` takes the "mean" or the "sum" of all numbers, or with None leaves them. Which
    parameters take part is found by autograd itself; `compute_params` may name them and is not needed. Where `shards`
    do not divide `seqlen`, the last tile is shorter.
    """
    if grad_requiring_tensor_key not in kwargs_to_shard:
        raise UsageError(
            f"grad_requiring_tensor_key is {grad_requiring_tensor_key!r}, which is none of what is cut into tiles: "
            f"{sorted(kwargs_to_shard)}."
        )
    if output_reduction not in (None, "mean", "sum"):
        raise UsageError(f"output_reduction is {output_reduction!r}; expected None, 'mean' or 'sum'.")
    tiles = {name: _tiles(name, value, seqlen, shards) for name, value in kwargs_to_shard.items()}
    outputs = []
    for tile in range(len(tiles[grad_requiring_tensor_key])):
        part = {name: value[tile] for name, value in tiles.items()}
        outputs.append(checkpoint(fn, use_reentrant=False, **part, **kwargs_to_pass))
    return _join(outputs, output_unshard_dimension, output_reduction)


class SequenceTiledCompute:
    """`sequence_tiled_compute` in the shape of an autograd function."""

    @staticmethod
    def apply(
        fn: Callable[..., Any],
        seqlen: int,
        shards: int,
        keys_to_shard: Sequence[str],
        keys_to_pass: Sequence[str],
        grad_requiring_tensor_key: str,
        compute_params: Sequence[Tensor] | None,
        output_unshard_dimension: int,
        output_reduction: str | None,
        *args: Any,
    ) -> Any:
        """`args` are the values of `keys_to_shard`, then those of `keys_to_pass`."""
        cut = len(keys_to_shard)
        cut_up = dict(zip(keys_to_shard, args[:cut], strict=True))
        passed = dict(zip(keys_to_pass, args[cut:], strict=True))
        key, dim = grad_requiring_tensor_key, output_unshard_dimension
        return sequence_tiled_compute(fn, seqlen, shards, cut_up, passed, key, compute_params, dim, output_reduction)


class TiledMLP:
    """An MLP over tiles: `TiledMLP.apply(fn, module, x, shards, compute_params)` is `fn(module, x)`."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        self: Any,
        x: Tensor,
        shards: int,
        compute_params: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """`x` is [batch, length, width] or [length, width]."""
        along = x.dim() - 2
        parts = x.split(_size(x.shape[along], shards), along)
        return torch.cat([checkpoint(fn, self, part, use_reentrant=False) for part in parts], along)


class TiledFusedLogitsLoss:
    """Logits and their loss over tiles, so that logits exist for a tile only."""

    @staticmethod
    def apply(
        fn: Callable[..., Tensor],
        self: Any,
        x: Tensor,
        y: Tensor,
        mask: Tensor | None,
        shards: int,
        compute_params: Sequence[Tensor] | None,
        output_reduction: str,
    ) -> Tensor:
        """`fn(module, x, y)` of tiles of all tokens in one row, added up ("sum") or averaged ("mean").

        `x` and `y` are [batch, length, …] and tiles of them [tokens, …]; a tile of `mask`, [batch, length], is a fourth
        argument of `fn` where there is one.
        """
        _agree(x, y, mask)
        rows = [each.flatten(0, 1) for each in (x, y, mask) if each is not None]
        return loss_over_tiles(fn, self, rows, 0, shards, output_reduction)


def loss_over_tiles(
    fn: Callable[..., Tensor], self: Any, given: Sequence[Tensor], dim: int, shards: int, reduction: str
) -> Tensor:
    """`fn(module, *tiles)` of tensors that are cut along `dim`, added up ("sum") or averaged ("mean")."""
    if reduction not in ("mean", "sum"):
        raise UsageError(f"output_reduction is {reduction!r}; losses of tiles are joined by 'mean' or 'sum'.")
    tiles = zip(*(each.split(_size(each.shape[dim], shards), dim) for each in given), strict=True)
    return _join([checkpoint(fn, self, *tile, use_reentrant=False) for tile in tiles], 0, reduction)  # type: ignore[no-any-return]


def _agree(x: Tensor, y: Tensor, mask: Tensor | None) -> None:
    """An error unless there is a label, and with a mask a place in it, for each token."""
    shapes = {name: tuple(each.shape) for name, each in (("x", x), ("y", y), ("mask", mask)) if each is not None}
    short = min(map(len, shapes.values())) < 2 or (mask is not None and mask.dim() != 2)
    if short or len({shape[:2] for shape in shapes.values()}) > 1:
        found = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise UsageError(f"found {found}; expected x and y as [batch, length, …] and mask as [batch, length].")


def _size(length: int, shards: int) -> int:
    """Tokens of a tile, all but the last of equal size."""
    if not isinstance(shards, int) or shards < 1:
        raise UsageError(f"the number of tiles is {shards!r}; expected a whole number above zero.")
    return max(1, -(-length // shards))


def _tiles(name: str, value: Any, seqlen: int, shards: int) -> Sequence[Any]:
    if value is None:
        return [None] * len(range(0, seqlen, _size(seqlen, shards)))
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != seqlen:
        found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise UsageError(
            f"{name} is to be cut into tiles of a sequence of {seqlen}; found {found}, expected [batch, "
            f"{seqlen}, …]. Put it into kwargs_to_pass if it is the same for all tiles."
        )
    return list(value.split(_size(seqlen, shards), 1))


def _join(outputs: list[Any], dim: int, reduction: str | None) -> Any:
    if isinstance(outputs[0], tuple):
        return tuple(_join(list(each), dim, reduction) for each in zip(*outputs, strict=True))
    joined = torch.cat(outputs, dim) if dim and outputs[0].dim() else torch.stack(outputs)
    if reduction is None:
        return joined
    return joined.mean() if reduction == "mean" else joined.sum()


Forward = Callable[..., Any]
TileLoss = Callable[[Any, Tensor, Tensor, int], Tensor]
"""(head, hidden states of a tile, labels, the label that does not count) → the sum of the losses of these tokens."""
Entrance = Callable[[nn.Module, ExitStack], tuple[Callable[[Tensor], Tensor], int] | None]
"""A module whose ranks have parts of a sequence → how a part becomes whole, and how many times more tokens that are."""
_MLPS, _NORMS = ("MLP", "FeedForward"), ("RMSNorm", "LayerNorm")  # how the names of their classes end


def tile_model(
    section: SequenceParallelConfig,
    module: nn.Module,
    stack: ExitStack,
    forward: Forward,
    tile_loss: TileLoss | None = None,
    entrance: Entrance | None = None,
) -> Forward:
    """`forward` of a model whose parts run over tiles, until the stack is closed; itself where none are asked for.

    `tile_loss` takes the place of head and cross-entropy, where ranks share the vocabulary; `entrance` is asked where
    sequences stay split between layers that ranks share.
    """
    compute, loss = section.tiled_compute, section.tiled_loss
    if compute is None and loss is None:
        return forward
    models = models_in(module)
    if not models:
        key = "tiled_loss" if compute is None else "tiled_compute"
        raise _error(
            key,
            f"{type(module).__name__} is no model of Transformers and has none in it. Leave it out, and use TiledMLP "
            "and TiledFusedLogitsLoss in the model",
        )
    if compute is not None:
        _tile_layers(models[0], compute, stack, entrance)
    return forward if loss is None else _TiledLoss(models[0], loss, stack, forward, tile_loss)


def _tile_layers(model: Any, tokens: int, stack: ExitStack, entrance: Entrance | None) -> None:
    """Every MLP and norm of a layer, and the norms outside of layers."""
    found = [each for each in model.modules() if type(each).__name__.endswith((*_MLPS, *_NORMS)) and _takes_one(each)]
    mlps = [each for each in found if type(each).__name__.endswith(_MLPS)]
    if not mlps:
        raise _error(
            "tiled_compute",
            f"{type(model).__name__} has no MLP that takes hidden states alone: no class whose name ends with "
            f"{' or '.join(_MLPS)}. Leave it out",
        )
    for each in found:
        _tile(each, tokens, stack, entrance)
    log_dist(f"tiles of {tokens} tokens: {len(mlps)} MLPs, {len(found) - len(mlps)} norms", ranks=[0])


def _takes_one(module: nn.Module) -> bool:
    needed = [each for each in inspect.signature(module.forward).parameters.values() if each.default is each.empty]
    return len(needed) == 1 and needed[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


def _tile(module: nn.Module, tokens: int, stack: ExitStack, entrance: Entrance | None) -> None:
    """Let a module compute hidden states, [batch, length, width], over tiles.

    Where ranks have parts of a sequence, a tile is made of some tokens of each: it is gathered, computed and given back
    to them before the next.
    """
    whole, found = module.forward, None if entrance is None else entrance(module, stack)
    inside = whole if found is None else _entered(whole, found[0])
    own = tokens if found is None else max(1, tokens // found[1])

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or hidden.dim() != 3 or hidden.shape[1] <= own:
            return inside(hidden, *args, **kwargs)
        return TiledMLP.apply(lambda _, part: inside(part.contiguous()), module, hidden, -(-hidden.shape[1] // own))

    stack.callback(put_attribute(module, "forward", forward))


def _entered(whole: Forward, enter: Callable[[Tensor], Tensor]) -> Forward:
    return lambda hidden, *args, **kwargs: whole(enter(hidden), *args, **kwargs)


class _TiledLoss:
    """A causal model's forward in which logits exist for a tile; see [Note: logits that never are]."""

    def __init__(self, model: Any, tokens: int, stack: ExitStack, forward: Forward, tile_loss: TileLoss | None) -> None:
        known = tile_loss is not None or has_causal_loss(model)
        self._model, self._name, self._tokens, self._forward = model, type(model).__name__, tokens, forward
        self._takes = inspect.signature(model.forward)
        self._head: Any = model.get_output_embeddings()
        self._tile_loss = tile_loss or _whole_vocabulary
        both = model.config.is_encoder_decoder  # T5's has such a loss function, which it does not call
        if self._head is None or not known or both:
            raise _error(
                "tiled_loss",
                f"{self._name} is no causal model with a head and Transformers' loss for it. Leave it out, and use "
                "TiledFusedLogitsLoss in the model",
            )
        self._head_whole, self._loss_whole = self._head.forward, model.loss_function
        self._wanted = False
        self._pending: tuple[Tensor, int] | None = None
        stack.callback(put_attribute(self._head, "forward", self._hand_through))
        stack.callback(put_attribute(model, "_loss_function", self._loss))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._model.training or self._labels(args, kwargs) is None:
            return self._forward(*args, **kwargs)
        self._wanted = True
        try:
            outputs = self._forward(*args, **kwargs)
            if self._pending is not None or self._wanted:
                raise self._unfit("computes its loss without Transformers' loss function")
        finally:
            self._wanted, self._pending = False, None
        return _without_logits(outputs)

    def _labels(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not args:
            return kwargs.get("labels")
        names = list(self._takes.parameters)
        return {**dict(zip(names, args, strict=False)), **kwargs}.get("labels")

    def _hand_through(self, hidden: Tensor) -> Tensor:
        if not self._wanted:
            return self._head_whole(hidden)  # type: ignore[no-any-return]
        if self._pending is not None:
            raise self._unfit("calls its head twice")
        self._pending = hidden, hidden._version
        return hidden

    def _loss(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """In the place of `ForCausalLMLoss`."""
        if not self._wanted:
            options = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index}
            return self._loss_whole(  # type: ignore[no-any-return]
                logits, labels, vocab_size, shift_labels=shift_labels, **options, **others
            )
        hidden = self._unchanged(logits)
        self._wanted, self._pending = False, None  # from now on the head is itself, also when a tile is run again
        if shift_labels is None:
            assert labels is not None, "a loss is wanted where there are labels"
            shift_labels = shifted(labels, ignore_index)
        shift_labels = shift_labels.to(hidden.device)
        if shift_labels.shape != hidden.shape[:2]:
            raise UsageError(
                f"{self._name} has hidden states {tuple(hidden.shape)} and labels {tuple(shift_labels.shape)}; "
                "sequence_parallel.tiled_loss needs a label for each token. Leave logits_to_keep out."
            )

        def part(head: Any, some: Tensor, wanted: Tensor) -> Tensor:
            return self._tile_loss(head, some, wanted, ignore_index)

        tiles = max(1, -(-hidden.shape[1] // self._tokens))
        total = loss_over_tiles(part, self._head, [hidden, shift_labels], 1, tiles, "sum")
        if num_items_in_batch is not None:
            return total / torch.as_tensor(num_items_in_batch, device=total.device)
        return total / (shift_labels != ignore_index).sum()

    def _unchanged(self, logits: Tensor) -> Tensor:
        """What the head got, or an error where that is not what arrived."""
        if self._pending is None:
            raise self._unfit("computes logits without its head")
        hidden, version = self._pending
        same = (logits.data_ptr(), logits.shape, logits.stride()) == (hidden.data_ptr(), hidden.shape, hidden.stride())
        if not same or logits.dtype != hidden.dtype or hidden._version != version:
            raise self._unfit("changes its logits before the loss (a scale or a soft cap, say)")
        return logits

    def _unfit(self, what: str) -> UsageError:
        return UsageError(
            f"{self._name} {what}, so that its loss cannot be computed over tiles. Leave sequence_parallel.tiled_loss "
            "out."
        )


def _whole_vocabulary(head: Any, hidden: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
    logits = head(hidden).float().flatten(0, 1)
    return nn.functional.cross_entropy(logits, labels.flatten(), ignore_index=ignore_index, reduction="sum")


def _without_logits(outputs: Any) -> Any:
    """Nobody may take hidden states for logits."""
    if isinstance(outputs, tuple):
        return (outputs[0], None, *outputs[2:])
    outputs["logits"] = None
    return outputs


def _error(key: str, text: str) -> DeepSpeedConfigError:
    path = f"sequence_parallel.{key}"
    return DeepSpeedConfigError(f"{path} is given, but {text}.", path=path)
