"""Linear layers of which a rank has some outputs or inputs, and whose sums over ranks are waited for somewhere else.

[Note: a gradient on its way]
The gradient of a column layer's input is a sum over ranks. The layer's backward begins it, computes the gradient of its
weight meanwhile, and returns it unfinished; `NoOper`, through which the input came, waits for it. Nobody may read it in
between. So an input that came through no `NoOper` gets one, and a second layer behind the same one is an error.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed import comm
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import UsageError
from deepspeed.parallel.regions import Members
from deepspeed.tensor_parallel.draws import numbers_of_its_own

__all__ = [
    "DominoAsyncColumnParallelLinear",
    "DominoAsyncColumnParallelLinearImpl",
    "Handle",
    "NoOper",
    "RowParallelLinearNoComm",
]

Handles = MutableMapping[Any, "Handle"]


class Handle:
    """A gradient that is summed, between the layer that begins it and the place where it is waited for."""

    def __init__(self) -> None:
        self.work: Any = None
        self.taken = False
        """Whether a layer has promised to begin it."""

    def wait(self) -> None:
        """Until the sum is there."""
        if self.work is not None:
            self.work.wait()
            self.work = None


class NoOper(torch.autograd.Function):
    """`NoOper.apply(input_, handle_dic, h_id)`: as it is; its backward waits for the sum that a layer began."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, handle_dic: Handles, h_id: Any) -> Tensor:
        """The input, for one layer that is called with the same `handle_dic` and `h_id`."""
        ctx.handle = handle_dic[h_id] = Handle()
        return input_.view_as(input_)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Wait."""
        ctx.handle.wait()
        return grads[0], None, None

    @staticmethod
    def symbolic(graph: Any, input_: Any, handle_dic: Any, h_id: Any) -> Any:
        """In an exported graph there is nothing to wait for."""
        return input_


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None, handle: Handle, group: Any) -> Tensor:
        kind = inputs.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else inputs.dtype
        ctx.dtypes = inputs.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.handle, ctx.group = handle, group
        factors = inputs.to(dtype), weight if dtype is inputs.dtype else weight.to(dtype)
        ctx.save_for_backward(*factors)
        with torch.autocast(kind, enabled=False):
            return F.linear(*factors, None if bias is None else bias.to(factors[1].dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), (inputs, weight) = grads, ctx.saved_tensors
        of_inputs, of_weight, of_bias = ctx.dtypes
        to_inputs = to_weight = to_bias = None
        if ctx.needs_input_grad[0]:
            to_inputs = grad.matmul(weight).to(of_inputs).contiguous()
            if ctx.group.size() > 1:
                ctx.handle.work = comm.all_reduce(to_inputs, group=ctx.group, async_op=True)
        flat = grad.reshape(-1, grad.shape[-1])
        if ctx.needs_input_grad[1]:
            to_weight = flat.t().matmul(inputs.reshape(-1, inputs.shape[-1])).to(of_weight)
        if of_bias is not None and ctx.needs_input_grad[2]:
            to_bias = flat.sum(0).to(of_bias)
        return to_inputs, to_weight, to_bias, None, None


class DominoAsyncColumnParallelLinearImpl:
    """A linear layer's product, whose input's gradient is summed over ranks while that of the weight is computed."""

    @staticmethod
    def apply(
        inp: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        handle_dic: Handles,
        h_id: Any,
        group: ProcessGroup | None = None,
    ) -> Tensor:
        """[…, inputs] → […, outputs of this rank]; without a group the ranks are those of the world.

        See [Note: a gradient on its way].
        """
        ranks = comm.get_world_group() if group is None else group
        inp, handle = _passed(inp, handle_dic, h_id)
        return _Product.apply(inp, weight, bias, handle, ranks)  # type: ignore[no-any-return,no-untyped-call]


def _passed(inp: Tensor, handle_dic: Handles, h_id: Any) -> tuple[Tensor, Handle]:
    """The input behind a `NoOper` that nobody else reads, and the handle that this one waits for."""
    handle = _handle_of(inp)
    if handle is None or handle_dic.get(h_id) is not handle:
        if handle is not None and handle.taken:
            raise UsageError(
                f"Domino: a second layer reads what came through one NoOper (here with h_id {h_id!r}), whose gradient "
                "the first layer returns unfinished. Let each of them have a NoOper of its own"
            )
        inp = NoOper.apply(inp, handle_dic, h_id)  # type: ignore[no-untyped-call]
    handle = handle_dic.pop(h_id)
    handle.taken = True
    return inp, handle


def _handle_of(tensor: Tensor) -> Handle | None:
    """Of a tensor that comes out of a `NoOper`."""
    handle = getattr(tensor.grad_fn, "handle", None)
    return handle if isinstance(handle, Handle) else None


class _Linear(nn.Module):
    weight: Tensor
    bias: Tensor | None

    def _make(self, outputs: int, inputs: int, config: Any, bias: bool) -> None:
        dtype = getattr(config, "params_dtype", None) or torch.get_default_dtype()
        device = get_accelerator().current_device_name()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(outputs, dtype=dtype, device=device)) if bias else None

    def _init(self, config: Any, init_method: Callable[[Tensor], Any]) -> None:
        if getattr(config, "perform_initialization", True):
            with torch.no_grad():
                init_method(self.weight)


class DominoAsyncColumnParallelLinear(_Linear):
    """Computes this rank's `output_size` outputs of the whole input; sizes are those of a rank."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        _tp_group: ProcessGroup,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool = True,
        skip_bias_add: bool = False,
    ) -> None:
        super().__init__()
        self.peers, self.skip_bias_add = Members(_tp_group), skip_bias_add
        self._make(output_size, input_size, config, bias)
        with numbers_of_its_own(self.peers):
            self._init(config, init_method)
        _mark(self.weight, 0)
        _mark(self.bias, 0)

    def forward(self, input_: Tensor, handle_dic: Handles, h_id: Any) -> tuple[Tensor, Tensor | None]:
        """[…, inputs] → […, outputs of this rank], and the bias where it is not added here."""
        added, group = None if self.skip_bias_add else self.bias, self.peers.group
        output = DominoAsyncColumnParallelLinearImpl.apply(input_, self.weight, added, handle_dic, h_id, group)
        return output, self.bias if self.skip_bias_add else None


class RowParallelLinearNoComm(_Linear):
    """Computes a summand of all outputs from this rank's `input_size` inputs; whoever calls it sums over ranks.

    A bias that is added here is in every summand, so that several ranks take `skip_bias_add` and add it to the sum.
    The weight is drawn from torch's generators as they are: give ranks different states for it.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        config: Any,
        init_method: Callable[[Tensor], Any],
        bias: bool = True,
        stride: int = 1,
        skip_bias_add: bool = False,
    ) -> None:
        super().__init__()
        self.skip_bias_add = skip_bias_add
        self._make(output_size, input_size, config, bias)
        self._init(config, init_method)
        _mark(self.weight, 1, stride)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        """[…, inputs of this rank] → a summand of […, outputs], and the bias where it is not added here."""
        output = F.linear(input_, self.weight, None if self.skip_bias_add else self.bias)
        return output, self.bias if self.skip_bias_add else None


def _mark(param: Any, dim: int, stride: int = 1) -> None:
    """As Megatron marks a parameter of which ranks hold different parts."""
    if param is not None:
        param.tensor_model_parallel, param.partition_dim, param.partition_stride = True, dim, stride
