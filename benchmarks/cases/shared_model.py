"""Layers or sequences that ranks share: a step of a small decoder, against real DeepSpeed at the same split."""

from __future__ import annotations

from typing import Any

from benchmarks.case import Case, Job, Measure, Target

CASE = Case(
    name="shared_model",
    title="one step of an 11M-parameter decoder of which ranks share layers or sequences (gloo), fp32, AdamW, clipping",
    file=__file__,
    measures=(
        Measure("ratio", "step ÷ that of plain PyTorch beside it", "×", targets=(Target(1.0, than="deepspeed"),)),
        Measure("step_ms", "one step", "ms"),
    ),
    contenders=("ours", "deepspeed"),
    ranks=(2, 4),
    parameters=(
        {"shared": "layers", "tokens": 128},
        {"shared": "layers", "tokens": 512},
        {"shared": "sequences", "tokens": 512},
    ),
    rounds=1,
    timeout_s=300.0,
)

PAIRS, BATCH = 12, 2
RULES = [
    {"patterns": [r".*\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.weight$"], "partition_type": "column"},
    {"patterns": [r".*\.(o_proj|down_proj)\.weight$"], "partition_type": "row"},
]
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": BATCH,
    "gradient_clipping": 1.0,
    "steps_per_print": 10**9,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
}


def measure(job: Job) -> dict[str, float]:
    """Ratio and time of a step; all ranks together have one batch.

    Beside it each rank trains the whole model on its share of the tokens, alone: as much work for the machine. A whole
    step on every rank would be several times that, and would fill the minutes of this case.
    """
    import torch
    import torch.distributed as dist

    from benchmarks.decoder import Decoder, Shape
    from benchmarks.training import Loop, contest

    shape = Shape(**job.parameters.get("shape", {}))
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    twin = Decoder(shape)
    whole = torch.randint(shape.vocabulary, (2, job.parameters["tokens"] // BATCH, BATCH)).unbind()
    plain = Loop(twin, twin)
    step = shared_layers(shape, job.ranks) if job.parameters["shared"] == "layers" else shared_sequences(shape)
    part = tuple(each.chunk(job.ranks)[dist.get_rank()] for each in whole)
    batch = part if job.parameters["shared"] == "sequences" else whole
    pairs = job.parameters.get("pairs", PAIRS)
    return contest(lambda _: step(batch), lambda _: plain(part), whole, pairs=pairs, warm_up=2)


def shared_layers(shape: Any, ranks: int) -> Any:
    """A step of an engine whose ranks share layers (AutoTP)."""
    from benchmarks.decoder import Decoder

    section = {"autotp_size": ranks, "partition_config": {"use_default_specs": False, "layer_specs": RULES}}
    return _step(Decoder(shape), {**CONFIG, "tensor_parallel": section})


def shared_sequences(shape: Any) -> Any:
    """A step of an engine whose ranks share sequences (Ulysses)."""
    import importlib

    import torch.distributed as dist

    from benchmarks.decoder import Decoder, attention

    _quiet()
    layer = importlib.import_module("deepspeed.sequence.layer")
    shared = layer.DistributedAttention(attention, dist.group.WORLD)
    return _step(Decoder(shape, lambda query, key, value: shared(query, key, value, 1)), CONFIG)


def _step(model: Any, config: dict[str, Any]) -> Any:
    deepspeed = _quiet()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(batch: Any) -> None:
        engine.backward(engine(*batch))
        engine.step()

    return step


def _quiet() -> Any:
    """The contender's library, on the CPU and without progress lines."""
    import importlib
    import logging
    import os

    os.environ["DS_ACCELERATOR"] = "cpu"
    deepspeed: Any = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return deepspeed
