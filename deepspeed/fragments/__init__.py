"""What a rank holds of named tensors, as values: fragments, intervals, boxes and flat layouts. No ranks, no devices."""

from deepspeed.fragments.boxes import Box, boxes
from deepspeed.fragments.flat import Block, FlatLayout, Striped, round_robin
from deepspeed.fragments.fragment import Fragment, intersection
from deepspeed.fragments.split import Split, deal, even, side_by_side

__all__ = [
    "Block",
    "Box",
    "FlatLayout",
    "Fragment",
    "Split",
    "Striped",
    "boxes",
    "deal",
    "even",
    "intersection",
    "round_robin",
    "side_by_side",
]
