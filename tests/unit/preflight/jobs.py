"""Synthetic jobs for judgements: facts of any number of ranks on hosts of eight."""

from __future__ import annotations

from deepspeed.preflight.check import Level, RankFact


def job(fact, count=16, odd=None, per_host=8):
    """Facts of `count` ranks: what `fact` makes of a rank, and of the ranks in `odd` what stands there."""
    return [RankFact(rank, f"h{rank // per_host}", (odd or {}).get(rank) or fact(rank)) for rank in range(count)]


def only(findings):
    """The one finding there is."""
    (finding,) = findings
    return finding


def good(findings):
    """Whether nothing is wrong."""
    return [finding.level for finding in findings] == [Level.OK]
