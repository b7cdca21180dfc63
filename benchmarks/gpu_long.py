"""One training step with a sequence as long as one CUDA device takes: tokens/s, and peaks of memory by kind.

    python benchmarks/gpu_long.py --shape 8b --tokens 524288 --lora 16 --keep-last 10
    python benchmarks/gpu_long.py --shape 1b --tokens 1048576
    python benchmarks/gpu_long.py --shape 8b --tokens 1048576 --lora 16 --layers-per-checkpoint 3 --plan
    python benchmarks/gpu_long.py --shape 1b --tokens 65536 --pieces --path FOLDER    # real DeepSpeed's own pieces
    python benchmarks/gpu_long.py --shape tiny --tokens 4096 --device cpu --count     # every byte, counted on a CPU
    python benchmarks/gpu_long.py --shape 8b --tokens 1048576 --tensor 8 --sequence 8 --ulysses 4    # as rank 0 of 64

The model is Transformers' own. All that makes the sequence fit is in the config: tiles of MLPs, norms, logits and loss,
checkpoints in host memory; with `--pieces` a script puts the published pieces around the model instead. Each step tells
when it comes to a layer, and `--out FOLDER` keeps that in a file, so that a run that is cut short has shown something.
`long_arithmetic.py` is the expectation, which `--plan` prints alone.

With `--tensor` and `--sequence` this process is rank 0 of so many ranks that share layers and the sequence, in a group
whose collectives are counted and fill what they would receive with this rank's own (`quiet.py`): time and memory are
those of a rank without the wire, and the loss means nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import resource
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.allocations import Allocations
from benchmarks.long_arithmetic import GIB, SHAPES, Plan, lines
from benchmarks.long_progress import Notes, Progress

if TYPE_CHECKING:
    from benchmarks.quiet import Traffic

__all__ = ["config_of", "main", "train"]

WARM_UP_TOKENS = 4096


def config_of(options: argparse.Namespace) -> dict[str, Any]:
    """The library's config; with `--pieces` everything about length is left to the script."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": options.stage},
        "steps_per_print": 10**9,
    }
    if options.pieces:
        config["optimizer"]["params"]["torch_adam"] = True  # real DeepSpeed would compile its own for a minute
    else:
        config["sequence_parallel"] = {"tiled_compute": options.tile, "tiled_loss": options.loss_tile}
        config["activation_checkpointing"] = {
            "cpu_checkpointing": True,
            "keep_last_count": options.keep_last,
            "layers_per_checkpoint": options.layers_per_checkpoint,
        }
    if options.tensor > 1:
        vocabulary = {"vocab_parallel_lm_head": True, "vocab_parallel_embedding": True}
        config["tensor_parallel"] = {"autotp_size": options.tensor, **vocabulary}
    if options.sequence > 1:
        config["sequence_parallel_size"] = options.sequence
        config["sequence_parallel"] |= {"attention": "auto", "ulysses_size": options.ulysses}
    return config


def make_model(plan: Plan, device: str) -> Any:
    """Transformers' Llama on the device in bf16; adapters of `plan.lora` on its attention, everything else frozen."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

    shape = plan.shape
    config = LlamaConfig(
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        intermediate_size=shape.inner,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=plan.tokens,
        use_cache=False,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    quick = PreTrainedModel.init_weights
    PreTrainedModel.init_weights = lambda self: None  # torch's layers drew their weights on the device already
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model: Any = LlamaForCausalLM(config)
            torch.nn.init.normal_(model.model.embed_tokens.weight, std=0.02)
            if plan.lora:
                model.requires_grad_(False)
                for layer in model.model.layers:
                    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                        setattr(layer.self_attn, name, _adapted(getattr(layer.self_attn, name), plan.lora))
    finally:
        PreTrainedModel.init_weights = quick
        torch.set_default_dtype(torch.float32)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def _adapted(base: Any, rank: int) -> Any:
    """A frozen linear layer beside a product of two narrow ones."""
    from torch import nn

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = base
            self.down = nn.Linear(base.in_features, rank, bias=False)
            self.up = nn.Linear(rank, base.out_features, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x: Any) -> Any:
            return self.base(x) + self.up(self.down(x))

    return Adapted()


def _whole(engine: Any) -> Callable[[Any], Any]:
    return lambda tokens: engine(input_ids=tokens, labels=tokens).loss


def _with_pieces(engine: Any, options: argparse.Namespace) -> tuple[Callable[[Any], Any], Any]:
    """(the loss; what is around forward and backward) of the published pieces, which real DeepSpeed has, too."""
    import torch

    pieces: Any = importlib.import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")
    away: Any = importlib.import_module("deepspeed.runtime.activation_checkpointing.offload_activations")
    offload = away.get_checkpoint_hidden_states_offloading_ctx_manager(keep_last_count=options.keep_last)
    away.patch_gradient_checkpointing_layer_marker()
    model = engine.module
    mlp = type(model.model.layers[0].mlp)
    inner = mlp.forward

    def tiled(self: Any, x: Any) -> Any:
        trained = [param for param in self.parameters() if param.requires_grad]
        return pieces.TiledMLP.apply(inner, self, x, -(-x.shape[1] // options.tile), trained)

    def part(self: Any, hidden: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(self.lm_head(hidden).float(), labels)

    mlp.forward = tiled

    def forward(self: Any, tokens: Any) -> Any:
        hidden = self.model(input_ids=tokens).last_hidden_state[:, :-1]
        labels, trained = tokens[:, 1:], [param for param in self.lm_head.parameters() if param.requires_grad]
        tiles = -(-hidden.shape[1] // options.loss_tile)
        return pieces.TiledFusedLogitsLoss.apply(part, self, hidden, labels, None, tiles, trained, "mean")

    type(model).forward = forward

    return engine, offload


def train(plan: Plan, options: argparse.Namespace) -> dict[str, Any]:
    """The numbers of the last step, and on a CPU its peaks where blocks are counted."""
    with contextlib.ExitStack() as stack:
        traffic = None
        if options.tensor * options.sequence > 1:
            from benchmarks.quiet import quiet_group

            traffic = stack.enter_context(quiet_group(options.tensor * options.sequence, options.device))
        if not options.count:
            return _train(plan, options, None, traffic)[0]
        with Allocations() as counted:
            found, progress = _train(plan, options, counted, traffic)
        return found | {"device": progress.counted()}


def _train(
    plan: Plan, options: argparse.Namespace, counted: Allocations | None, traffic: Traffic | None
) -> tuple[dict[str, Any], Progress]:
    import torch

    if options.device == "cpu":
        torch.backends.mkldnn.enabled = False  # on a CPU without bf16 it fails in every product before another is used
    deepspeed: Any = importlib.import_module("deepspeed")
    model = make_model(plan, options.device)
    trained = [param for param in model.parameters() if param.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config_of(options))
    pieces = _with_pieces(engine, options) if options.pieces else None
    loss_of, around = pieces or (_whole(engine), contextlib.nullcontext())
    notes = Notes(_file(options), plan=lines(plan, options.loss_tile))
    progress = Progress(options.device, notes, quiet=options.quiet, counted=counted)
    progress.watch(model.model.layers)
    model.model.norm.register_forward_pre_hook(lambda *_: _tell_loss(progress))
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(plan.shape.vocabulary, (1, plan.tokens), generator=generator).to(options.device)
    short = tokens[:, : min(plan.tokens, WARM_UP_TOKENS * options.sequence)]
    for step in range(options.steps + 1):
        batch = short if step == 0 else tokens
        print(f"step {step}, {batch.numel()} tokens", flush=True)
        progress.restart(batch.numel())
        if traffic is not None:
            traffic.clear()
        progress.enter("forward")
        with around:
            loss = loss_of(batch)
            progress.enter("backward")
            engine.backward(loss)
        progress.enter("update")
        engine.step()
        progress.enter("between steps")
    progress.close()
    found = {
        "seconds": progress.seconds(),
        "loss": float(loss.detach()),
        "trained": sum(param.numel() for param in trained),
        "device": dict(progress.peaks),
        "sent": {} if traffic is None else dict(traffic.sent),
        **_memory(options.device),
    }
    notes.end(**found)
    engine.destroy()
    return found, progress


def _file(options: argparse.Namespace) -> Path | None:
    """A name for each kind of run, so that several may share a folder."""
    if options.out is None:
        return None
    kind = f"{options.shape}-{options.layers or 'all'}-{options.tokens}-{options.tensor}x{options.sequence}"
    return Path(options.out) / f"{kind}{'-pieces' if options.pieces else ''}.json"


def _tell_loss(progress: Progress) -> None:
    if progress.phase == "forward":  # not where a tile of the norm is run again
        progress.enter("loss")


def _memory(device: str) -> dict[str, float]:
    import torch

    found = {"host_peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20}
    if device == "cuda":
        found["reserved"] = torch.cuda.max_memory_reserved() / GIB
        pinned = torch.cuda.host_memory_stats() if hasattr(torch.cuda, "host_memory_stats") else {}
        found["pinned"] = pinned.get("allocated_bytes.peak", 0) / GIB
    return found


@contextlib.contextmanager
def _attention(kind: str) -> Iterator[None]:
    """Only this kernel of torch's; anything else would be an error instead of a mask of length × length."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    with sdpa_kernel(backends[kind]) if kind in backends else contextlib.nullcontext():
        yield


def _join() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in alone.items():
        os.environ.setdefault(name, value)


def parser() -> argparse.ArgumentParser:
    """The options."""
    made = argparse.ArgumentParser(description="A step with a sequence as long as one CUDA device takes.")
    made.add_argument("--shape", choices=SHAPES, default="1b")
    made.add_argument("--tokens", type=int, default=2**20)
    made.add_argument("--layers", type=int, help="instead of the shape's own, for a run that is shorter in time")
    made.add_argument("--lora", type=int, default=0, metavar="RANK", help="adapters of this rank; 0 trains everything")
    made.add_argument("--steps", type=int, default=1, help="after one of few tokens")
    made.add_argument("--stage", type=int, default=0)
    made.add_argument("--tile", type=int, default=8192, help="tokens of a tile of MLPs and norms")
    made.add_argument("--loss-tile", type=int, default=2048, help="tokens of a tile of logits")
    made.add_argument("--keep-last", type=int, default=1, help="newest checkpoints that stay on the device")
    made.add_argument("--layers-per-checkpoint", type=int, default=1)
    made.add_argument("--tensor", type=int, default=1, help="ranks that share layers, of which this is the first")
    made.add_argument("--sequence", type=int, default=1, help="ranks that share the sequence, likewise")
    made.add_argument("--ulysses", type=int, help="of these so many exchange heads; the library chooses otherwise")
    made.add_argument("--out", type=Path, metavar="FOLDER", help="where to keep what is known, from layer to layer")
    made.add_argument("--attention", choices=("any", "flash", "cudnn"), default="flash")
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--pieces", action="store_true", help="TiledMLP and others by hand, not by the config")
    made.add_argument("--path", type=Path, help="where another deepspeed is")
    made.add_argument("--plan", action="store_true", help="print the arithmetic and stop")
    made.add_argument("--count", action="store_true", help="count every block, on a CPU")
    made.add_argument("--quiet", action="store_true", help="no line for each layer")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 where the step was taken."""
    options = parser().parse_args(arguments)
    if options.path is not None:
        sys.path.insert(0, str(options.path))
    shape = SHAPES[options.shape].with_layers(options.layers)
    if options.tensor * options.sequence > 1 and (options.lora or options.pieces):
        parser().error("--tensor and --sequence go neither with --lora nor with --pieces")
    plan = Plan(
        shape,
        options.tokens,
        options.lora,
        options.keep_last,
        options.layers_per_checkpoint,
        options.tensor,
        options.sequence,
    )
    print("\n".join(lines(plan, options.loss_tile)), flush=True)
    if options.plan:
        return 0
    if options.tensor * options.sequence == 1:
        _join()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # tensors of gigabytes leave gaps
    if options.device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    with _attention(options.attention if options.device == "cuda" else "any"):
        found = train(plan, options)
    peaks = ", ".join(f"{phase} {peak:.1f}" for phase, peak in found["device"].items())
    print(f"{plan.tokens} tokens in {found['seconds']:.1f} s: {plan.tokens / found['seconds']:,.0f} tokens/s")
    print(f"loss {found['loss']:.4f}, {found['trained']:,} parameters trained")
    for kind, sent in found["sent"].items():
        print(f"sent, {kind}: {sent / GIB:.2f} GiB")
    print(f"device, peak GiB: {peaks or 'a CPU has no such counters'}; reserved {found.get('reserved', 0.0):.1f}")
    print(
        f"host, peak GiB: {found['host_peak']:.1f} resident, {found.get('pinned', 0.0):.1f} pinned by torch", flush=True
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
