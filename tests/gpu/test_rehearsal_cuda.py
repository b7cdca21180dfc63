"""Kernels that are compiled while an engine is put together, on a GPU: its first step compiles none."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SCRIPT = """
import json, sys, time
from concurrent.futures import wait
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import deepspeed
from deepspeed.ops.precompile import PENDING

config = LlamaConfig(hidden_size=256, num_hidden_layers=2, intermediate_size=512, num_attention_heads=8,
                     num_key_value_heads=4, vocab_size=1024, use_cache=False)
with torch.device("cuda"):
    model = LlamaForCausalLM(config)
tokens = torch.randint(1024, (2, 64), device="cuda")
began = time.perf_counter()
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
    "train_micro_batch_size_per_gpu": 2, "bf16": {"enabled": True}, "gradient_clipping": 1.0,
    "optimizer": {"type": sys.argv[1], "params": {"lr": 1e-3}}, "zero_optimization": {"stage": int(sys.argv[2])},
    "zero_allow_untested_optimizer": True,
    "fused_kernels": {"enabled": True},
    "fp8": {"enabled": True, "scaling": sys.argv[3]}})
made = time.perf_counter() - began
while PENDING.open:
    wait(list(PENDING.open))
from triton import knobs
ahead = knobs.compilation.listener.count
compiled = time.perf_counter() - began
loss = engine(input_ids=tokens, labels=tokens).loss
engine.backward(loss)
engine.step()
torch.cuda.synchronize()
print("found " + json.dumps({"ahead": ahead, "after": knobs.compilation.listener.count, "made_s": made,
                             "compiled_s": compiled, "stepped_s": time.perf_counter() - began}))
"""


@pytest.mark.parametrize(
    ("optimizer", "stage", "scaling"),
    [
        ("AdamW", 0, "tensor"),
        ("Lion", 3, "row"),
        ("Lamb", 3, "tensor"),
        ("Lamb", 0, "row"),
        ("AdamW", 3, "tensor"),
    ],
)
def test_the_first_step_compiles_nothing(tmp_path, optimizer, stage, scaling):
    variables = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, optimizer, str(stage), scaling],
        env=variables, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "could not be compiled ahead" not in done.stdout + done.stderr, done.stdout + done.stderr
    (line,) = [each for each in done.stdout.splitlines() if each.startswith("found ")]
    found = json.loads(line.removeprefix("found "))
    assert found["ahead"] > 0, "nothing was compiled ahead"
    assert found["after"] == found["ahead"], f"the first step compiled kernels itself: {found}"
