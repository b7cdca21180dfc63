"""Layers that compute with compressed weights and inputs, under their published names.

[Note: stand-ins] While a layer runs, attributes of it stand before its parameters of the same name: the rounded and
masked weight, and the masked bias. So whatever the layer computes, it computes with these, and its class, its
parameters and the names in its state dict stay what they are. Hooks put them there, inside of those that make sharded
parameters whole. Gradients pass through the rounding to the parameter.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor, nn

from deepspeed.compression.layer_state import (
    PRUNINGS,
    ActivationRounding,
    BitPace,
    LayerCompression,
    Pruning,
    WeightRounding,
    over_inputs,
    require_whole,
)
from deepspeed.compression.snip import MOMENTUM, BlockRemoval
from deepspeed.compression.stored import require_rows
from deepspeed.compression.utils import TopKBinarizer, kept_of, stand_in
from deepspeed.errors import UsageError
from deepspeed.ops.quantizer.quantizer import Reduce, in_steps, round_groups
from deepspeed.parallel.regions import GroupMembers, Way, between, cut_of, enter, joined, leave, own, summed
from deepspeed.transformers.replacement import whole_shape

__all__ = [
    "BNLayer_Compress",
    "ColumnParallelLinear_Compress",
    "CompressedLayer",
    "Conv2dLayer_Compress",
    "Embedding_Compress",
    "LinearLayer_Compress",
    "QuantAct",
    "RowParallelLinear_Compress",
    "compression_of",
]


class QuantAct(nn.Module):
    """Rounds activations by a moving mean of the ranges that it saw in training."""

    x_min_max: Tensor

    def __init__(self, act_range_momentum: float = 0.95, quant_mode: str = "symmetric") -> None:
        super().__init__()
        if quant_mode not in ("symmetric", "asymmetric"):
            raise UsageError(f"QuantAct: quant_mode is {quant_mode!r}; expected symmetric or asymmetric")
        self.act_range_momentum, self.quant_mode = act_range_momentum, quant_mode
        self.register_buffer("x_min_max", torch.zeros(2))

    def forward(self, x: Tensor, num_bits: int, *args: Any, reduce: Reduce | None = None) -> Tensor:
        """`x` in so many bits; `reduce` joins the ranges of ranks that have parts of it."""
        if self.training and torch._C._current_graph_task_id() == -1:  # no backward computes it again
            self._see(x.detach(), reduce)
        low, high = self.x_min_max.float()[:, None, None].unbind(0)
        found = in_steps(x.detach().float(), num_bits, (low, high), asym=self.quant_mode == "asymmetric")
        return stand_in(x, found.values.view(x.shape).to(x.dtype))

    @torch.no_grad()
    def _see(self, x: Tensor, reduce: Reduce | None) -> None:
        ends = torch.stack([-x.amin(), x.amax()]).float()
        seen = (ends if reduce is None else reduce(ends, "max")) * ends.new_tensor([-1.0, 1.0])
        momentum = self.act_range_momentum if bool((self.x_min_max != 0).any()) else 0.0
        self.x_min_max.copy_(self.x_min_max.float().lerp_(seen, 1.0 - momentum))


def compression_of(module: nn.Module) -> LayerCompression | None:
    """What a layer knows of its compression; None if it has none."""
    found = module.__dict__.get("compression")
    return found if isinstance(found, LayerCompression) else None


def _enter(module: CompressedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """[Note: stand-ins]"""
    for name, value in zip(("weight", "bias"), module.effective(), strict=True):
        if value is not None:  # integers have no parameter
            module.__dict__[name] = value
    if args:
        return (module.rounded_input(args[0]), *args[1:]), kwargs
    return args, {
        name: module.rounded_input(value) if name.startswith("input") else value for name, value in kwargs.items()
    }


def _leave(module: nn.Module, _args: Any, _output: Any) -> None:
    for name in ("weight", "bias"):
        module.__dict__.pop(name, None)


class CompressedLayer(nn.Module):
    """What is common to them: a layer becomes one by its class, and computes as before until something is enabled."""

    fits: tuple[str, ...] = ("weight_quantization", "activation_quantization", "sparse_pruning")
    """The techniques for such layers."""
    follows: tuple[str, ...] = ()
    """Others with which they get smaller, as related modules."""
    activation_quantizer: QuantAct

    @property
    def compressed(self) -> LayerCompression:
        """What the layer knows; it is hooked when this is first asked."""
        found = compression_of(self)
        if found is None:
            found = self.compression = LayerCompression(type(self))
            found.handles = [
                self.register_forward_pre_hook(_enter, with_kwargs=True),
                self.register_forward_hook(_leave, always_call=True),
            ]
        return found

    # ---- what is enabled

    def enable_weight_quantization(
        self,
        start_bits: int,
        target_bits: int,
        quantization_period: int = 1,
        weight_quantization_enabled_in_forward: bool = True,
        quantization_type: str = "symmetric",
        num_groups: int = 1,
    ) -> None:
        """Round the weight, once a schedule turns it on."""
        asym = quantization_type == "asymmetric"
        in_forward = weight_quantization_enabled_in_forward
        self.round_weight_by(
            WeightRounding(start_bits, target_bits, quantization_period, num_groups, asym, in_forward=in_forward)
        )

    def round_weight_by(self, rounding: WeightRounding) -> None:
        """The same with all there is to say."""
        state, numel = self.compressed, _numel(self._parameters["weight"])
        if numel % rounding.groups:
            raise UsageError(
                f"compression_training: quantize_groups is {rounding.groups}, which does not divide the {numel} "
                f"elements of {state.name or type(self).__name__}.weight; use a divisor"
            )
        if rounding.store_integers:
            rows = whole_shape(self._parameters["weight"])[0]
            require_rows(rows, numel // rows, rounding.groups, state.name)
        state.weights, state.pace = rounding, BitPace.of(rounding)

    def enable_activation_quantization(
        self, bits: int, quantization_type: str = "symmetric", range_calibration: str = "dynamic"
    ) -> None:
        """Round the inputs, once a schedule turns it on."""
        static = range_calibration == "static"
        self.compressed.activations = ActivationRounding(bits, quantization_type == "asymmetric", static)
        if static:
            weight = self._parameters["weight"]
            self.activation_quantizer = QuantAct(quant_mode=quantization_type)
            self.activation_quantizer.to(None if weight is None else weight.device)

    def enable_sparse_pruning(self, ratio: float, method: str) -> None:
        """Keep a share of the elements of the weight."""
        self._prune("sparse_pruning", ratio, method)

    def enable_block_pruning(self, removal: BlockRemoval) -> None:
        """Keep a share of blocks of the weight, which the gradients choose while a schedule goes on."""
        state, weight = self.compressed, self._parameters["weight"]
        assert weight is not None, "the layer has a weight"
        shape, label = whole_shape(weight), state.name or type(self).__name__
        blocks = removal.counts(shape, label)
        _require_some(removal.ratio, math.prod(blocks), "sparse_pruning", label)
        self.register_buffer(_mask("sparse_pruning"), torch.ones(shape, dtype=torch.bool, device=weight.device))
        # the bits of float32 numbers: a cast of the model to a narrow dtype leaves whole numbers alone
        self.register_buffer(_scores("sparse_pruning"), torch.zeros(blocks, dtype=torch.int32, device=weight.device))
        state.prunings["sparse_pruning"] = Pruning("snip_momentum", removal.ratio, removal=removal)

    @torch.no_grad()
    def see_gradient(self, grad: Tensor, value: Tensor) -> None:
        """Add to the scores of blocks by how much the loss would change without them, to first order."""
        removal, mask, scores = self._blocks()
        found, cut = (grad.float() * value.float()).abs().to(scores.device), cut_of(self)
        split = None if cut is None else cut.splits.get("weight")
        if cut is None or split is None:
            found = removal.summed(found)
        else:  # a block may lie on several ranks
            whole = found.new_zeros(mask.shape)
            if split.first_holder(cut.axis.rank) == cut.axis.rank:
                split.place(found, cut.axis.rank, whole)
            found = summed(removal.summed(whole), cut.axis)
        if bool(found.isfinite().all()):  # else the step is skipped
            scores.mul_(MOMENTUM).add_(found)

    @torch.no_grad()
    def remove_blocks(self, step: int) -> None:
        """Let the blocks go that a schedule removes at a step."""
        removal, mask, scores = self._blocks()
        if not removal.removes(step):
            return
        if not bool(scores.any()):
            raise UsageError(
                f"compression_training.sparse_pruning: method is snip_momentum, and no gradient of "
                f"{self.compressed.name or type(self).__name__} was seen before step {step}. Call before_step() of the "
                "compression_scheduler between backward and optimizer.step(), and leave frozen layers out"
            )
        kept = removal.kept(scores, removal.summed(mask.float()) > 0, step)
        mask.copy_(removal.spread(kept, mask.shape))

    def _blocks(self) -> tuple[BlockRemoval, Tensor, Tensor]:
        """Which blocks go when, the mask of elements, and the scores of blocks."""
        removal = self.compressed.prunings["sparse_pruning"].removal
        mask, bits = (self._buffers[name("sparse_pruning")] for name in (_mask, _scores))
        assert removal is not None, "the method is snip_momentum"
        assert mask is not None, "which has a mask"
        assert bits is not None, "and scores"
        return removal, mask, bits.view(torch.float32)

    def _prune(self, name: str, ratio: float, method: str, heads: int = 1) -> None:
        """Choose what goes by how large it is now: for good (l1), or as the scores that are trained from here."""
        state = self.compressed
        require_whole(self._parameters["weight"], f"compression_training.{name}")
        importance = self._importance(name, heads)
        _require_some(ratio, importance.numel(), name, state.name or type(self).__name__)
        if method == "topk":
            self.register_parameter(_scores(name), nn.Parameter(importance / importance.amax().clamp(min=1e-12)))
        else:
            mask: Tensor = TopKBinarizer.apply(importance, ratio, False)  # type: ignore[no-untyped-call]
            self.register_buffer(_mask(name), mask.bool())
        state.prunings[name] = Pruning(method, ratio, heads)  # type: ignore[arg-type]

    @torch.no_grad()
    def _importance(self, name: str, heads: int) -> Tensor:
        weight = self._parameters["weight"]
        assert weight is not None, "the layer has a weight"
        size = weight.detach().float().abs()
        if name == "head_pruning":
            return size.sum(0).view(heads, -1).sum(1)
        if name == "sparse_pruning":
            return size
        return size.flatten(1).sum(1).view(-1, *[1] * (size.dim() - 1))

    def get_mask(self, pruning_type: str) -> Tensor:
        """The mask of `row`, `head`, `sparse` or `channel`: of the weight's dims that it has, and one for each head."""
        name = pruning_type if pruning_type in PRUNINGS else f"{pruning_type}_pruning"
        pruning = self.compressed.prunings.get(name)
        if pruning is None:
            raise UsageError(f"{name} is not enabled for {self.compressed.name or type(self).__name__}")
        if pruning.method != "topk":
            return self._buffers[_mask(name)]  # type: ignore[return-value]
        scores = getattr(self, _scores(name))
        found: Tensor = TopKBinarizer.apply(scores, pruning.ratio, False)  # type: ignore[no-untyped-call]
        return found

    # ---- what is computed with

    def effective(self) -> tuple[Tensor, Tensor | None]:
        """The weight and the bias that the layer computes with now."""
        state, cut = self.compressed, cut_of(self)
        weight: Any = self._parameters.get("weight")  # none where integers rest
        bias: Any = self._parameters.get("bias")
        if state.weights is not None and state.weights_on:
            keep = self.training and not state.weights.in_forward and not hasattr(weight, "ds_id")
            weight = stand_in(weight, state.round_weight(weight, cut, keep=keep))
        for name, pruning in state.prunings.items():
            if pruning.on:
                mask = self._spread(name, pruning, self.get_mask(name))
                weight = weight * self._part(mask, "weight").to(weight.dtype)
                if bias is not None and name in ("row_pruning", "channel_pruning"):
                    bias = bias * self._part(mask.reshape(-1), "bias").to(bias.dtype)
        return weight, bias

    def _spread(self, name: str, pruning: Pruning, mask: Tensor) -> Tensor:
        """The mask in dims of the weight."""
        if name != "head_pruning":
            return mask
        weight, split = self._parameters["weight"], None
        cut = cut_of(self)
        if cut is not None:
            split = cut.splits.get("weight")
        assert weight is not None, "the layer has a weight"
        inputs = weight.shape[1] if split is None or split.dim != 1 else split.total
        return mask.repeat_interleave(inputs // pruning.heads).view(1, -1)

    def _part(self, mask: Tensor, name: str) -> Tensor:
        """What of a mask belongs to this rank's part of a parameter."""
        cut = cut_of(self)
        split = None if cut is None else cut.splits.get(name)
        if cut is None or split is None:
            return mask
        mask = enter(mask, cut.axis) if mask.requires_grad else mask  # each rank has a share in a score's gradient
        if mask.dim() <= split.dim or mask.shape[split.dim] != split.total:
            return mask
        return split.cut(mask, cut.axis.rank)

    def rounded_input(self, input: Any) -> Any:
        """What the layer sees of an input."""
        activations = self.compressed.activations
        if activations is None or not activations.on or not input.numel():  # an expert may get no tokens
            return input
        reduce = over_inputs(cut_of(self))
        if activations.static:
            return self.activation_quantizer(input, activations.bits, reduce=reduce)
        tokens = input.detach().reshape(self._tokens(input), -1)
        found = round_groups(tokens, activations.bits, asym=activations.asym, reduce=reduce)
        return stand_in(input, found.values.view(input.shape).to(input.dtype))

    def _tokens(self, input: Tensor) -> int:
        """How many parts of an input have a range of their own."""
        return input.numel() // max(input.shape[-1], 1)

    # ---- what becomes of it

    @torch.no_grad()
    def fix_weight_quantization(self) -> None:
        """Let the parameter be what it is rounded to at the end of the schedule."""
        state, weight = self.compressed, self._parameters["weight"]
        assert state.weights is not None, "the weight is quantised"
        assert weight is not None, "as it was when that began"
        weight.copy_(state.codes(weight, state.weights.target_bits).values.view(weight.shape))
        state.weights = state.pace = None

    @torch.no_grad()
    def fix_pruning(self, name: str, *, takes: bool) -> Tensor:
        """Let what is pruned be zero and drop the mask, or take it out; returns the rows, heads or channels kept."""
        state = self.compressed
        pruning, mask = state.prunings[name], self.get_mask(name).detach().bool()
        spread = self._spread(name, pruning, mask)
        weight, bias = self._parameters["weight"], self._parameters.get("bias")
        assert weight is not None, "the layer has a weight"
        weight.mul_(spread.to(weight.dtype))
        if bias is not None and name in ("row_pruning", "channel_pruning"):
            bias.mul_(mask.view(-1).to(bias.dtype))
        del state.prunings[name]
        for held in (self._buffers, self._parameters):
            held.pop(_mask(name), None)
            held.pop(_scores(name), None)
        kept = spread.flatten()
        if takes:
            self.take(kept, int(name == "head_pruning"))  # heads are among the inputs
        return mask.flatten() if name == "head_pruning" else kept

    def follow_pruning(self, name: str, kept: Tensor) -> None:
        """Lose the inputs that a layer before it has lost; with heads the outputs of those."""
        if name != "head_pruning":
            self.take(kept, 1)
            return
        outputs, heads = len(self._parameters["weight"]), len(kept)  # type: ignore[arg-type]
        if outputs % heads:
            raise UsageError(
                f"redundancy_clean: {self.compressed.name} has {outputs} outputs, which {heads} heads do not divide; "
                "name layers of queries, keys and values in related_modules"
            )
        self.take(kept.repeat_interleave(outputs // heads), 0)

    @torch.no_grad()
    def take(self, kept: Tensor, dim: int) -> None:
        """Keep a part of the outputs (dim 0) or inputs (dim 1) alone."""
        weight, bias = self._parameters["weight"], self._parameters.get("bias")
        assert weight is not None, "the layer has a weight"
        size, label = weight.shape[dim], self.compressed.name
        if kept.numel() != size:
            raise UsageError(
                f"redundancy_clean: {label} has {size} {('outputs', 'inputs')[dim]}, and what is pruned before it "
                f"{kept.numel()}; name modules in related_modules that fit"
            )
        index = kept.nonzero().flatten()
        if self.compressed.grid is not None:
            self.compressed.grid.take(index, dim, label)
        self.weight = nn.Parameter(weight.index_select(dim, index), requires_grad=weight.requires_grad)
        if dim == 0 and bias is not None:
            self.bias = nn.Parameter(bias.index_select(0, index), requires_grad=bias.requires_grad)
        for name in self.compressed.prunings:
            self._take_of_mask(name, index, dim)
        self._sized(dim, index)

    def _take_of_mask(self, name: str, index: Tensor, dim: int) -> None:
        """Masks of the layer itself follow."""
        for key, where in ((_mask(name), self._buffers), (_scores(name), self._parameters)):
            value = where.get(key)
            if value is not None and value.dim() > dim and value.shape[dim] > 1:
                made = value.index_select(dim, index)
                where[key] = nn.Parameter(made) if isinstance(value, nn.Parameter) else made  # type: ignore[assignment]

    def _sized(self, dim: int, index: Tensor) -> None:
        """Attributes that tell sizes follow."""
        names = ("out_features", "in_features") if hasattr(self, "out_features") else ("out_channels", "in_channels")
        if hasattr(self, names[dim]):
            setattr(self, names[dim], len(index))


def _numel(param: Any) -> int:
    return math.prod(whole_shape(param))


def _require_some(ratio: float, count: int, technique: str, label: str) -> None:
    if not kept_of(ratio, count):
        raise UsageError(
            f"compression_training.{technique}: dense_ratio {ratio} of {label} keeps none of {count}; use a larger one"
        )


def _mask(name: str) -> str:
    return f"{name}_mask"


def _scores(name: str) -> str:
    return f"{name.removesuffix('_pruning')}_mask_scores"


class LinearLayer_Compress(CompressedLayer, nn.Linear):  # type: ignore[misc]  # its parameters are those
    """A linear layer with everything but channels."""

    fits = (*CompressedLayer.fits, "row_pruning", "head_pruning")

    def enable_row_pruning(self, ratio: float, method: str) -> None:
        """Keep a share of the outputs."""
        self._prune("row_pruning", ratio, method)

    def enable_head_pruning(self, ratio: float, method: str, num_heads: int) -> None:
        """Keep a share of the heads whose outputs are the inputs of this layer."""
        if _numel(self._parameters["weight"]) // self.out_features % num_heads:
            raise UsageError(
                f"compression_training.head_pruning.shared_parameters.num_heads is {num_heads}, which does not divide "
                f"the {self.in_features} inputs of {self.compressed.name or type(self).__name__}"
            )
        self._prune("head_pruning", ratio, method, num_heads)


class Conv2dLayer_Compress(CompressedLayer, nn.Conv2d):  # type: ignore[misc]  # its parameters are those
    """A convolution with channel pruning."""

    fits = (*CompressedLayer.fits, "channel_pruning")

    def _tokens(self, input: Tensor) -> int:
        return len(input)

    def enable_channel_pruning(self, ratio: float, method: str) -> None:
        """Keep a share of the output channels."""
        self._prune("channel_pruning", ratio, method)

    def _sized(self, dim: int, index: Tensor) -> None:
        if self.groups != 1:
            raise UsageError(
                f"redundancy_clean: {self.compressed.name} is a convolution of {self.groups} groups, whose channels "
                "cannot be taken out; leave it out of related_modules"
            )
        super()._sized(dim, index)


class BNLayer_Compress(CompressedLayer, nn.BatchNorm2d):
    """A batch norm behind convolutions whose channels are pruned: it gives zero for these."""

    fits = ()
    follows = ("channel_pruning",)

    def effective(self) -> tuple[Tensor, Tensor | None]:
        weight: Any = self._parameters["weight"]
        bias: Any = self._parameters["bias"]
        for layer in self.compressed.follows:
            pruning = layer.compressed.prunings.get("channel_pruning")
            if pruning is not None and pruning.on:
                mask = layer.get_mask("channel").view(-1)
                weight, bias = weight * mask.to(weight.dtype), bias * mask.to(bias.dtype)
        return weight, bias

    @torch.no_grad()
    def follow_pruning(self, name: str, kept: Tensor) -> None:
        """Lose the channels that the convolution before it has lost."""
        for values in (self._parameters, self._buffers):
            for key, value in list(values.items()):
                if value is not None and value.dim() == 1:
                    values[key] = nn.Parameter(value[kept]) if isinstance(value, nn.Parameter) else value[kept]  # type: ignore[assignment]
        self.num_features = int(kept.sum())


class Embedding_Compress(CompressedLayer, nn.Embedding):  # type: ignore[misc]  # its parameters are those
    """An embedding whose weight is rounded, a group for each token if groups are as many."""

    fits = ("weight_quantization",)


class _MpuLinear(LinearLayer_Compress):
    """A linear layer of which the ranks of an `mpu` have parts: of its outputs (dim 0) or of its inputs (dim 1).

    `whole`: what is split outside is whole: the output is joined, or the input cut.
    """

    def __init__(
        self, mpu: Any, sizes: tuple[int, int], dim: Literal[0, 1], *, bias: bool, whole: bool, skip_bias_add: bool
    ) -> None:
        inputs, outputs = sizes
        if dim == 0:
            outputs = _share(outputs, mpu, "output_size")
        else:
            inputs = _share(inputs, mpu, "input_size")
        super().__init__(inputs, outputs, bias=bias)
        self._ranks = GroupMembers(mpu.get_model_parallel_group())
        self._dim, self._whole, self.skip_bias_add = dim, whole, skip_bias_add

    def forward(self, input_: Tensor) -> Any:
        """As Megatron's layers: (output, the bias if it was not added)."""
        part = enter(input_, self._ranks) if self._dim == 0 else self._crossed(input_, (own, joined))
        output = nn.functional.linear(part, self.weight)
        if self._dim == 1:
            output = leave(output, self._ranks)
        if self.bias is not None and not self.skip_bias_add:
            output = output + self.bias
        output = self._crossed(output, (joined, own)) if self._dim == 0 else output
        return output, self.bias if self.skip_bias_add else None

    def _crossed(self, tensor: Tensor, ways: tuple[Way, Way]) -> Tensor:
        """From parts to the whole, or back."""
        if not self._whole:
            return tensor
        size = self.out_features if self._dim == 0 else self.in_features
        return between(tensor, self._ranks, [size] * self._ranks.size, -1, ways)


def _share(size: int, mpu: Any, name: str) -> int:
    ranks = int(mpu.get_model_parallel_world_size())
    if size % ranks:
        raise UsageError(f"{name} is {size}, which {ranks} model-parallel ranks do not divide; use a multiple")
    return size // ranks


class ColumnParallelLinear_Compress(_MpuLinear):
    """Computes this rank's outputs from the whole input."""

    def __init__(
        self,
        mpu: Any,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = True,
        skip_bias_add: bool = False,
    ) -> None:
        sizes = input_size, output_size
        super().__init__(mpu, sizes, 0, bias=bias, whole=gather_output, skip_bias_add=skip_bias_add)


class RowParallelLinear_Compress(_MpuLinear):
    """Computes a summand of all outputs from this rank's inputs."""

    def __init__(
        self,
        mpu: Any,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = False,
        skip_bias_add: bool = False,
    ) -> None:
        sizes = input_size, output_size
        super().__init__(mpu, sizes, 1, bias=bias, whole=not input_is_parallel, skip_bias_add=skip_bias_add)
