"""The loss of a Transformers model over logits that stay split by vocabulary.

Such a model computes its loss by `self.loss_function`, which can be another function. In training, with labels, the
output layer then returns this rank's part of the logits and the loss is computed from all parts; without labels, or in
eval mode, it gathers them, so that generation and metrics see what they expect.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from deepspeed.errors import UsageError
from deepspeed.log import log_dist
from deepspeed.parallel.regions import split_cross_entropy
from deepspeed.tensor_parallel.layers import ShardInfo, share_of
from deepspeed.tensor_parallel.plan import SplitPlan

TileLoss = Callable[[nn.Module, Tensor, Tensor, int], Tensor]
"""(output layer, hidden states, labels, the label that does not count) → the sum of the losses of these tokens."""

_CAUSAL, _KINDS = "ForCausalLM", ("ForCausalLM", "ForMaskedLM")


def split_logits(model: nn.Module, plan: SplitPlan) -> SplitLogits | None:
    """How the model's loss takes split logits, where its class lets it; tells where logits are gathered instead."""
    (change, *others) = plan.heads
    owner = _owner(model, change.module)
    share = share_of(change.module)
    assert share is not None, "the plan's output layer was split"
    kind = getattr(owner, "loss_type", None)
    if others:
        reason = f"it has {1 + len(others)} output layers"
    elif change.path.endswith(".base_layer"):
        reason = "its output layer has an adapter"
    elif owner is None:
        reason = "its class computes the loss by itself, not by self.loss_function"
    elif kind not in _KINDS:
        reason = f"its loss is of the type {kind!r}"
    else:
        return SplitLogits(owner, share, kind)
    log_dist(f"vocab_parallel_lm_head: logits of {type(model).__name__} are gathered, because {reason}")
    return None


def _owner(model: nn.Module, head: nn.Module) -> Any:
    """The module whose forward computes a loss of the head's logits by `self.loss_function`."""
    for module in model.modules():
        if any(child is head for child in module.children()) and hasattr(type(module), "loss_function"):
            source = inspect.getsource(inspect.unwrap(type(module).forward))
            return module if "self.loss_function(" in source else None
    return None


class SplitLogits:
    """`loss_function(logits=…, labels=…, vocab_size=…, …)` of a model whose logits may be split."""

    def __init__(self, owner: Any, share: ShardInfo, kind: str) -> None:
        """`owner` computes its loss by `self.loss_function`, and `share` is that of its output layer."""
        self.owner, self.share, self.kind = owner, share, kind
        self.whole: Callable[..., Tensor] = owner.loss_function

    def attach(self) -> TileLoss | None:
        """Let the model's own forward keep logits split; a loss of some tokens comes back, for causal models."""
        self.owner.loss_function = self
        self.owner.register_forward_pre_hook(self._begin, with_kwargs=True)
        self.owner.register_forward_hook(self._end, always_call=True)
        return self._sum_of_tile if self.kind == _CAUSAL else None

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a forward: logits stay split if it trains and computes a loss."""
        given = kwargs.get("labels")
        if given is None and args:
            names = list(inspect.signature(inspect.unwrap(type(module).forward)).parameters)[1:]
            given = dict(zip(names, args, strict=False)).get("labels")
        self.share.keep_split = given is not None and module.training

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        """After a forward, however it ended."""
        self.share.keep_split = False

    def _sum_of_tile(self, head: nn.Module, hidden: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        """A `TileLoss`. It says by itself that logits stay split, because backward computes a tile once more."""
        with self.kept():
            logits = head(hidden)
        return self._losses(logits, labels, ignore_index).sum()

    def _losses(self, logits: Tensor, target: Tensor, ignored: int) -> Tensor:
        """Of every token, from this rank's part of the logits."""
        axis = self.share.axis
        return split_cross_entropy(logits, target, sum(self.share.sizes[: axis.rank]), axis.group, ignored)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Logits that are computed inside stay split, and the loss takes them so."""
        before, self.share.keep_split = self.share.keep_split, True
        try:
            yield
        finally:
            self.share.keep_split = before

    def __call__(self, logits: Tensor, labels: Tensor, vocab_size: int, **options: Any) -> Tensor:
        if not self.share.keep_split:
            return self.whole(logits, labels, vocab_size, **options)
        strange = [name for name in options if name in ("weight", "label_smoothing", "reduction")]
        if strange:
            raise UsageError(
                f"the model's loss is asked for {', '.join(strange)}, which the loss over a split vocabulary does not "
                "have. Set tensor_parallel.vocab_parallel_lm_head to false"
            )
        ignored = -100 if options.get("ignore_index") is None else options["ignore_index"]
        target = options.get("shift_labels") if self.kind == _CAUSAL else labels
        if target is None:
            if labels is None:
                raise UsageError("the loss of a causal language model needs labels or shift_labels; both are None")
            target = F.pad(labels, (0, 1), value=ignored)[..., 1:].contiguous()
        target = target.to(logits.device)
        items = options.get("num_items_in_batch")
        items = (target != ignored).sum() if items is None else items
        return self._losses(logits, target, ignored).sum() / (
            items.to(logits.device) if isinstance(items, Tensor) else items
        )
