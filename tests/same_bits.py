"""Compares trainings of this tree with those of another commit, bit for bit, and loads that commit's checkpoints.

    python -m tests.same_bits --against REV [--only 3 17]

A refactoring must not change a number. Each case trains five steps on two ranks with both trees; losses and weights
must be equal in every bit. Every fourth case also continues here from a checkpoint that the other tree wrote.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RANKS, STEPS, SAVED_AFTER = 2, 5, 3


def cases() -> list[dict]:
    """Any three choices of stage, precision, offload, accumulation and axis meet in one case."""
    from tests.covering import pairs, triples

    rows = triples((0, 1, 2, 3), ("fp32", "bf16", "fp16"), ("none", "cpu"), (1, 2), ("dp", "tp", "pp", "ep"))
    rows += pairs((0, 1, 2, 3), ("fp32", "bf16"), ("none", "cpu"), (1, 2), ("sp",))[::3]
    names = ("stage", "precision", "offload", "accumulation", "axis")
    return [dict(zip(names, row, strict=True)) for row in rows]


def config(case: dict) -> dict:
    """The JSON of a case."""
    section = {"stage": case["stage"], "reduce_bucket_size": 500}
    if case["stage"] == 3:
        section |= {"stage3_param_persistence_threshold": 40 if case["accumulation"] == 1 else 0}
    if case["offload"] == "cpu":
        section["offload_optimizer"] = {"device": "cpu"}
    made = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case["accumulation"],
        "gradient_clipping": 0.5 * (case["accumulation"] == 2),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01}},
        "zero_optimization": section,
    }
    if case["precision"] != "fp32":
        made[case["precision"]] = {"enabled": True}
    if case["precision"] == "fp16":
        made["fp16"]["initial_scale_power"] = 8
    if case["axis"] == "tp":
        made["tensor_parallel"] = {"autotp_size": 2}
    if case["axis"] == "sp":
        made["sequence_parallel_size"] = 2
    return made


def built(case: dict):
    """An engine, and the function that trains one step with it and returns the loss."""
    import torch
    from torch import nn

    import deepspeed

    torch.manual_seed(7)
    draws = torch.Generator().manual_seed(3)
    rank = int(os.environ["RANK"]) if case["axis"] in ("dp", "ep") else 0
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[case["precision"]]
    optimizer = None

    def tokens():
        both = torch.randint(31, (2, 2, 8), generator=draws)
        return both[rank]

    def values():
        both = torch.randn(2, 2, 4, 10, generator=draws)
        return both[rank].to(dtype)

    if case["axis"] in ("tp", "sp"):
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
        attention = {"attn_implementation": "sdpa"}
        made = LlamaConfig(vocab_size=31, num_hidden_layers=2, max_position_embeddings=16, **sizes, **attention)
        model = LlamaForCausalLM(made)
    elif case["axis"] == "pp":
        from deepspeed.pipe import PipelineModule

        layers = [nn.Linear(10, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 10)]
        model = PipelineModule(layers, num_stages=2, loss_fn=lambda out, want: (out - want).float().square().mean())
    elif case["axis"] == "ep":
        model = Experts()
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split

        optimizer = split({"params": list(model.parameters()), "name": "all"})
    else:
        model = nn.Sequential(nn.Linear(10, 14), nn.Tanh(), nn.Linear(14, 14, bias=False), nn.Tanh(), nn.Linear(14, 10))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=optimizer, config=config(case))

    def step():
        if case["axis"] == "pp":
            return engine.train_batch(iter([(values(), values()) for _ in range(case["accumulation"])]))
        for _ in range(case["accumulation"]):
            if case["axis"] in ("tp", "sp"):
                batch = tokens()
                loss = engine(input_ids=batch, labels=batch, use_cache=False).loss
            else:
                loss = (engine(values()) - values()).float().square().mean()
            engine.backward(loss)
            engine.step()
        return loss

    return engine, step


def Experts():
    """A layer, four experts over the ranks, a layer."""
    from torch import nn

    from deepspeed.moe.layer import MoE

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(10, 10), nn.Linear(10, 10)
            self.experts = MoE(10, nn.Linear(10, 10), num_experts=4, ep_size=2, k=1, min_capacity=0, use_rts=False)

        def forward(self, values):
            return self.last(self.experts(self.first(values))[0])

    return Model()


def digest(engine) -> str:
    """Of all weights, as the optimizer and as the module have them."""
    import torch

    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    found = hashlib.sha256()
    for name, param in engine.module.named_parameters():
        master = safe_get_full_fp32_param(param)
        with deepspeed.zero.GatheredParameters([param]):
            own = param.detach().float().clone()
        for value in (own, own if master is None else master):
            found.update(name.encode() + value.float().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def train(case: dict, rank: int, folder: str, saved: str | None, resume: str | None, out: str) -> None:
    """One rank of one case; writes the bits of its losses and weights."""
    import torch

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), DS_ACCELERATOR="cpu")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(f"{folder}/store", RANKS)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    engine, step = built(case)
    losses = []
    for at in range(STEPS):
        if resume and at == SAVED_AFTER:
            engine.load_checkpoint(resume)
        losses.append(float(step().detach()).hex())
        if saved and at == SAVED_AFTER - 1:
            engine.save_checkpoint(saved)
    Path(f"{out}.{rank}").write_text(json.dumps({"losses": losses, "weights": digest(engine)}))
    os._exit(0)


def run(jobs: list[dict], out: Path) -> None:
    """Every case after the other, each on forked ranks of a process that has imported everything."""
    import deepspeed.runtime.engine  # noqa: F401

    print(f"# {sys.modules['deepspeed'].__file__}", flush=True)
    fork = multiprocessing.get_context("fork")
    found = {}
    for job in jobs:
        with tempfile.TemporaryDirectory() as folder:
            parts = (job.get("saved"), job.get("resume"), f"{folder}/result")
            ranks = [fork.Process(target=train, args=(job["case"], rank, folder, *parts)) for rank in range(RANKS)]
            for each in ranks:
                each.start()
            for each in ranks:
                each.join(120)
            files = [Path(f"{folder}/result.{rank}") for rank in range(RANKS)]
            found[job["name"]] = [json.loads(file.read_text()) if file.exists() else None for file in files]
            for each in ranks:
                each.kill()
        print("." if all(found[job["name"]]) else "F", end="", flush=True)
    print()
    out.write_text(json.dumps(found))


def child(tree: Path, jobs: list[dict], folder: Path, name: str) -> dict:
    """The results of a tree, from a process that imports that one."""
    (folder / f"{name}.jobs").write_text(json.dumps(jobs))
    words = [sys.executable, __file__, "--jobs", str(folder / f"{name}.jobs"), "--out", str(folder / f"{name}.json")]
    subprocess.run(words, check=True, env={**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"})
    return json.loads((folder / f"{name}.json").read_text())


def compare(revision: str, only: list[int]) -> int:
    """Train with both trees; the number of cases that differ."""
    chosen = [(at, case) for at, case in enumerate(cases()) if not only or at in only]
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base)
        subprocess.run(
            ["git", "worktree", "add", "--quiet", "--detach", folder / "tree", revision], cwd=ROOT, check=True
        )
        try:
            first = [{"name": str(at), "case": case} for at, case in chosen]
            for job in first[::4]:
                job["saved"] = str(folder / f"saved-{job['name']}")
            theirs = child(folder / "tree", first, folder, "theirs")
            second = [{"name": job["name"], "case": job["case"]} for job in first]
            second += [
                {"name": f"{job['name']} resumed", "case": job["case"], "resume": job["saved"]} for job in first[::4]
            ]
            ours = child(ROOT, second, folder, "ours")
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder / "tree"], cwd=ROOT, check=True)
    differ = 0
    for job in second:
        mine, other = ours[job["name"]], theirs[job["name"].split()[0]]
        if mine is None or mine != other or None in mine:
            differ += 1
            print(f"case {job['name']} differs: {job['case']}\n  there {other}\n  here  {mine}")
    print(f"{len(second)} cases, {differ} differ from {revision}")
    return differ


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="REV")
    parser.add_argument("--only", type=int, nargs="*", default=[])
    parser.add_argument("--jobs", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.jobs:
        run(json.loads(Path(given.jobs).read_text()), Path(given.out))
    else:
        sys.exit(min(1, compare(given.against, given.only)))


if __name__ == "__main__":
    main()
