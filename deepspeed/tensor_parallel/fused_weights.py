"""Weights in which queries, keys and values are fused, by the published functions: which rows of them a rank has.

What is fused how is told by the class of a block; models that `tensor_parallel.autotp_size` splits need none of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from deepspeed.errors import UsageError
from deepspeed.fragments import Split, side_by_side
from deepspeed.tensor_parallel.shard_sizes import AutoTPMeta, get_shard_size_list

__all__ = [
    "codegen_block_layout",
    "codegen_rows",
    "fused_qkv_subparam_sizes",
    "get_fused_qkv_type",
    "prepare_tp_fused_qkvw",
    "require_tp_fused_qkvw",
    "set_fused_qkv_shard_state",
    "shard_value_with_share_qk",
    "shared_qk_value_head_ids",
    "shared_value_cuts",
    "split_by_qkvlist_and_refuse",
]

Cuts = list[list[tuple[int, int]]]

_KINDS = {
    "BaichuanLayer": "glmtype",
    "BloomBlock": "bloomtype",
    "CodeGenBlock": "codegentype",
    "DecoderLayer": "glmtype",
    "FalconDecoderLayer": "bloomtype",
    "GLMBlock": "glmtype",
    "GPTBigCodeBlock": "bigcodetype",
    "MPTBlock": "glmtype",
    "MptBlock": "glmtype",
    "Phi3DecoderLayer": "phi3type",
    "QWenBlock": "qwentype",
}
"""Classes of blocks. bloom: each head's query, key and value together; glm, qwen, phi3: all queries, then keys, then
values; bigcode: all queries, then one key and value that all ranks need; codegen: as glm in each of four runs."""
_FUSED = ("qkv_proj", "query_key_value", "Wqkv", "W_pack", "c_attn")


def get_fused_qkv_type(module: nn.Module) -> str | None:
    """How the blocks in a module fuse queries, keys and values; None where they are not known to."""
    found = (_KINDS.get(type(each).__name__) for each in module.modules())
    return next((kind for kind in found if kind is not None), None)


def require_tp_fused_qkvw(name: str, mp_size: int) -> bool:
    """Whether a layer of this name may be fused, and ranks share it."""
    return mp_size > 1 and any(part in name for part in _FUSED)


def fused_qkv_subparam_sizes(
    module: nn.Module, weight_shape: Sequence[int], meta: AutoTPMeta
) -> tuple[int, ...] | None:
    """The rows of queries, keys and values that lie one after the other; None where they are mixed."""
    kind, rows = get_fused_qkv_type(module), weight_shape[0]
    if kind in ("glmtype", "qwentype"):
        return (rows // 3,) * 3
    if kind == "phi3type":
        queries, keys = _known(meta.num_attention_heads, "heads"), _known(meta.num_kv_heads, "key-value heads")
        dim = rows // (queries + 2 * keys)
        return queries * dim, keys * dim, keys * dim
    if kind == "bigcodetype":
        queries = _known(meta.n_embd, "width")
        return queries, rows - queries
    return None


def prepare_tp_fused_qkvw(
    module: nn.Module, src: Tensor | None, mp_size: int, gpu_index: int, meta: AutoTPMeta
) -> Tensor | None:
    """The rows of a fused weight or bias that a rank has; `module` is the block, or the model."""
    if src is None:
        return None
    kind, rows = get_fused_qkv_type(module), src.shape[0]
    if kind is None:
        raise UsageError(
            f"prepare_tp_fused_qkvw: {type(module).__name__} has no block that is known to fuse queries, keys and "
            f"values: none of {', '.join(sorted(_KINDS))}. Let tensor_parallel.autotp_size split the model"
        )
    if kind == "codegentype":
        cuts = codegen_rows(rows, mp_size, _known(meta.num_attention_heads or meta.num_kv_heads, "heads"))
        return Split.of(0, cuts).cut(src, gpu_index)
    sizes = fused_qkv_subparam_sizes(module, src.shape, meta) or (rows,)
    if sum(sizes) != rows or min(sizes) < 1:
        raise UsageError(
            f"prepare_tp_fused_qkvw: {rows} rows (dim 0) do not hold {kind}'s parts of {list(sizes)}; correct meta"
        )
    ends = list(pairwise(accumulate(sizes, initial=0)))
    kept = [src[ends[1][0] :]] if kind == "bigcodetype" else []
    parts = []
    for start, stop in ends[:1] if kept else ends:
        widths = get_shard_size_list(stop - start, mp_size, _of_queries(meta, kind), None)
        parts.append(src[start:stop].split(widths)[gpu_index])
    return torch.cat([*parts, *kept])


def split_by_qkvlist_and_refuse(
    qkv_list: Sequence[Tensor], split_size: int | Sequence[int], split_dim: int = 0, cat_dim: int = 0
) -> list[Tensor]:
    """Each tensor cut, and the first pieces of all put together, then the second ones, and so on."""
    pieces = [torch.split(each, split_size, dim=split_dim) for each in qkv_list]  # type: ignore[arg-type]
    return [torch.cat(each, dim=cat_dim) for each in zip(*pieces, strict=True)]


def set_fused_qkv_shard_state(module: nn.Module, shard_widths: Sequence[int], tp_index: int) -> None:
    """Tell blocks that cut their projection's output by `attn.split_size` (QWen's) how wide a rank's queries are."""
    if get_fused_qkv_type(module) == "qwentype":
        for each in module.modules():
            if isinstance(getattr(each, "split_size", None), int):
                each.split_size = shard_widths[tp_index]  # type: ignore[assignment]


def shared_qk_value_head_ids(num_heads: int, world_size: int, rank: int) -> list[int]:
    """Value heads of a rank where two neighbouring query heads look at one, and so do key heads of the second half."""
    first, second = (cut[rank] for cut in shared_value_cuts(num_heads, num_heads, world_size))
    return [*range(*first), *range(*second)]


def shard_value_with_share_qk(
    weight: Tensor, bias: Tensor | None, rank: int, world_size: int, shard_value: bool, meta: AutoTPMeta
) -> tuple[nn.Parameter, nn.Parameter | None]:
    """A rank's rows of the values' projection (`shard_value`), or its columns of the projection behind them."""
    dim = 0 if shard_value else 1
    split = Split.of(dim, shared_value_cuts(weight.shape[dim], meta.num_kv_heads, world_size))
    part = nn.Parameter(split.cut(weight.detach(), rank).clone())
    if bias is None:
        return part, None
    return part, nn.Parameter((split.cut(bias.detach(), rank) if shard_value else bias.detach()).clone())


def shared_value_cuts(total: int, heads: int | None, ranks: int) -> Cuts:
    """Both halves of the heads, each cut evenly between heads."""
    count = _known(heads, "heads")
    if count % (2 * ranks) or total % count:
        raise UsageError(
            f"{total} elements of {count} heads in two halves do not divide by {ranks} ranks; expected a number of "
            f"heads that {2 * ranks} divides"
        )
    return side_by_side((total // 2, total // 2), ranks, total // count)


def codegen_block_layout(
    total_rows: int, world_size: int, num_kv_heads: int, codegen_mp_num: int = 4
) -> tuple[int, dict[int, list[int]]] | None:
    """(rows of a block, the blocks of each rank in its order) of CodeGen's weight; None where it cannot be cut so."""
    unit = codegen_mp_num * world_size
    if world_size < 2 or num_kv_heads % unit or total_rows % (3 * num_kv_heads):
        return None
    rows = total_rows // (3 * unit)
    cuts = codegen_rows(total_rows, world_size, num_kv_heads, codegen_mp_num)
    return rows, {rank: [cut[rank][0] // rows for cut in cuts] for rank in range(world_size)}


def codegen_rows(rows: int, ranks: int, heads: int, runs: int = 4) -> Cuts:
    """Where a rank's queries, values and keys lie in the runs of CodeGen's weight, in the order of its own runs."""
    if heads % (runs * ranks) or rows % (3 * heads):
        raise UsageError(
            f"{rows} rows (dim 0) of {heads} heads in {runs} runs do not divide by {ranks} ranks; expected a number of "
            f"heads that {runs * ranks} divides"
        )
    dim, in_run, own = rows // (3 * heads), heads // runs, heads // runs // ranks
    cuts: Cuts = []
    for run in range(runs):
        for part in range(3):
            cut = []
            for rank in range(ranks):
                at, inside = divmod(rank * heads // ranks + run * own, in_run)
                start = ((at * 3 + part) * in_run + inside) * dim
                cut.append((start, start + own * dim))
            cuts.append(cut)
    return cuts


def _of_queries(meta: AutoTPMeta, kind: str) -> AutoTPMeta:
    """A weight of queries alone is cut between query heads."""
    if kind != "bigcodetype":
        return meta
    return AutoTPMeta(meta.num_attention_heads, meta.num_attention_heads, meta.n_embd, meta.tp_grain_size)


def _known(value: int | None, what: str) -> int:
    if not value:
        raise UsageError(f"the number of {what} is not known; give it in meta (AutoTPMeta.from_model_config)")
    return value
