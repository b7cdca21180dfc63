"""`UlyssesSPViTAttention`: attention over images whose patches ranks share, around any attention module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed.errors import UsageError
from deepspeed.sequence.exchange import gather_heads, of_all_ranks, scatter_heads
from deepspeed.sequence.heads import shares

__all__ = ["UlyssesSPViTAttention"]


class UlyssesSPViTAttention(nn.Module):
    """Runs `attn` over whole images; hidden states are [images, this rank's patches, hidden], equally many per rank.

    A class token goes first on every rank (`has_cls_token`). Ranks exchange patches for images: each computes some
    images whole. Where there are fewer images than ranks, or a mask comes with them, each computes all of them.
    """

    def __init__(self, attn: nn.Module, process_group: ProcessGroup, has_cls_token: bool = True) -> None:
        super().__init__()
        self.attn, self.process_group, self.has_cls_token = attn, process_group, has_cls_token

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        """What `attn` returns, of this rank's patches; `kwargs` are for whole images."""
        if hidden_states.dim() != 3:
            raise UsageError(
                f"UlyssesSPViTAttention got hidden states of shape {tuple(hidden_states.shape)}; expected [images, "
                "patches, hidden]."
            )
        group, images = self.process_group, hidden_states.shape[0]
        if group.size() == 1:
            return self.attn(hidden_states, **kwargs)
        if images < group.size() or any(isinstance(each, Tensor) for each in kwargs.values()):
            found = self.attn(self._together(of_all_ranks(hidden_states, group)), **kwargs)
            return _changed(found, lambda out: self._apart(out).chunk(group.size(), 1)[group.rank()])
        counts = shares(images, group.size())
        mine = scatter_heads(hidden_states.transpose(0, 1)[None], counts, group)[0].transpose(0, 1)
        found = self.attn(self._together(mine), **kwargs)
        return _changed(
            found, lambda out: gather_heads(self._apart(out).transpose(0, 1)[None], counts, group)[0].transpose(0, 1)
        )

    def _together(self, parts: Tensor) -> Tensor:
        """Parts of all ranks, each behind its class token, as one image behind one."""
        if not self.has_cls_token:
            return parts.contiguous()
        each = parts.unflatten(1, (self.process_group.size(), -1))
        return torch.cat([each[:, 0, :1], each[:, :, 1:].flatten(1, 2)], 1)

    def _apart(self, whole: Tensor) -> Tensor:
        """The other way."""
        if not self.has_cls_token:
            return whole
        each = whole[:, 1:].unflatten(1, (self.process_group.size(), -1))
        tokens = whole[:, None, :1].expand(-1, each.shape[1], -1, -1)
        return torch.cat([tokens, each], 2).flatten(1, 2)


def _changed(found: Any, change: Any) -> Any:
    """The same structure with hidden states of another length; what an attention returns besides is of whole images."""
    return (change(found[0]), *found[1:]) if isinstance(found, tuple) else change(found)
