"""Many tiny layers on two ranks against DistributedDataParallel: nothing to compute, so that bookkeeping shows."""

from __future__ import annotations

from benchmarks.case import Case, Job, Measure, Target

CASE = Case(
    name="tiny_layers",
    title="one step of 400 linear layers of width 32 (gloo), fp32, AdamW, clipping",
    file=__file__,
    measures=(
        Measure(
            "ratio",
            "step ÷ DDP's beside it",
            "×",
            targets=(
                Target(1.1, where={"stage": 0}),
                Target(1.5, where={"stage": 3}),
                Target(1.0, than="deepspeed"),
            ),
        ),
        Measure("step_ms", "one step", "ms"),
    ),
    ranks=(2,),
    parameters=({"stage": 0}, {"stage": 3}, {"stage": 3, "stage3_param_persistence_threshold": 0}),
    rounds=3,
    timeout_s=600.0,
)

LAYERS, WIDTH, BATCH = 400, 32, 8
PAIRS = 100


def measure(job: Job) -> dict[str, float]:
    """Ratio and time of a step."""
    import torch
    from torch import Tensor, nn

    from benchmarks.training import compare

    class Stack(nn.Module):
        """Layers with a short cut around each, which keeps 400 of them trainable; returns the loss."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x).tanh() / LAYERS
            return nn.functional.mse_loss(x, target)

    torch.manual_seed(0)
    model = Stack()
    torch.manual_seed(1 + job.rank)
    return compare(job, model, (torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)), pairs=PAIRS, warm_up=10)
