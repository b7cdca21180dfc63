"""Attention over pages: the reference beside dense formulas, the kernels beside the reference."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

from tests.covering import pairs
from tests.unit.ops.model.interpreted import DEVICE, numbers

from deepspeed.ops.generate.attention import AttentionOptions, paged_attention, paged_attention_reference  # isort: skip
from deepspeed.ops.generate.kernels import attention as kernels

E4M3 = torch.float8_e4m3fn
SIZE = 8


class Scene:
    """Sequences of random tokens in random blocks; what no token is in holds NaN."""

    def __init__(self, counts, lengths, *, group=2, heads=2, widths=(16, 16), dtype=torch.float32, padding=2, **keys):
        self.counts, self.lengths, self.group, self.heads, self.widths = counts, lengths, group, heads, widths
        blocks = max(math.ceil(length / SIZE) for length in lengths) + 1
        count = len(lengths) * blocks + 2
        order = torch.randperm(count, generator=torch.Generator().manual_seed(1))[: len(lengths) * blocks]
        self.tables = order.view(len(lengths), blocks).int().to(DEVICE)
        self.query = numbers(sum(counts) + padding, group * heads, widths[0], dtype=dtype)
        self.starts = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device=DEVICE)
        self.sizes = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        store = keys.pop("store", dtype)
        # As views of one pool, in which the blocks of a layer lie apart.
        pool = torch.full((count, 2, SIZE, heads * sum(widths)), float("nan"), dtype=dtype, device=DEVICE)
        parts = pool[:, 1].flatten(1).split([SIZE * heads * width for width in widths], 1)
        self.pages = [part.view(count, SIZE, heads, width) for part, width in zip(parts, widths, strict=True)]
        self.tokens = [
            [numbers(length, heads, width, dtype=dtype, seed=s + 50 * at) for s, length in enumerate(lengths)]
            for at, width in enumerate(widths)
        ]
        for pages, tokens in zip(self.pages, self.tokens, strict=True):
            for s, each in enumerate(tokens):
                for position, token in enumerate(each):
                    pages[self.tables[s, position // SIZE].long(), position % SIZE] = token
        if store != dtype:
            self.pages = [pages.to(store) for pages in self.pages]
            self.tokens = [[each.to(store).to(dtype) for each in tokens] for tokens in self.tokens]
        keys = {key: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for key, value in keys.items()}
        self.options = AttentionOptions(widths[0] ** -0.5, max(counts), **keys)

    @property
    def arguments(self):
        return self.query, *self.pages, self.tables, self.starts, self.sizes, self.options

    def dense(self):
        """What each query gets, by the formula in float64, one query and head at a time."""
        o, results = self.options, []
        for s, (count, length) in enumerate(zip(self.counts, self.lengths, strict=True)):
            for at in range(count):
                place, rows = length - count + at, []
                for head in range(self.group * self.heads):
                    source = head // self.group
                    key, value = (tokens[s][:, source].double() for tokens in self.tokens)
                    key = key if o.key_scale is None else key * o.key_scale.view(-1)[source % o.key_scale.numel()]
                    value = value if o.value_scale is None else value * o.value_scale.view(-1)[0]
                    scores = key @ self.query[int(self.starts[s]) + at, head].double() * o.scale
                    if o.soft_cap is not None:
                        scores = o.soft_cap * torch.tanh(scores / o.soft_cap)
                    behind = place - torch.arange(length, device=DEVICE)
                    if o.alibi is not None:
                        scores = scores - o.alibi[head].double() * behind
                    seen = behind >= 0
                    if o.window is not None:
                        seen = seen & (behind < o.window)
                    weights = scores[seen].exp()
                    total = weights.sum() + (0 if o.sinks is None else o.sinks[head].double().exp())
                    rows.append((weights / total) @ value[seen])
                results.append(torch.stack(rows))
        return torch.stack(results)


WAYS = {
    "plain": {},
    "window": {"window": 5},
    "capped": {"soft_cap": 1.5},
    "sinks": {"sinks": torch.linspace(-1, 2, 32)},
    "alibi": {"alibi": torch.linspace(0.01, 0.3, 32)},
    "all": {"window": 6, "soft_cap": 2.0, "sinks": torch.linspace(-1, 2, 32), "alibi": torch.linspace(0.01, 0.3, 32)},
}


def way(name, heads):
    return {key: value[:heads] if isinstance(value, torch.Tensor) else value for key, value in WAYS[name].items()}


def check(found, expected, count, tolerance):
    torch.testing.assert_close(found[:count].float(), expected[:count].float(), rtol=tolerance, atol=tolerance)
    assert found.isfinite().all(), "rows of padding are finite too"


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize(("counts", "lengths"), [((1, 1, 1), (1, 9, 16)), ((3, 1, 6), (3, 17, 11))])
def test_the_reference_is_the_formula(name, counts, lengths):
    scene = Scene(counts, lengths, **way(name, 4))
    found = paged_attention_reference(*scene.arguments)
    check(found, scene.dense(), sum(counts), 1e-5)


def test_the_public_function_takes_every_option():
    scene = Scene((2, 1), (9, 17), **way("all", 4))
    found = paged_attention(*scene.arguments)
    check(found, scene.dense(), 3, 1e-5)


@pytest.mark.parametrize("widths", [(24, 16), (16, 16)])
def test_pages_in_eight_bits(widths):
    scales = {"key_scale": torch.tensor([0.5, 1.5]), "value_scale": torch.tensor(0.7)}
    scene = Scene((1, 3), (9, 20), widths=widths, store=E4M3, **scales)
    scene.pages = [pages.nan_to_num(0).to(E4M3) if pages.dtype != E4M3 else pages for pages in scene.pages]
    check(paged_attention_reference(*scene.arguments), scene.dense(), 4, 1e-5)


def shapes():
    """Every two of these together: group, widths, kind, lengths."""
    lengths = [((1, 1, 0), (9, 70, 1)), ((3, 1, 20), (3, 70, 33)), ((1, 1), (1, 17)), ((40,), (64,))]
    for at, row in enumerate(pairs((1, 3, 4, 16), ((64, 64), (80, 80), (96, 64), (192, 128)), (0, 1, 2, 3), lengths)):
        yield pytest.param(*row, list(WAYS)[(at + row[2]) % len(WAYS)], id=f"{at}")


@pytest.mark.parametrize(("group", "widths", "kind", "lengths", "name"), list(shapes()))
def test_the_kernel_is_the_reference(group, widths, kind, lengths, name):
    heads = 2 if kind % 2 else 1
    options = way(name, group * heads)
    if kind >= 2:
        options |= {"key_scale": torch.tensor([0.5] * heads), "value_scale": torch.tensor(0.7), "store": E4M3}
    scene = Scene(*lengths, group=group, heads=heads, widths=widths, dtype=torch.float16, **options)
    expected = paged_attention_reference(*scene.arguments)
    found = kernels.attend(*scene.arguments)
    check(found, expected, sum(lengths[0]), 4e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "all"])
def test_contexts_that_are_split_over_programs(name):
    for counts, lengths, splits in (((1, 1, 1), (3, 120, 60), 5), ((2, 5), (40, 20), 3)):
        scene = Scene(counts, lengths, dtype=torch.float16, **way(name, 4))
        scene.options = replace(scene.options, tile=kernels.AttentionTile(16, 16, 2, 4, splits))
        check(kernels.attend(*scene.arguments), paged_attention_reference(*scene.arguments), sum(counts), 4e-3)


def test_blocks_that_a_window_freed_are_not_read():
    scene = Scene((1, 4), (40, 60), dtype=torch.float16, window=9)
    expected = paged_attention_reference(*scene.arguments)
    for s, length in enumerate(scene.lengths):
        freed = (length - scene.counts[s] - 9 + 1) // SIZE
        assert freed > 1, "the test frees some"
        scene.tables[s, :freed] = -1
    for attend in (paged_attention_reference, kernels.attend):
        check(attend(*scene.arguments), expected, 5, 4e-3)


@pytest.mark.slow
def test_deterministic_results_do_not_depend_on_the_batch(monkeypatch):
    monkeypatch.setattr(kernels, "FIXED", 64)
    keys = {"dtype": torch.float16, "deterministic": True, "padding": 0, "heads": 1}
    whole = Scene((90,), (90,), **keys)
    together = kernels.attend(*whole.arguments)
    query, keys_, values, tables, _, sizes, options = whole.arguments
    for at in (0, 64, 89):
        one = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
        found = kernels.attend(query[at : at + 1], keys_, values, tables, one, sizes * 0 + at + 1, options)
        assert torch.equal(found[0], together[at]), f"query {at}"
    check(together, paged_attention_reference(*whole.arguments), 90, 4e-3)


def test_launches_depend_on_shapes_alone(monkeypatch):
    """So they can be captured: lengths and starts that differ give the same grids and constants."""
    seen = []
    monkeypatch.setattr(kernels, "launch", lambda kernel, grid, *_, **options: seen.append((kernel, grid, options)))
    scene = Scene((1, 1, 1), (9, 30, 16), dtype=torch.float16)
    kernels.attend(*scene.arguments)
    before, seen[:] = list(seen), []
    query, keys, values, tables, starts, sizes, options = scene.arguments
    kernels.attend(query, keys, values, tables * 0, starts * 0, sizes * 0, options)
    assert before == seen
    assert before
