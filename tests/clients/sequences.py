"""Small models of several families, batches of every kind, and their training with shared and with whole sequences."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import deepspeed
from tests.closeness import Training

VOCABULARY, LENGTH, STEPS = 40, 16, 2


@dataclass(frozen=True)
class Case:
    """One training: which model, how it is shared out, and what it is fed with."""

    kind: str
    stage: int
    attention: str | None
    data: str = "whole"
    rows: int = 2
    accumulation: int = 1
    clip: float = 0.0
    checkpoints: bool = False
    dtype: str = "fp32"
    sp: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    tiles: dict[str, int] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


def family(kind: str, **options: Any) -> Any:
    """A random model of two layers."""
    import transformers as t

    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral", "gemma2": "Gemma2"}
    names |= {
        "gptj": "GPTJ",
        "codegen": "CodeGen",
        "mpt": "Mpt",
        "t5": "T5",
        "mt5": "MT5",
        "falcon": "Falcon",
        "bloom": "Bloom",
        "gpt2": "GPT2",
        "bert": "Bert",
        "gpt_neox": "GPTNeoX",
    }
    name = names[kind]
    given = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
    given |= {"num_attention_heads": 4, "max_position_embeddings": 64, "use_cache": False}
    given["attn_implementation"] = "eager" if kind in ("bloom", "codegen", "gptj", "mpt") else "sdpa"
    if kind not in ("gpt2", "gpt_neox", "gptj", "codegen", "mpt", "bert", "bloom", "falcon"):
        given |= {"num_key_value_heads": 2, "head_dim": 8}
    quiet = ("attention_dropout", "hidden_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout_prob")
    given |= dict.fromkeys((*quiet, "attention_probs_dropout_prob"), 0.0) | options
    if kind == "gpt2":
        given.update(n_embd=32, n_layer=2, n_head=4)
    if kind == "mpt":
        given = {name: value for name, value in given.items() if not name.endswith(("pdrop", "position_embeddings"))}
        given.update(max_seq_len=32)
    if kind.endswith("t5"):
        given = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4, "vocab_size": VOCABULARY}
        given |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "dropout_rate": 0.0}
        given |= {"decoder_start_token_id": 0, "attn_implementation": "sdpa", **options}
    suffix = {
        "gpt2": "LMHeadModel",
        "bert": "ForMaskedLM",
        **dict.fromkeys(("t5", "mt5"), "ForConditionalGeneration"),
    }.get(kind, "ForCausalLM")
    torch.manual_seed(0)
    return getattr(t, name + suffix)(getattr(t, f"{name}Config")(**given))


def batches(case: Case, replicas: int = 1) -> list[dict[str, torch.Tensor]]:
    """Global batches, one for every micro step."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(STEPS * case.accumulation):
        ids = torch.randint(VOCABULARY, (case.rows * replicas, LENGTH), generator=generator)
        batch = {"input_ids": ids, "labels": ids.clone()}
        batch["labels"][:, 3] = -100
        if case.data == "padded":
            ends = torch.tensor([LENGTH - 5, LENGTH - 1]).repeat(case.rows)[: len(ids), None]
            batch["attention_mask"] = (torch.arange(LENGTH) < ends).long()
            batch["labels"][batch["attention_mask"] == 0] = -100
        elif case.data == "left":  # the label of the first token is that of the last one of padding
            begins = torch.tensor([LENGTH // 2 + 1, 3]).repeat(case.rows)[: len(ids), None]
            batch["attention_mask"] = (torch.arange(LENGTH) >= begins).long()
            batch["labels"][batch["attention_mask"] == 0] = -100
        elif case.data == "packed":
            positions = torch.cat([torch.arange(7), torch.arange(LENGTH - 7)])
            batch["position_ids"] = positions.expand(len(ids), LENGTH).clone()
            batch["position_ids"][0] = torch.cat([torch.arange(10), torch.arange(LENGTH - 10)])
        elif case.data == "half":  # all labels are with some of the ranks
            batch["labels"][:, : LENGTH // 2] = -100
        if case.kind.endswith("t5"):  # a decoder that writes fewer tokens than its encoder reads
            batch["labels"] = batch["labels"][:, LENGTH // 2 :].contiguous()
        made.append(batch)
    return made


def build(case: Case, model: Any = None, mpu: Any = None, **config: Any) -> Any:
    """An engine over all ranks."""
    model = family(case.kind, **case.options) if model is None else model
    if case.checkpoints:
        model.gradient_checkpointing_enable()
    size = case.sp or dist.get_world_size()
    given = {
        "train_micro_batch_size_per_gpu": case.rows,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": case.clip,
        "sequence_parallel_size": size,
        "sequence_parallel": {"attention": case.attention, **case.tiles},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": case.stage, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": case.dtype == "bf16"},
    }
    return deepspeed.initialize(model=model, config={**given, **case.config, **config}, mpu=mpu)[0]


def training(case: Case) -> Training:
    """Train an engine over all ranks."""
    engine = build(case)
    engine.train()
    replicas, replica = engine.dp_world_size, engine._parts.layout["dp"].rank
    before = values(engine.module)
    losses, norms = [], []
    window = []
    for batch in batches(case, replicas):
        mine = {name: value[replica * case.rows :][: case.rows] for name, value in batch.items()}
        loss = engine(**mine).loss
        engine.backward(loss)
        window.append(loss.item())
        boundary = engine.is_gradient_accumulation_boundary()
        engine.step()
        if boundary:
            losses.append(sum(window) / len(window))
            norms.append(float(engine.get_global_grad_norm()))
            window = []
    after = values(engine.module)
    engine.destroy()
    mean = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(mean)
    return Training(before, after, (mean / dist.get_world_size()).tolist(), norms)


def values(module: Any) -> dict[str, torch.Tensor]:
    """Every parameter, whole."""
    found = {}
    for name, param in module.named_parameters():
        with deepspeed.zero.GatheredParameters([param]):
            found[name] = param.detach().clone()
    return found


def plain_training(case: Case) -> Training:
    """The same in one process, with whole sequences and without the library."""
    replicas = dist.get_world_size() // (case.sp or dist.get_world_size())
    model = family(case.kind, **case.options)
    if case.dtype == "bf16":
        model = model.bfloat16()
    masters = copy.deepcopy(model).float()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = torch.optim.SGD(masters.parameters(), lr=0.1, momentum=0.9)
    losses, norms, window = [], [], []
    for number, batch in enumerate(batches(case, replicas)):
        for replica in range(replicas):
            mine = {name: value[replica * case.rows :][: case.rows] for name, value in batch.items()}
            loss = model(**mine).loss
            (loss / replicas / case.accumulation).backward()
            window.append(loss.item())
        if (number + 1) % case.accumulation == 0:
            for master, param in zip(masters.parameters(), model.parameters(), strict=True):
                master.grad = None if param.grad is None else param.grad.float()
                param.grad = None
            norms.append(torch.nn.utils.clip_grad_norm_(masters.parameters(), case.clip or 1e9).item())
            optimizer.step()
            with torch.no_grad():
                for master, param in zip(masters.parameters(), model.parameters(), strict=True):
                    param.copy_(master)
            losses.append(sum(window) / len(window))
            window = []
    return Training(before, {name: param.detach() for name, param in model.named_parameters()}, losses, norms)
