"""Layouts of sparse attention: the blocks that each pattern means, block by block, and what contradicts itself."""

from __future__ import annotations

import pytest
import torch

from deepspeed.errors import UsageError
from deepspeed.ops.sparse_attention import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)


def rows(layout):
    """A head as text: a line for each row, x where there is a block."""
    return ["".join("x" if each else "." for each in row) for row in layout.tolist()]


LAYOUTS = {
    "dense": (DenseSparsityConfig(1, block=2), 3, ["xxx", "xxx", "xxx"]),
    "fixed": (
        FixedSparsityConfig(1, block=2, num_local_blocks=2),
        5,
        ["xx.xx", "xx.xx", ".xxxx", ".xxxx", ".x.xx"],
    ),
    "fixed, one way": (
        FixedSparsityConfig(1, block=2, num_local_blocks=2, attention="unidirectional"),
        5,
        ["x....", "xx...", ".xx..", ".xxx.", ".x.xx"],
    ),
    "fixed, both ways global": (
        FixedSparsityConfig(1, block=2, num_local_blocks=2, horizontal_global_attention=True),
        4,
        ["xx.x", "xxxx", ".xxx", "xxxx"],
    ),
    "variable": (
        VariableSparsityConfig(
            1, block=2, local_window_blocks=[1, 2], global_block_indices=[0, 3], global_block_end_indices=[1, 5]
        ),
        6,
        ["x..xx.", "xxxxx.", "xxxxx.", "x..xx.", "x..xx.", "x..xxx"],
    ),
    "bigbird": (
        BigBirdSparsityConfig(1, block=2, num_random_blocks=0),
        5,
        ["xxxxx", "xxx..", "xxxx.", "x.xxx", "x..xx"],
    ),
    "bslongformer": (
        BSLongformerSparsityConfig(1, block=2, global_block_indices=[4], attention="unidirectional"),
        5,
        ["x....", "xx...", ".xx..", "..xx.", "xxxxx"],
    ),
    "window": (LocalSlidingWindowSparsityConfig(1, block=2), 4, ["x...", "xx..", ".xx.", "..xx"]),
    "window, both ways": (
        LocalSlidingWindowSparsityConfig(1, block=2, attention="bidirectional", num_sliding_window_blocks=4),
        4,
        ["xxx.", "xxxx", "xxxx", ".xxx"],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout(name):
    config, blocks, expected = LAYOUTS[name]
    layout = config.make_layout(2 * blocks)
    assert layout.dtype == torch.int64
    assert rows(layout[0]) == expected


def test_windows_of_several_sizes_go_on_with_the_last():
    config = VariableSparsityConfig(1, block=1, local_window_blocks=[1, 2], global_block_indices=[])
    assert rows(config.make_layout(6)[0]) == ["x.....", ".xx...", ".xx...", "...xx.", "...xx.", ".....x"]
    wide = VariableSparsityConfig(
        1, block=1, local_window_blocks=[1], global_block_indices=[1], global_block_end_indices=[3],
        horizontal_global_attention=True,
    )  # fmt: skip
    assert rows(wide.make_layout(4)[0]) == ["xxx.", "xxxx", "xxxx", ".xxx"]


def test_heads_take_turns_in_what_is_global():
    config = FixedSparsityConfig(
        3, block=1, different_layout_per_head=True, num_local_blocks=2, num_different_global_patterns=2
    )
    layout = config.make_layout(4)
    assert rows(layout[0]) == ["xx.x", "xx.x", ".xxx", ".xxx"]
    assert rows(layout[1]) == ["xxx.", "xxx.", "x.xx", "x.xx"]
    assert torch.equal(layout[0], layout[2])


@pytest.mark.parametrize("kind", [VariableSparsityConfig, BigBirdSparsityConfig])
@pytest.mark.parametrize("attention", ["bidirectional", "unidirectional"])
def test_random_blocks(kind, attention):
    """As many as asked for in each row, other ones for other heads and seeds, and the same in every process."""
    plain = {"num_global_blocks": 0, "num_sliding_window_blocks": 1} if kind is BigBirdSparsityConfig else {}
    plain = plain or {"global_block_indices": [], "local_window_blocks": [1]}
    given = {"block": 1, "different_layout_per_head": True, "attention": attention, **plain}
    layout = kind(2, num_random_blocks=3, **given).make_layout(16)
    without = kind(2, num_random_blocks=0, **given).make_layout(16)
    counts = layout.sum(-1)
    causal = attention == "unidirectional"
    for row in range(16):
        free = min(3, row + 1) if causal else 3
        assert set(counts[:, row].tolist()) <= {free, free + 1}  # the diagonal may be one of them
    assert bool((layout >= without).all())
    assert not causal or torch.equal(layout, layout.tril())
    assert not torch.equal(layout[0], layout[1])
    torch.manual_seed(5)
    assert torch.equal(layout, kind(2, num_random_blocks=3, **given).make_layout(16))
    assert not torch.equal(layout, kind(2, num_random_blocks=3, seed=1, **given).make_layout(16))
    alike = kind(2, num_random_blocks=3, **{**given, "different_layout_per_head": False}).make_layout(16)
    assert torch.equal(alike[0], alike[1])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: FixedSparsityConfig(2).make_layout(40), "40 tokens was asked for, and block is 16.* such as 48"),
        (lambda: SparsityConfig(2).make_layout(32), "SparsityConfig has no pattern"),
        (lambda: FixedSparsityConfig(0), "num_heads is 0; expected a whole number from 1 on"),
        (lambda: FixedSparsityConfig(2, num_local_blocks=4, num_global_blocks=3), "second must divide the first"),
        (lambda: FixedSparsityConfig(2, num_different_global_patterns=5), "at most 4"),
        (lambda: FixedSparsityConfig(2, num_different_global_patterns=2), "set different_layout_per_head to true"),
        (lambda: FixedSparsityConfig(2, attention="both"), "'both'; expected 'bidirectional' or 'unidirectional'"),
        (
            lambda: FixedSparsityConfig(2, attention="unidirectional", horizontal_global_attention=True),
            "horizontal_global_attention is true",
        ),
        (lambda: VariableSparsityConfig(2, local_window_blocks=[]), "local_window_blocks is empty"),
        (lambda: VariableSparsityConfig(2, global_block_indices=[2], global_block_end_indices=[2]), "above its start"),
        (lambda: BSLongformerSparsityConfig(2, global_block_indices=[1], global_block_end_indices=[]), "as many ends"),
        (lambda: BigBirdSparsityConfig(2, num_random_blocks=3).make_layout(32), "num_random_blocks is 3, .* 2 blocks"),
        (lambda: LocalSlidingWindowSparsityConfig(2).make_layout(32), "num_sliding_window_blocks is 3"),
    ],
)
def test_what_contradicts_itself_is_refused(make, said):
    with pytest.raises(UsageError, match=said):
        make()
