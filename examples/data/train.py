"""A small language model that sees short sequences first: metrics, clusters and lengths by the step. Runs on a CPU."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

import deepspeed
from deepspeed.data.analyzer import DistributedDataAnalyzer

LENGTH, VOCABULARY = 64, 32


class Texts(torch.utils.data.Dataset[Tensor]):
    """Sequences that count up, of many lengths, padded with zeros."""

    def __len__(self) -> int:
        return 2000

    def __getitem__(self, index: int) -> Tensor:
        length = 4 + index * 7919 % (LENGTH - 4)
        found = torch.zeros(LENGTH, dtype=torch.long)
        found[:length] = (index + torch.arange(length)) % (VOCABULARY - 1) + 1
        return found


class SmallGPT(nn.Module):
    """Two layers of attention under a causal mask; its forward gives the loss."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        hidden = self.tokens(tokens) + self.places.weight[:length]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        logits = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=0)


def config(folder: Path) -> dict:
    metric = {
        "index_to_sample_path": str(folder / "seqlen" / "seqlen_index_to_sample"),
        "index_to_metric_path": str(folder / "seqlen" / "seqlen_index_to_metric"),
        "difficulty_type": "value",
        "min_difficulty": 8,
        "max_difficulty": LENGTH,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": 30, "difficulty_step": 8},
        "cut_batches": True,
    }
    curriculum = {
        "enabled": True,
        "data_cluster_path": str(folder / "clusters"),
        "curriculum_metrics": {"seqlen": metric},
    }
    return {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3}},
        "zero_optimization": {"stage": 1},
        "data_efficiency": {"seed": 1, "data_sampling": {"curriculum_learning": curriculum}},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", type=Path, default=None, help="where metrics and clusters go; all ranks see it")
    parser.add_argument("--local_rank", type=int, default=-1)
    args = parser.parse_args()
    deepspeed.init_distributed()
    place = [args.folder or Path(tempfile.mkdtemp())]
    deepspeed.comm.broadcast_object_list(place, src=0)
    folder = place[0]
    DistributedDataAnalyzer(
        Texts(),
        batch_size=100,
        metric_names=["seqlen"],
        metric_functions=[lambda batch: batch.count_nonzero(dim=1)],
        metric_types=["single_value_per_sample"],
        save_path=str(folder),
    ).run_map_reduce()
    torch.manual_seed(0)
    engine, _, loader, _ = deepspeed.initialize(model=SmallGPT(), training_data=Texts(), config=config(folder))
    for step, batch in zip(range(args.steps), loader, strict=False):
        loss = engine(batch.to(engine.device))
        engine.backward(loss)
        engine.step()
        if step % 5 == 0 and deepspeed.comm.get_rank() == 0:
            print(f"step {step:3}  tokens {batch.shape[1]:3}  loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
