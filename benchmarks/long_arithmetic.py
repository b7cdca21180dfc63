"""What a step with a long sequence takes: bytes by kind and floating-point operations, from sizes alone.

The unit is the hidden states of all tokens in bf16. Where a layer's backward is deepest (attention's gradients by the
flash kernel), these are alive: the layer's input and the one before it, which comes from the host; the gradient of the
residual; the first norm's output; queries, keys, values and the attention's output, and their gradients; the
gradients of keys and values for every query head; and the gradient of queries in fp32, twice a unit. Tiles of MLPs and
norms hold the rest down to less than that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

__all__ = ["GIB", "SHAPES", "Plan", "Shape", "lines"]

GIB = 2**30
BF16, FP32 = 2, 4
STATES = 4 + 8  # bytes of a trained parameter: its fp32 master and two moments
GRADIENT = 2


@dataclass(frozen=True)
class Shape:
    """A Llama."""

    hidden: int
    layers: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads

    @property
    def kv_width(self) -> int:
        return self.head_width * self.kv_heads

    @property
    def parameters(self) -> int:
        """All of them; head and embedding are two."""
        layer = 2 * self.hidden * (self.hidden + self.kv_width) + 3 * self.hidden * self.inner + 2 * self.hidden
        return self.layers * layer + 2 * self.vocabulary * self.hidden + self.hidden

    def with_layers(self, layers: int | None) -> Shape:
        return self if layers is None else replace(self, layers=layers)


SHAPES = {
    "8b": Shape(4096, 32, 14336, 32, 8, 128256),
    "1b": Shape(2048, 16, 8192, 32, 8, 32000),
    "1b-deep": Shape(2048, 22, 5632, 32, 4, 32000),
    "tiny": Shape(64, 4, 128, 4, 2, 256),
}


@dataclass(frozen=True)
class Plan:
    """A step of one rank."""

    shape: Shape
    tokens: int
    lora: int = 0
    keep_last: int = 1
    layers_per_checkpoint: int = 1
    tensor: int = 1
    """Ranks that share layers: weights, states, heads and what belongs to them."""
    sequence: int = 1
    """Ranks that share the sequence."""

    @property
    def part(self) -> int:
        """Tokens of this rank."""
        return self.tokens // self.sequence

    @property
    def unit(self) -> int:
        """Bytes of the hidden states of this rank's tokens."""
        return self.part * self.shape.hidden * BF16

    @property
    def trained(self) -> int:
        """Parameters with a gradient."""
        shape = self.shape
        if not self.lora:
            return shape.parameters
        return shape.layers * self.lora * (4 * shape.hidden + 2 * shape.hidden + 2 * shape.kv_width)

    @property
    def checkpoints(self) -> int:
        """Inputs that are kept."""
        return -(-self.shape.layers // self.layers_per_checkpoint)

    def host(self) -> int:
        """Bytes of checkpoints in pinned host memory."""
        return max(0, self.checkpoints - self.keep_last) * self.unit

    def device(self, loss_tile: int) -> dict[str, int]:
        """Bytes by kind while the deepest layer's backward is at its highest; the logits are another moment's."""
        unit, heads = self.unit, self.unit // self.tensor
        key_width = max(self.shape.kv_width // self.tensor, self.shape.head_width)  # a head at least
        kv = 2 * self.part * key_width * BF16  # keys and values together
        frozen = 0 if not self.lora else self.trained * BF16
        return {
            "weights": (self.shape.parameters * BF16 + frozen) // self.tensor,
            "masters and moments": self.trained * STATES // self.tensor,
            "gradients": self.trained * GRADIENT // self.tensor,
            "rotary tables": 2 * self.part * self.shape.head_width * BF16,
            "checkpoints kept": min(self.keep_last, self.checkpoints) * unit,
            "inputs computed again": (self.layers_per_checkpoint - 1) * unit,
            "layer's input on its way": unit,
            "residual's gradient": unit,
            "norm, queries, keys, values, output": unit + 2 * heads + kv,
            "their gradients": 2 * heads + kv,
            "keys' and values' gradients per query head": 2 * heads,
            "queries' gradient in fp32": 2 * heads,
            "logits of a tile (another moment)": loss_tile
            * self.shape.vocabulary
            // self.tensor
            * (2 * BF16 + 3 * FP32),
        }

    def kinds(self) -> dict[str, int]:
        """Bytes by what they are for, on the device and in host memory, at that moment."""
        device = self.device(0)
        states = ("weights", "gradients", "masters and moments")
        others = sum(size for kind, size in device.items() if kind not in states)
        return {
            "parameters": device["weights"],
            "gradients": device["gradients"],
            "states": device["masters and moments"],
            "activations": others,
            "checkpoints on host": self.host(),
        }

    def flops(self) -> dict[str, float]:
        """Of attention and of products with weights, on this rank: forward, forward again, backward."""
        shape, tokens, ranks = self.shape, self.tokens, self.tensor * self.sequence
        again = 2 - 1 / self.layers_per_checkpoint  # forwards in backward, of which the first is a checkpoint's own
        attention = shape.layers * 4 * tokens**2 * shape.hidden / 2
        weights = shape.parameters - shape.vocabulary * shape.hidden
        products = 2 * tokens * weights
        return {
            "attention": attention * (1 + again + 2.5) / ranks,
            "products": products * (1 + again + (1 if self.lora else 2)) / ranks,
        }


def lines(plan: Plan, loss_tile: int) -> list[str]:
    """The plan as people read it."""
    device, flops = plan.device(loss_tile), plan.flops()
    at_once = sum(size for kind, size in device.items() if "another moment" not in kind)
    return [
        f"{plan.shape.parameters / 1e9:.2f}B parameters, {plan.trained / 1e6:.1f}M trained, {plan.tokens} tokens; "
        f"hidden states {plan.unit / GIB:.2f} GiB",
        *(f"  {kind:<44} {size / GIB:8.2f} GiB" for kind, size in device.items()),
        f"  {'expected peak of the device':<44} {at_once / GIB:8.2f} GiB",
        f"  {'checkpoints in host memory':<44} {plan.host() / GIB:8.2f} GiB",
        "  by kind, GiB: " + ", ".join(f"{kind} {size / GIB:.1f}" for kind, size in plan.kinds().items()),
        *(f"  {kind:<44} {count:8.2e} operations" for kind, count in flops.items()),
        f"  at 400 TFLOP/s {sum(flops.values()) / 4e14:.0f} s, at 600 TFLOP/s {sum(flops.values()) / 6e14:.0f} s",
    ]
