"""`UlyssesSPViTAttention`: attention over images whose patches ranks share, around any attention module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed.errors import UsageError
from deepspeed.sequence.exchange import gather_heads, lengths_of_ranks, of_all_ranks, padded, scatter_heads, unpadded
from deepspeed.sequence.heads import shares

__all__ = ["UlyssesSPViTAttention"]


class UlyssesSPViTAttention(nn.Module):
    """Runs `attn` over whole images; hidden states are [images, this rank's patches, hidden].

    A class token goes first on every rank (`has_cls_token`). Ranks exchange patches for images: each computes some
    images whole. Where there are fewer images than ranks, or a mask comes with them, each computes all of them. Ranks
    may have different numbers of patches: they are padded on the way, and `attn` sees no padding.
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
        lengths = lengths_of_ranks(hidden_states, group)
        own = lengths[group.rank()]
        if images < group.size() or any(isinstance(each, Tensor) for each in kwargs.values()):
            found = self.attn(self._together(of_all_ranks(hidden_states, lengths, group), lengths), **kwargs)
            return _changed(found, lambda out: self._apart(out, lengths)[group.rank()][:, :own])
        counts = shares(images, group.size())
        sent = padded(hidden_states, max(lengths)).transpose(0, 1)[None]
        mine = unpadded(scatter_heads(sent, counts, group)[0].transpose(0, 1), lengths)
        found = self.attn(self._together(mine, lengths), **kwargs)

        def back(out: Tensor) -> Tensor:
            parts = torch.cat(self._apart(out, lengths), 1).transpose(0, 1)[None]
            return gather_heads(parts, counts, group)[0].transpose(0, 1)[:, :own]

        return _changed(found, back)

    def _together(self, parts: Tensor, lengths: Sequence[int]) -> Tensor:
        """Parts of all ranks, each behind its class token, as one image behind one."""
        if not self.has_cls_token:
            return parts.contiguous()
        pieces = parts.split(list(lengths), 1)
        return torch.cat([pieces[0][:, :1], *(piece[:, 1:] for piece in pieces)], 1)

    def _apart(self, whole: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """The other way, each part padded to the longest."""
        first = int(self.has_cls_token)
        patches = whole[:, first:].split([length - first for length in lengths], 1)
        return [padded(torch.cat([whole[:, :first], each], 1), max(lengths)) for each in patches]


def _changed(found: Any, change: Any) -> Any:
    """The same structure with hidden states of another length; what an attention returns besides is of whole images."""
    return (change(found[0]), *found[1:]) if isinstance(found, tuple) else change(found)
