"""Attention functions and masks of Transformers: called over whole sequences, registered, and taken out again."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from deepspeed.errors import UsageError
from deepspeed.transformers.replacement import Undo, put_whole, replacement
from deepspeed.transformers.source import copied, exchanged, innermost

MASKS = ("create_causal_mask", "create_sliding_window_causal_mask", "create_chunked_causal_mask")
"""The functions by which models make their masks."""


@dataclass(frozen=True)
class DocumentRun:
    """Tokens [begin, end) of a row that see each other and nothing else."""

    begin: int
    end: int
    padding: bool = False
    """They are none, and nobody looks at what they see."""


@dataclass(frozen=True, eq=False)
class SequenceInfo:
    """Sequences as they are before they are shared out."""

    length: int
    documents: Tensor | None = None
    """The number of the document of each token, [batch, length]; None where a row is one document."""
    present: Tensor | None = None
    """False for padding, [batch, length]; None where there is none."""

    @classmethod
    def of(cls, length: int, positions: Tensor | None, present: Tensor | None) -> SequenceInfo:
        """Look for padding, and for the documents of packed rows, which begin where positions do not go on.

        Positions of padding may be anything and say nothing about documents.
        """
        if present is not None and bool(present.all()):
            present = None
        documents = None
        if positions is not None:
            if positions.dim() != 2:
                raise UsageError(
                    f"position ids of shape {tuple(positions.shape)} were found, expected [batch, length]: positions "
                    "in several dimensions cannot be shared out over sequence-parallel ranks yet."
                )
            begins = positions[:, 1:] != positions[:, :-1] + 1
            if present is not None:
                begins = begins & present[:, 1:] & present[:, :-1]
            if bool(begins.any()):
                documents = torch.nn.functional.pad(begins.long().cumsum(1), (1, 0))
        return cls(length, documents, present)

    @property
    def plain(self) -> bool:
        """True if every token of a row belongs to one document without padding."""
        return self.documents is None and self.present is None

    @cached_property
    def runs(self) -> list[list[DocumentRun]] | None:
        """Each row as runs of tokens that see only each other; None where padding lies between tokens.

        Looked up once for all layers, because the host waits for the device to know it.
        """
        keys = [key for key in (self.documents, self.present) if key is not None]
        if not keys:
            return None
        rows: list[list[DocumentRun]] = []
        for row in range(keys[0].shape[0]):
            present = self.present[row] if self.present is not None else None
            if present is not None and int((present[1:] != present[:-1]).sum()) > 1 + int(not present[0]):
                return None
            changes = torch.stack([key[row, 1:] != key[row, :-1] for key in keys]).any(0)
            borders = [0, *(changes.nonzero().flatten() + 1).tolist(), self.length]
            empty = [False] * self.length if present is None else (~present).tolist()
            rows.append([DocumentRun(begin, end, empty[begin]) for begin, end in itertools.pairwise(borders)])
        return rows


def attention_mask(whole: SequenceInfo, queries: Tensor, keys: Tensor, *, causal: bool, window: int | None) -> Tensor:
    """Which queries see which keys, [batch or 1, 1, queries, keys]; both are indices into the whole sequence."""
    ahead, behind = queries[:, None], keys[None, :]
    seen = ahead >= behind if causal else torch.ones_like(ahead >= behind)
    if window is not None:
        seen = seen & (ahead - behind < window)
    seen = seen[None]
    if whole.documents is not None:
        seen = seen & (whole.documents[:, queries, None] == whole.documents[:, None, keys])
    if whole.present is not None:
        seen = seen & whole.present[:, None, keys]
    return seen[:, None]


AttentionFunction = Callable[..., tuple[Tensor, Any]]


class _Shared:
    """A module whose key/value heads are shared by another number of query heads than it says."""

    def __init__(self, module: nn.Module, groups: int) -> None:
        self._module = module
        self.num_key_value_groups = groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class CoreAttention:
    """One of Transformers' attention functions, called with whole sequences: [batch, heads, length, width]."""

    def __init__(self, name: str, function: AttentionFunction) -> None:
        self.name = name
        self.function = function

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        whole: SequenceInfo,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        """([batch, length, heads, width], what the function returns besides)."""
        shared = _Shared(module, query.shape[1] // key.shape[1])
        tensors = (query, key, value)
        if "flash" in self.name:
            return self._flash(shared, tensors, whole, options)
        window = options.get("sliding_window")
        causal = is_causal(module, options)
        if window is not None and (not causal or window >= whole.length):
            window = None
        # Runs are lists, which the host knows and a graph does not.
        in_runs = window is None and query.shape[2] == key.shape[2] and not torch.compiler.is_compiling()
        runs = whole.runs if in_runs else None
        if runs is not None:
            return self._in_runs(shared, tensors, runs, options)
        mask = None
        if not whole.plain or window is not None or (causal and 1 < query.shape[2] < key.shape[2]):
            keys = torch.arange(key.shape[2], device=key.device)
            mask = attention_mask(whole, keys[-query.shape[2] :], keys, causal=causal, window=window)
        return self.function(shared, *tensors, mask, **options)

    def _flash(
        self, module: _Shared, tensors: tuple[Tensor, ...], whole: SequenceInfo, options: dict[str, Any]
    ) -> tuple[Tensor, Any]:
        """Flash attention takes padding as it is and finds documents by positions, in a single row only."""
        if whole.documents is None:
            return self.function(module, *tensors, whole.present, **options)
        if tensors[0].shape[0] > 1 or whole.present is not None:
            raise UsageError(
                f"packed sequences with {self.name} need a batch of one row without padding; found "
                f"{tensors[0].shape[0]} rows. Use the attention sdpa, or micro batches of 1."
            )
        at = torch.arange(whole.length, device=whole.documents.device)
        begins = torch.nn.functional.pad(whole.documents[0, 1:] != whole.documents[0, :-1], (1, 0), value=True)
        positions = at - torch.where(begins, at, 0).cummax(0).values
        return self.function(module, *tensors, None, position_ids=positions[None], **options)

    def _in_runs(
        self, module: _Shared, tensors: tuple[Tensor, ...], rows: list[list[DocumentRun]], options: dict[str, Any]
    ) -> tuple[Tensor, Any]:
        """Documents one by one: work and memory are those of the documents, not of the square of all tokens."""
        done = []
        for row, runs in enumerate(rows):
            parts = [[t[row : row + 1, :, run.begin : run.end] for t in tensors] for run in runs]
            found = [
                _nothing(*part) if run.padding else self.function(module, *part, None, **options)[0]
                for run, part in zip(runs, parts, strict=True)
            ]
            done.append(torch.cat(found, 1))
        return torch.cat(done), None


def _nothing(query: Tensor, _key: Tensor, value: Tensor) -> Tensor:
    """What attention gives that sees nothing, as a mask over everything would: zeros, with a gradient of zeros.

    The last token of padding on the left has a label: the first token of the row.
    """
    batch, heads, length = query.shape[:3]
    return query.new_zeros(batch, length, heads, value.shape[-1]) + 0 * query[:1, :1, :1, :1]


def is_causal(module: nn.Module, options: dict[str, Any]) -> bool:
    """Whether tokens see only what lies before them, as Transformers decides it."""
    told = options.get("is_causal")
    return bool(getattr(module, "is_causal", True) if told is None else told)


_UNFIT = ("eager", "flex_attention")  # the first is each model's own, the second takes masks of its own kind

_LAYER_KINDS = ("layer_types", "layers_block_type", "block_types")
"""Where configs tell the kind of each layer."""
_WITH_ATTENTION = {"attention", "full_attention", "sliding_attention", "chunked_attention", "dense", "sparse", "moe"}


class Masks:
    """Masks as attention functions get them: padding, [batch, length]; each knows its `SequenceInfo`.

    A model makes its masks once per forward and hands the same objects to all layers, also when a checkpointed layer
    runs again, so that what belongs to a batch is found by its mask.
    """

    def __init__(self) -> None:
        self._wholes = WeakTensorKeyDictionary()

    def __call__(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        attention_mask: Tensor | None = None,
        use_vmap: bool = False,
        device: Any = None,
        **others: Any,
    ) -> Tensor:
        """What Transformers calls to make a mask."""
        chunk = getattr(others.get("config"), "attention_chunk_size", None)
        if use_vmap or chunk is not None:
            what = "a mask of its own kind" if chunk is None else f"attention in chunks of {chunk} tokens"
            raise UsageError(
                f"the model uses {what}, which sequence parallelism cannot share out over its ranks. It knows causal "
                "and bidirectional attention, sliding windows, padding and packed sequences."
            )
        if attention_mask is None:
            return torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
        return attention_mask[:, -kv_length:].bool()

    def stands_for(self, mask: Tensor, whole: SequenceInfo) -> None:
        """Remember what a mask stands for."""
        self._wholes[mask] = whole

    def whole(self, mask: Tensor | None) -> SequenceInfo | None:
        """What a mask stands for, if that is known."""
        return None if mask is None else self._wholes.get(mask)


def models_in(module: nn.Module) -> list[Any]:
    """The models of Transformers in a module, itself or what it wraps (PEFT), the outermost first."""
    from transformers import PreTrainedModel

    return [each for each in module.modules() if isinstance(each, PreTrainedModel)]


def configs_in(module: nn.Module) -> list[Any]:
    """Those that say which attention is used: the models', and those of attention modules that have their own."""
    from transformers import PreTrainedConfig

    configs = [getattr(each, "config", None) for each in module.modules()]
    return list({id(config): config for config in configs if isinstance(config, PreTrainedConfig)}.values())


def text_config_of(model: Any, implementation: str) -> Any:
    """The config of the text model, of a model, a config, or a name; refuses what cannot use the attention function."""
    from transformers import MODEL_MAPPING, AutoConfig

    if isinstance(model, str) or hasattr(model, "__fspath__"):
        model = AutoConfig.from_pretrained(model)
    config = getattr(model, "config", model).get_text_config()
    kind = type(model) if isinstance(model, nn.Module) else MODEL_MAPPING.get(type(config), None)
    kind = kind[0] if isinstance(kind, tuple) else kind
    require_functions(
        kind, "Use a model that does, or deepspeed.sequence.layer.DistributedAttention inside of this one."
    )
    require_attention(type(config).__name__ if kind is None else kind.__name__, config)
    used = config._attn_implementation
    if isinstance(model, nn.Module) and used != implementation:
        raise UsageError(
            f"the model uses the attention {used!r}, but core_attn_implementation is {implementation!r}. Load the "
            f"model with attn_implementation={implementation!r}."
        )
    return config


def has_causal_loss(model: Any) -> bool:
    """Whether a model computes the loss of the next token by Transformers' function for it."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    return getattr(model, "loss_function", None) is ForCausalLMLoss


def require_attention(name: str, config: Any) -> None:
    """Refuse a model in which tokens meet in other layers than attention: parts of a sequence would not, silently."""
    text = config.get_text_config()
    named = [each for key in _LAYER_KINDS for each in getattr(text, key, None) or ()]
    other = sorted({str(each) for each in named} - _WITH_ATTENTION)
    if other:
        raise UsageError(
            f"{name} has layers of the type {other[0]!r}, by which tokens see each other without attention: ranks that "
            f"share a sequence know only attention ({', '.join(sorted(_WITH_ATTENTION))}). Train this model without "
            "sequence parallelism."
        )


def require_functions(kind: Any, advice: str) -> None:
    """Refuse a class of models whose attention modules call no function of Transformers: ours would not be called."""
    if not getattr(kind, "_supports_attention_backend", True):
        raise UsageError(
            f"{kind.__name__} computes attention by itself instead of by Transformers' attention functions, so that "
            f"it cannot be shared out. {advice}"
        )


def core_attention(name: str, kind: Any = None, *, paged: bool = False) -> CoreAttention:
    """One of Transformers' attention functions, as it is without ours around it; `kind` is the class of the model.

    Functions over a `paged` cache of keys are given to those who ask for them; sequence parallelism takes none.
    """
    from transformers import AttentionInterface

    known = AttentionInterface._global_mapping
    if name in _UNFIT or name.startswith("paged") != paged or name not in known:
        ours = [each for each in known if each.startswith("deepspeed_")]  # of other engines
        usable = sorted(each for each in known if each.startswith("paged") == paged and each not in (*_UNFIT, *ours))
        usable = [each for each in usable if kind is None or _takes(kind, each)]
        advice = f"Load the model with attn_implementation set to one of {', '.join(usable)}"
        if not usable:
            advice = f"{kind.__name__} takes no other one. Train this model without sequence parallelism"
        what = "over a paged cache" if paged else "under sequence parallelism"
        raise UsageError(f"the attention {name!r} cannot be used {what}. {advice}.")
    function = known[name]
    return CoreAttention(name, getattr(function, "inner", function))


def _takes(kind: Any, name: str) -> bool:
    """Whether Transformers lets a class of models use one of its functions, as the class says."""
    flag = "_supports_flash_attn" if "flash" in name else f"_supports_{name}"
    return bool(getattr(kind, flag, True))


def register_attention(name: str, function: Callable[..., Any], masks: Callable[..., Any] | None) -> Callable[[], None]:
    """Make an attention function and its masks known by a name; returns what undoes it.

    Where there are no `masks`, models make none.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    tables = (AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping)
    before = [table.get(name) for table in tables]
    AttentionInterface.register(name, function)
    if masks is not None:
        AttentionMaskInterface.register(name, masks)

    def undo() -> None:
        for table, value in zip(tables, before, strict=True):
            table.pop(name, None)
            if value is not None:
                table[name] = value

    return undo


def free_name(prefix: str) -> str:
    """A name that no attention function has yet."""
    from transformers import AttentionInterface

    known = AttentionInterface._global_mapping
    return next(name for name in map(f"{prefix}_{{}}".format, itertools.count()) if name not in known)


def masks_in_python(model: nn.Module) -> list[Undo]:
    """Keep what makes masks out of graphs: in Python it sees that a mask is causal alone, and need not exist."""
    undone = []
    for module in model.modules():
        forward: Any = type(module).forward
        inner = innermost(type(module))
        names = getattr(getattr(inner, "__code__", None), "co_names", ())
        masks = {name: torch.compiler.disable(inner.__globals__[name]) for name in MASKS if name in names}
        outside = exchanged(forward, inner, copied(inner, masks)) if masks else None
        if outside is not None and ("forward" not in module.__dict__ or replacement(module) is not None):
            undone.append(put_whole(module, replacement(module) or forward, compiled=outside))
    return undone
