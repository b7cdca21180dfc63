"""AutoSP: what a script calls before a forward whose sequences the engine shares over ranks."""

from __future__ import annotations

from torch import Tensor

from deepspeed.errors import UsageError


def prepare_autosp_inputs(
    input_id: Tensor,
    label_id: Tensor,
    position_id: Tensor | None = None,
    attention_mask: Tensor | None = None,
    seq_dim: int = 1,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Check a batch of whole sequences and return it as it is: the engine takes this rank's part of each."""
    given = {"input_id": input_id, "label_id": label_id, "position_id": position_id, "attention_mask": attention_mask}
    for name, each in given.items():
        if each is None and name not in ("input_id", "label_id"):
            continue
        shape = tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__
        if not isinstance(each, Tensor) or each.dim() != 2 or each.shape[1] != input_id.shape[1]:
            raise UsageError(
                f"prepare_autosp_inputs got {name} {shape} with input_id of shape {tuple(input_id.shape)}; expected "
                "tensors of [batch, length] with the same length"
            )
    if seq_dim not in (1, -1):
        raise UsageError(f"prepare_autosp_inputs got seq_dim {seq_dim}; sequences lie along dim 1, [batch, length]")
    return input_id, label_id, position_id, attention_mask
