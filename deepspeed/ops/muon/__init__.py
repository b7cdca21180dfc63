"""Muon: momentum whose matrices are made orthogonal, beside Adam for everything that is no matrix."""

from __future__ import annotations

from deepspeed.ops.muon.aux_adam import MuonWithAuxAdam
from deepspeed.ops.muon.muon import Muon, SingleDeviceMuon, muon_update, tag_attention_heads

__all__ = ["Muon", "MuonWithAuxAdam", "SingleDeviceMuon", "muon_update", "tag_attention_heads"]
