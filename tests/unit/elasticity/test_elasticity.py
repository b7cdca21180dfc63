"""What schedulers and scripts call: `compute_elastic_config`, `ds_elastic`, and the check of a plan."""

from __future__ import annotations

import json
import logging

import pytest

from deepspeed.elasticity import compute_elastic_config, elasticity_enabled, ensure_immutable_elastic_config
from deepspeed.elasticity.tool import main
from deepspeed.errors import ElasticityConfigError, ElasticityError, ElasticityIncompatibleWorldSize

SECTION = {"enabled": True, "max_train_batch_size": 10000, "micro_batch_sizes": [8, 12, 16, 17], "min_gpus": 32}
CONFIG = {"elasticity": {**SECTION, "max_gpus": 1500, "version": 0.1}}


@pytest.fixture(autouse=True)
def no_world(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("DEEPSPEED_ELASTICITY_CONFIG", raising=False)


def test_the_published_plan():
    batch, valid = compute_elastic_config(CONFIG, "0.19.6")
    assert (batch, len(valid)) == (9792, 23)
    assert all(any(batch % (micro * gpus) == 0 for micro in SECTION["micro_batch_sizes"]) for gpus in valid)
    batch, valid, micro = compute_elastic_config(CONFIG, "0.3.8", world_size=64)
    assert (batch, micro) == (9792, 17)
    with pytest.raises(ElasticityIncompatibleWorldSize, match="does not run on 128"):
        compute_elastic_config(CONFIG, "0.19.6", world_size=128)


def test_version_2_asks_how_many_there_are(monkeypatch):
    config = {"elasticity": {**CONFIG["elasticity"], "version": 0.2, "min_gpus": 1}}
    with pytest.raises(ElasticityConfigError, match="WORLD_SIZE"):
        compute_elastic_config(config, "0.19.6")
    monkeypatch.setenv("WORLD_SIZE", "64")
    batch, valid = compute_elastic_config(config, "0.19.6")
    assert 64 in valid
    assert compute_elastic_config(config, "0.19.6", return_microbatch=True)[:2] == (batch, valid)


@pytest.mark.parametrize(
    ("config", "version", "error", "message"),
    [
        ({}, "0.19.6", ElasticityConfigError, "no elasticity section"),
        ({"elasticity": {"enabled": False}}, "0.19.6", ElasticityConfigError, "enabled is false"),
        ({"elasticity": {"enabled": True}}, "0.19.6", ElasticityConfigError, "max_train_batch_size must be given"),
        ({"elasticity": {**SECTION, "version": 0.3}}, "0.19.6", ElasticityConfigError, "version 0.1 or 0.2"),
        ({"elasticity": {**SECTION, "micro_batch_sizes": [0]}}, "0.19.6", ElasticityConfigError, "micro_batch_sizes"),
        ({"elasticity": 3}, "0.19.6", ElasticityConfigError, "elasticity"),
        (CONFIG, "0.3.7", ElasticityError, "begins with 0.3.8"),
        (CONFIG, "new", ElasticityError, "not a version"),
    ],
)
def test_mistakes(config, version, error, message):
    with pytest.raises(error, match=message):
        compute_elastic_config(config, version)


def test_whether_it_is_on():
    assert elasticity_enabled({"elasticity": SECTION})
    assert not elasticity_enabled({})


def test_what_was_planned_must_not_change(monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("deepspeed"), "propagate", True)
    ensure_immutable_elastic_config(SECTION)
    assert "DEEPSPEED_ELASTICITY_CONFIG is not set" in caplog.text
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps({**SECTION, "min_time": 5}))
    ensure_immutable_elastic_config(SECTION)
    with pytest.raises(
        ElasticityConfigError, match="max_train_batch_size is 9999, but the scheduler planned with 10000"
    ):
        ensure_immutable_elastic_config({**SECTION, "max_train_batch_size": 9999})
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", "{")
    with pytest.raises(ElasticityConfigError, match="is not an elasticity section"):
        ensure_immutable_elastic_config(SECTION)
    with pytest.raises(ElasticityConfigError, match=r"^elasticity: min_gpus \(9\) exceeds max_gpus \(8\)$"):
        ensure_immutable_elastic_config({**SECTION, "min_gpus": 9, "max_gpus": 8})


def test_the_tool(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(CONFIG))
    assert main(["-c", str(path)]) == 0
    out = capsys.readouterr().out
    assert "final_batch_size .... 9792" in out
    assert "micro_batch_size ." not in out
    assert main(["-c", str(path), "-w", "64"]) == 0
    assert "micro_batch_size .... 17" in capsys.readouterr().out
    assert main(["-c", str(path), "-w", "65"]) == 1
    assert "ds_elastic: error: elasticity" in capsys.readouterr().err
    assert main(["-c", str(path), "-w", "-3"]) == 1
    assert "the world size is -3" in capsys.readouterr().err
    assert main(["-c", str(tmp_path / "none.json")]) == 1
