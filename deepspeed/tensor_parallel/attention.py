"""Attention modules: which layers are one, how many heads it has, and what it must know of its share of them."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from deepspeed.errors import UsageError
from deepspeed.fragments import even_runs
from deepspeed.tensor_parallel.layers import share_of
from deepspeed.tensor_parallel.rules import plain_path


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of one attention; `query` is a multiple of `key_value`."""

    query: int
    key_value: int
    dim: int
    """Elements of a head."""

    @property
    def group(self) -> int:
        """Query heads that look at the same keys and values."""
        return self.query // self.key_value

    def shares_keys(self, ranks: int) -> bool:
        """Whether several ranks look at the same keys and values."""
        return self.key_value < ranks

    def queries_of(self, ranks: int) -> list[tuple[int, int]]:
        """The query heads of each rank.

        All of a group go to one rank as long as there are groups enough; else each rank gets heads of one group, so
        that on every rank each of its key-value heads serves equally many of its query heads.
        """
        if not self.shares_keys(ranks):
            return [(start * self.group, stop * self.group) for start, stop in even_runs(self.key_value, ranks)]
        found = []
        for group, (first, last) in enumerate(even_runs(ranks, self.key_value)):
            base = group * self.group
            found += [(base + start, base + stop) for start, stop in even_runs(self.group, last - first)]
        return found

    def keys_of(self, ranks: int) -> list[tuple[int, int]]:
        """The key-value heads of each rank; some appear on several ranks where `shares_keys`."""
        return [(start // self.group, -(-stop // self.group)) for start, stop in self.queries_of(ranks)]

    def fewest(self, ranks: int) -> tuple[int, int]:
        """Query and key-value heads of the rank that has the fewest."""
        pairs = zip(self.queries_of(ranks), self.keys_of(ranks), strict=True)
        return min((queries[1] - queries[0], keys[1] - keys[0]) for queries, keys in pairs)

    def elements(self, heads: tuple[int, int]) -> tuple[int, int]:
        """Where heads lie in a projection."""
        return heads[0] * self.dim, heads[1] * self.dim


_LATENT = "kv_b_proj"
"""Keys without their rotated part, and values, of all heads, of one latent vector."""
_QUERY = ("q_proj", "query", "q_lin", "q_b_proj", "q", "Wq")
_KEYS = ("k_proj", "v_proj", "key", "value", "k_lin", "v_lin", _LATENT, "k", "v", "Wk", "Wv")
_FUSED = ("query_key_value", "qkv_proj", "Wqkv", "c_attn")
_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
_DIMS = ("head_dim", "attention_head_size", "head_size")
_WIDTHS = ("embed_dim", "hidden_size", "split_size", "all_head_size", "dim", "inner_dim")
"""Attributes that hold heads × head size, where the module uses them to shape what it computes."""
_PER_HEAD = ("alibi", "attention_mask", "position_bias")


@dataclass(frozen=True)
class Attention:
    """One attention module."""

    path: str
    module: nn.Module
    heads: Heads

    @property
    def latent(self) -> bool:
        """Keys and values are made of a latent vector, and their heads have sizes of their own."""
        return isinstance(getattr(self.module, _LATENT, None), nn.Module)

    def by_heads(self, ranks: int, total: int) -> list[tuple[int, int]]:
        """Where each rank's elements lie of `total`, of which every query head has equally many."""
        each = total // self.heads.query
        return [(start * each, stop * each) for start, stop in self.heads.queries_of(ranks)]

    def cuts(self, leaf: str, ranks: int, outputs: int) -> tuple[list[list[tuple[int, int]]], bool]:
        """Where each rank's outputs of a projection lie, by fused part, and whether ranks share some."""
        heads = self.heads
        if leaf == _LATENT:
            return [self.by_heads(ranks, outputs)], False
        queries = [heads.elements(part) for part in heads.queries_of(ranks)]
        keys = [heads.elements(part) for part in heads.keys_of(ranks)]
        shares = heads.shares_keys(ranks)
        if leaf in _QUERY:
            return [queries], False
        if leaf in _KEYS:
            return [keys], shares
        if type(self.module).__name__ == "CodeGenAttention":
            return self._codegen(leaf, ranks), False
        mixed = leaf == "c_attn" and getattr(self.module, "multi_query", None) is False  # GPTBigCode without it
        if leaf != "query_key_value" and not mixed:  # queries, then keys, then values
            first, second = heads.query * heads.dim, heads.key_value * heads.dim
            return [queries, _moved(keys, first), _moved(keys, first + second)], shares
        if getattr(self.module, "new_decoder_architecture", False):  # groups: their queries, a key, a value
            if shares:
                raise UsageError(_too_few(f"{self.path}.{leaf}", "key-value heads", heads.key_value, ranks))
            unit = (heads.group + 2) * heads.dim
            return [[(k // heads.dim * unit, stop // heads.dim * unit) for k, stop in keys]], False
        if getattr(self.module, "multi_query", False):  # all queries, one key, one value
            first = heads.query * heads.dim
            return [queries, _moved(keys, first), _moved(keys, first + heads.dim)], True
        return [[(3 * start, 3 * stop) for start, stop in queries]], False  # each head's query, key, value

    def _codegen(self, leaf: str, ranks: int, runs: int = 4) -> list[list[tuple[int, int]]]:
        """Where a rank's queries, values and keys lie in the runs of CodeGen's weight, in the order of its own runs."""
        heads, dim = self.heads.query, self.heads.dim
        if heads % (runs * ranks):
            raise UsageError(
                f"tensor_parallel: {self.path}.{leaf}: {3 * heads * dim} rows (dim 0) of {heads} heads in {runs} runs "
                f"do not divide by {ranks} ranks; expected a number of heads that {runs * ranks} divides"
            )
        in_run, own = heads // runs, heads // runs // ranks
        cuts: list[list[tuple[int, int]]] = []
        for run, part in itertools.product(range(runs), range(3)):
            places = [divmod(rank * heads // ranks + run * own, in_run) for rank in range(ranks)]
            starts = [((at * 3 + part) * in_run + inside) * dim for at, inside in places]
            cuts.append([(start, start + own * dim) for start in starts])
        return cuts

    def splits(self, leaf: str) -> bool:
        """Whether a projection of this name is cut by heads."""
        return leaf in (*_QUERY, *_KEYS, *_FUSED)


def find_attention(model: nn.Module, ranks: int) -> dict[str, Attention]:
    """Every attention module by path, as rules know it."""
    found = {}
    for path, module in model.named_modules():
        leaf = next((name for name in (*_QUERY, *_FUSED) if isinstance(getattr(module, name, None), nn.Module)), None)
        if leaf is None or any(share_of(layer) for layer in getattr(module, leaf).modules()):
            continue
        heads = _heads(module, leaf, getattr(module, "config", None) or getattr(model, "config", None))
        if heads is None:
            continue
        if heads.query % heads.key_value:
            raise UsageError(
                f"tensor_parallel: {path}.{leaf} is of an attention with {heads.query} query heads and "
                f"{heads.key_value} key-value heads (of {heads.dim} rows of dim 0 each); the former must be a multiple "
                "of the latter. Correct num_attention_heads or num_key_value_heads in the model's config"
            )
        if heads.query < ranks or any(start == stop for start, stop in heads.queries_of(ranks)):
            raise UsageError(_too_few(f"{path}.{leaf}", "query heads", heads.query, ranks))
        found[plain_path(path)] = Attention(path, module, heads)
    return found


def _heads(module: nn.Module, leaf: str, config: Any) -> Heads | None:
    queries = _number(_COUNTS, module, config)
    width = _outputs(getattr(module, leaf))
    if queries is None or width is None:
        return None
    dim = _number(_DIMS, module)
    if dim is None:
        dim = width // queries if leaf in _QUERY else _number(_WIDTHS, module, config or module) // queries  # type: ignore[operator]
    keys = _number(_KEY_COUNTS, module)
    key_leaf = next((name for name in _KEYS if isinstance(getattr(module, name, None), nn.Module)), None)
    if getattr(module, "multi_query", False) and not getattr(module, "new_decoder_architecture", False):
        keys = 1
    elif key_leaf is not None and leaf in _QUERY and (wide := _outputs(getattr(module, key_leaf))) and wide % dim == 0:
        keys = keys or (queries if key_leaf == _LATENT else wide // dim)
    elif keys is None:
        keys = _number(_KEY_COUNTS, config) if leaf == "qkv_proj" else None
    return Heads(queries, keys or queries, dim)


def set_local_heads(attention: Attention, ranks: int, rank: int) -> None:
    """Let an attention module know how many heads it computes on this rank."""
    module, heads = attention.module, attention.heads
    first, last = heads.queries_of(ranks)[rank]
    keys_first, keys_last = heads.keys_of(ranks)[rank]
    queries, keys = last - first, keys_last - keys_first
    whole = heads.query * heads.dim
    _put(module, _COUNTS, heads.query, queries)
    _put(module, _KEY_COUNTS, heads.key_value, keys)
    _put(module, ("num_key_value_groups",), heads.group, queries // keys)
    _put(module, _WIDTHS, whole, queries * heads.dim)
    if isinstance(getattr(module, "qkv_proj", None), nn.Module) and hasattr(module, "config"):
        own: Any = copy.copy(module.config)  # such a module asks its config, which all layers share
        own.num_attention_heads, own.num_key_value_heads = queries, keys
        module.config = own
    module.register_forward_pre_hook(_Biases(heads.query, first, last), with_kwargs=True)


class _Biases:
    """Takes this rank's heads of masks and biases that the model computed for all of them."""

    def __init__(self, heads: int, first: int, last: int) -> None:
        self.heads, self.first, self.last = heads, first, last

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        named = {name: self._own(kwargs[name]) for name in _PER_HEAD if name in kwargs}
        return (*args[:1], *(self._own(arg, flat=False) for arg in args[1:])), {**kwargs, **named}

    def _own(self, value: Any, *, flat: bool = True) -> Any:
        """[batch, heads, queries, keys], or `flat` as Bloom has it, [batch × heads, 1, keys]; anything else stays."""
        if not isinstance(value, Tensor) or self.heads == 1:
            return value
        if value.dim() == 4 and value.shape[1] == self.heads:
            return value[:, self.first : self.last]
        if flat and value.dim() == 3 and value.shape[1] == 1 and value.shape[0] % self.heads == 0:
            return value.view(-1, self.heads, *value.shape[1:])[:, self.first : self.last].flatten(0, 1)
        return value


def _put(module: nn.Module, names: Sequence[str], whole: int, part: int) -> None:
    for name in names:
        if module.__dict__.get(name) == whole and isinstance(module.__dict__[name], int):
            setattr(module, name, part)


def _number(names: Sequence[str], *holders: Any) -> int | None:
    for holder, name in ((holder, name) for holder in holders for name in names):
        value = getattr(holder, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _outputs(layer: nn.Module) -> int | None:
    return _number(("out_features", "nf"), layer, getattr(layer, "base_layer", None))


def _moved(cuts: list[tuple[int, int]], offset: int) -> list[tuple[int, int]]:
    return [(start + offset, stop + offset) for start, stop in cuts]


def _too_few(path: str, what: str, count: int, ranks: int) -> str:
    return (
        f"tensor_parallel: {path} has {count} {what} (dim 0 of its weight), fewer than the {ranks} ranks, so that "
        f"it cannot be split. Use tensor_parallel.autotp_size of at most {count}, or a rule with partition_type skip "
        "for it and the layer behind it"
    )
