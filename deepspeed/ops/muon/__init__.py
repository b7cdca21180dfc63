"""Muon: momentum whose matrices are made orthogonal, beside Adam for everything that is no matrix."""

from __future__ import annotations

from deepspeed.ops.muon.aux_adam import MuonWithAuxAdam, SingleDeviceMuonWithAuxAdam
from deepspeed.ops.muon.muon import Muon, SingleDeviceMuon, WholeMatrices, adam_update, muon_update, tag_attention_heads
from deepspeed.ops.muon.newton_schulz import (
    NS_METHODS,
    ns_compute_dtype,
    zeropower_via_gram_newtonschulz,
    zeropower_via_newtonschulz5,
)

__all__ = [
    "NS_METHODS",
    "Muon",
    "MuonWithAuxAdam",
    "SingleDeviceMuon",
    "SingleDeviceMuonWithAuxAdam",
    "WholeMatrices",
    "adam_update",
    "muon_update",
    "ns_compute_dtype",
    "tag_attention_heads",
    "zeropower_via_gram_newtonschulz",
    "zeropower_via_newtonschulz5",
]
