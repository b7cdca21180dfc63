"""Sequence parallelism: ranks that share each sequence, attention over all of it, and long sequences on one rank."""

from deepspeed._lazy import lazy

_LAZY = {
    "DistributedAttention": "deepspeed.sequence.layer:DistributedAttention",
    "TiledFusedLogitsLoss": "deepspeed.sequence.tiled:TiledFusedLogitsLoss",
    "TiledMLP": "deepspeed.sequence.tiled:TiledMLP",
    "UlyssesSPAttentionHF": "deepspeed.sequence.ulysses:UlyssesSPAttentionHF",
    "UlyssesSPDataLoaderAdapter": "deepspeed.sequence.loader:UlyssesSPDataLoaderAdapter",
    "sequence_tiled_compute": "deepspeed.sequence.tiled:sequence_tiled_compute",
}

__all__ = [
    "DistributedAttention",
    "TiledFusedLogitsLoss",
    "TiledMLP",
    "UlyssesSPAttentionHF",
    "UlyssesSPDataLoaderAdapter",
    "sequence_tiled_compute",
]

__getattr__ = lazy(__name__, _LAZY)


def __dir__() -> list[str]:
    return sorted(__all__)
