"""What an engine holds, by kind: for whoever tells people where memory went."""

from __future__ import annotations

from torch import Tensor

from deepspeed.runtime.parts import Parts

__all__ = ["held_tensors"]


def held_tensors(parts: Parts) -> dict[str, list[Tensor]]:
    """Parameters, gradients, masters, moments and buffers, wherever they are; some may share memory."""
    params = list(parts.module.parameters())
    pieces = [piece for group in parts.states.groups for piece in group.pieces] if parts.states is not None else []
    states = parts.basic_optimizer.state.values() if parts.basic_optimizer is not None else ()
    grads = [param.grad for param in params]
    grads += [grad for piece in pieces for grad in (piece.gradient, piece.master.grad, piece.home)]
    return {
        "parameters": [*params, *(piece.source for piece in pieces)],
        "gradients": [grad for grad in grads if grad is not None],
        "masters": [piece.master for piece in pieces],
        "moments": [value for state in states for value in state.values() if isinstance(value, Tensor)],
        "buffers of the model": list(parts.module.buffers()),
    }
