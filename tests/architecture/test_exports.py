"""The public surface is exactly what `__all__` says, cheap to import, and free of side effects."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest

import deepspeed
import deepspeed.utils
from tests.architecture.source import ROOT

PUBLIC = """
    HAS_TRITON TORCH_DISTRIBUTED_DEFAULT_PORT DeepSpeedConfig DeepSpeedConfigError DeepSpeedDataLoader
    DeepSpeedEngine DeepSpeedError DeepSpeedHybridEngine DeepSpeedInferenceConfig DeepSpeedOptimizer
    DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable
    DeepSpeedTransformerConfig DeepSpeedTransformerLayer OnDevice
    DualPipeVEngine DualPipeVModule InferenceEngine PipelineEngine PipelineModule pipe
    __git_branch__ __git_hash__
    __version__ __version_major__ __version_minor__ __version_patch__ accelerator add_config_arguments
    checkpointing comm default_inference_config dist inference init_inference replace_transformer_layer
    set_autotp_mode tensor_parallel tp_model_init
    get_accelerator init_distributed initialize log_dist logger moe ops parallel replay runtime utils zero
""".split()


FRESH = {
    "a plain import": """
before = set(sys.modules)
import deepspeed
new = sorted({name.split(".")[0] for name in set(sys.modules) - before})
print(json.dumps({"new": new, "cuda": torch.cuda.is_initialized(), "dist": torch.distributed.is_initialized(),
                  "count": len([m for m in sys.modules if m.startswith("deepspeed")])}))
""",
    "what clients reach by attribute": """
import deepspeed
deepspeed.utils.logger, deepspeed.utils.logging.logger, deepspeed.comm.is_initialized, deepspeed.utils.groups
print(json.dumps("ok"))
""",
    "the command that starts jobs": """
import deepspeed.launcher.runner
agents = {"pydantic", "torch.distributed.elastic.agent", "torch.distributed.elastic.rendezvous"}
print(json.dumps(sorted(agents & set(sys.modules))))
""",
    "layers": """
import deepspeed.comm, deepspeed.config, deepspeed.accelerator, deepspeed.parallel, deepspeed.ops
import deepspeed.utils.groups, deepspeed.monitor.monitor, deepspeed.profiling.timers, deepspeed._assemble
optional = {"mpi4py", "transformers", "accelerate", "triton", "wandb", "tensorboard", "comet_ml", "psutil"}
print(json.dumps(sorted(optional & set(sys.modules))))
""",
}
# Each in a fork of one interpreter that has torch.
IN_FORKS = """
import json, os, sys, torch
for code in json.loads(sys.argv[1]):
    if os.fork() == 0:
        exec(code)
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.fixture(scope="module")
def printed() -> dict[str, Any]:
    """What each text of FRESH prints in a new interpreter."""
    words = [sys.executable, "-c", IN_FORKS, json.dumps([*FRESH.values()])]
    result = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return dict(zip(FRESH, map(json.loads, result.stdout.splitlines()), strict=True))


def test_all_is_exact():
    assert sorted(deepspeed.__all__) == sorted(PUBLIC)
    assert dir(deepspeed) == sorted(PUBLIC)


def test_every_public_name_resolves():
    for name in deepspeed.__all__:
        getattr(deepspeed, name)
    for name in deepspeed.utils.__all__:
        getattr(deepspeed.utils, name)


def test_an_unknown_name_is_an_ordinary_attribute_error():
    assert not hasattr(deepspeed, "no_such_name")


def test_the_version_is_the_distribution_version():
    assert deepspeed.__version__ == metadata.version("deepspeed") == "0.20.0"
    parts = (deepspeed.__version_major__, deepspeed.__version_minor__, deepspeed.__version_patch__)
    assert ".".join(map(str, parts)) == deepspeed.__version__


@pytest.mark.slow
def test_import_loads_nothing_optional_and_touches_no_device(printed):
    facts = printed["a plain import"]
    assert facts["new"] == ["deepspeed"]
    assert not facts["cuda"]
    assert not facts["dist"]
    assert facts["count"] < 20


@pytest.mark.slow
def test_the_modules_clients_reach_by_attribute_are_there_after_a_plain_import(printed):
    assert printed["what clients reach by attribute"] == "ok"


@pytest.mark.slow
def test_the_command_that_starts_jobs_loads_nothing_for_elastic_ones_alone(printed):
    """Everybody who starts a job waits for it."""
    assert printed["the command that starts jobs"] == []


@pytest.mark.slow
def test_optional_packages_are_not_imported_by_any_layer(printed):
    assert printed["layers"] == []
