"""What a rank holds of named tensors, as values: fragments, intervals, boxes and flat layouts. No ranks, no devices."""

from deepspeed.fragments.boxes import Box, boxes
from deepspeed.fragments.flat import Block, FlatLayout, Striped, round_robin
from deepspeed.fragments.fragment import Fragment, intersection

__all__ = ["Block", "Box", "FlatLayout", "Fragment", "Striped", "boxes", "intersection", "round_robin"]
