"""Images among text, for sequences that ranks share: features of images in the places that tokens keep for them.

Ranks have parts of an image's features, and whole text. Each rank projects its features; all of them come together and
take their places among the embeddings of the text, and each rank goes on with its part of the whole sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.utils.rnn import pad_sequence

from deepspeed.errors import UsageError
from deepspeed.sequence.exchange import lengths_of_ranks, of_all_ranks

__all__ = ["InternVLFusionAdapter", "LlavaFusionAdapter", "ModalityFusionSPAdapter", "Qwen2VLFusionAdapter"]


class _Fusion(nn.Module):
    """What all adapters share; `fuse` says where features go."""

    def __init__(self, projection: nn.Module, process_group: ProcessGroup) -> None:
        super().__init__()
        self.projection, self.process_group = projection, process_group

    def forward(self, visual_features: Tensor, text_embeds: Tensor, input_ids: Tensor) -> Tensor:
        """This rank's part, [batch, part, hidden], padded with zeros behind where ranks do not divide the whole.

        `visual_features` are [batch, this rank's part, width of the image model]; text is whole on every rank.
        """
        size, rank = self.process_group.size(), self.process_group.rank()
        part = self.projection(visual_features)
        whole = of_all_ranks(part, lengths_of_ranks(part, self.process_group), self.process_group)
        fused = self.fuse(whole, text_embeds, input_ids)
        missing = -fused.shape[1] % size
        if missing:
            fused = torch.nn.functional.pad(fused, (0, 0, 0, missing))
        return fused.chunk(size, 1)[rank].contiguous()

    def fuse(self, visual: Tensor, text: Tensor, ids: Tensor) -> Tensor:
        """The whole sequence, of all features and all embeddings."""
        raise UsageError(f"{type(self).__name__} does not say where the features of images go; use a subclass.")


class ModalityFusionSPAdapter(_Fusion):
    """The base of adapters that know images by one token, `image_token_id`; a subclass has `fuse`."""

    def __init__(self, projection: nn.Module, process_group: ProcessGroup, image_token_id: int = -200) -> None:
        super().__init__(projection, process_group)
        self.image_token_id = image_token_id


class LlavaFusionAdapter(ModalityFusionSPAdapter):
    """One token stands for an image, and all of the image's features take its place; rows are padded to the longest."""

    def fuse(self, visual: Tensor, text: Tensor, ids: Tensor) -> Tensor:
        """See `_Fusion`."""
        rows = [self._row(*each) for each in zip(visual, text, ids, strict=True)]
        return pad_sequence(rows, batch_first=True)

    def _row(self, visual: Tensor, text: Tensor, ids: Tensor) -> Tensor:
        places = (ids == self.image_token_id).nonzero().flatten().tolist()
        if not places:
            return text
        if visual.shape[0] % len(places):
            raise UsageError(
                f"a sequence has {len(places)} image tokens ({self.image_token_id}) and {visual.shape[0]} features of "
                "images, which do not go evenly. Give every image as many features."
            )
        pieces, begin = [], 0
        for place, features in zip(places, visual.chunk(len(places)), strict=True):
            pieces += [text[begin:place], features]
            begin = place + 1
        return torch.cat([*pieces, text[begin:]])


class InternVLFusionAdapter(ModalityFusionSPAdapter):
    """Each token that stands for a feature gets one, in their order."""

    def fuse(self, visual: Tensor, text: Tensor, ids: Tensor) -> Tensor:
        """See `_Fusion`."""
        return _placed(visual, text, ids == self.image_token_id)


class Qwen2VLFusionAdapter(_Fusion):
    """What lies between the tokens that begin and end an image gets its features, in their order."""

    def __init__(
        self, projection: nn.Module, process_group: ProcessGroup, vision_start_token_id: int, vision_end_token_id: int
    ) -> None:
        super().__init__(projection, process_group)
        self.vision_start_token_id, self.vision_end_token_id = vision_start_token_id, vision_end_token_id

    def fuse(self, visual: Tensor, text: Tensor, ids: Tensor) -> Tensor:
        """See `_Fusion`."""
        begins, ends = ids == self.vision_start_token_id, ids == self.vision_end_token_id
        inside = (begins.cumsum(1) > ends.cumsum(1)) & ~begins
        return _placed(visual, text, inside)


def _placed(visual: Tensor, text: Tensor, places: Tensor) -> Tensor:
    """Features in some places of the text, row by row."""
    counts = places.sum(1).tolist()
    if any(count not in (0, visual.shape[1]) for count in counts):
        raise UsageError(
            f"the sequences of a batch have {counts} places for features of images, which have {visual.shape[1]} per "
            "sequence on all ranks together. Let them agree; a sequence without images has none."
        )
    taken = visual[places.any(1)].flatten(0, 1).to(text.dtype)
    return text.masked_scatter(places[..., None].expand_as(text), taken)
