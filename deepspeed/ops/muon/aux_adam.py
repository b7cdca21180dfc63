"""`MuonWithAuxAdam`: Muon for the groups marked `use_muon`, Adam for the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepspeed.log import logger
from deepspeed.ops.adam import ADAM, AdamRule, takes_one_pass
from deepspeed.ops.batch_rule import update_
from deepspeed.ops.moments import Group, moment_width
from deepspeed.ops.muon import momentum
from deepspeed.ops.muon.muon import WholeMatrices, check_ns_method, update_matrices
from deepspeed.ops.optimizer import BatchOptimizer, Closure, ParameterBatch, check_hyperparameters, evaluate, refuse

MUON_DEFAULTS: Mapping[str, Any] = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0, "ns_method": "gram"}
ADAM_DEFAULTS: Mapping[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0}

_ADAM_MOMENTS = ("exp_avg", "exp_avg_sq")


class MuonWithAuxAdam(BatchOptimizer):
    """Every group is a dict with `use_muon`; the other keys default to those of its half.

    The Adam half is computed here, or by `adam_optimizer(groups, **adam_optimizer_kwargs)`, which then owns its state
    under this optimizer's name. With `fallback_to_inline` one that cannot be built is replaced, with a warning.
    `moment_bits` of 8, 16 or 32 holds the moments of both halves, if both are computed here.
    """

    moments: ClassVar[tuple[str, ...]] = ("momentum_buffer", *_ADAM_MOMENTS)
    settings: ClassVar[tuple[str, ...]] = ("adam_w_mode", "_adam")

    whole: WholeMatrices | None = None
    """Set where the parameters of the Muon half are fragments of matrices."""

    def __init__(
        self,
        param_groups: Any,
        adam_optimizer: Callable[..., Any] | None = None,
        adam_optimizer_kwargs: Mapping[str, Any] | None = None,
        adam_w_mode: bool = True,
        fallback_to_inline: bool = False,
        *,
        moment_bits: int | None = None,
    ) -> None:
        self.moment_bits = moment_width("MuonWithAuxAdam", moment_bits)
        if moment_bits is not None and adam_optimizer is not None:
            raise ValueError(
                f"MuonWithAuxAdam: moment_bits is {moment_bits} and the Adam half belongs to {adam_optimizer}, which "
                "holds its own moments; leave one of the two out"
            )
        self.adam_w_mode = bool(adam_w_mode)
        self._adam: Any = None
        super().__init__([_completed(group) for group in param_groups], {})
        if adam_optimizer is not None:
            self._adam = self._built(adam_optimizer, adam_optimizer_kwargs or {}, fallback_to_inline)
        if self._adam is not None:
            self._linked()

    def step(self, closure: Closure | None = None, step_id: Any = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` returns."""
        refuse("MuonWithAuxAdam.step", step_id=step_id)
        if self._adam is None:
            return self._step(closure)
        loss = evaluate(closure)
        self._check(self.param_groups)
        self._step(None, [group for group in self.param_groups if group["use_muon"]])
        self._linked().step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which needs `use_muon`."""
        super().add_param_group(_completed(param_group))

    def hold_states(self, dtype: torch.dtype) -> bool:
        """Hold the moments in `dtype`; False if the Adam half belongs to an optimizer that decides by itself."""
        super().hold_states(dtype)
        return self._adam is None or (isinstance(self._adam, BatchOptimizer) and self._adam.hold_states(dtype))

    def _restored(self, param: Tensor, name: str, value: Any) -> Any:
        if self._adam is None or name == "momentum_buffer":
            return super()._restored(param, name, value)
        if isinstance(self._adam, BatchOptimizer):
            return self._adam._restored(param, name, value)
        if name == "step" and not isinstance(value, Tensor):
            return torch.tensor(float(value))  # as torch's own optimizers count
        return value.to(param.device, param.dtype) if name in _ADAM_MOMENTS else value

    def _update_group(self, group: Group) -> None:
        if group["use_muon"]:
            update_matrices(self, group, self.whole)
            return
        for batch in self._batches(group, _ADAM_MOMENTS):
            self._apply(group, batch)

    def _apply(self, group: Group, batch: ParameterBatch) -> None:
        rule, device = AdamRule.of(group, decoupled=self.adam_w_mode), batch.params[0].device
        update_(ADAM, batch, rule, self._conditions_on(device), one_pass=self.takes_one_pass(device))

    def takes_one_pass(self, device: torch.device) -> bool:
        """See `BatchOptimizer`; another optimizer's Adam half takes its own steps."""
        return self._adam is None and momentum.takes_one_pass(device) and takes_one_pass(device)

    def _built(self, build: Callable[..., Any], arguments: Mapping[str, Any], fall_back: bool) -> Any:
        groups = [group for group in self.param_groups if not group["use_muon"]]
        if not groups:
            return None
        try:
            return build([dict(group) for group in groups], **arguments)
        except (ImportError, OSError, RuntimeError) as error:
            if not fall_back:
                raise
            logger.warning("MuonWithAuxAdam: %s could not be built, its own Adam is used: %s", build, error)
            return None

    def _linked(self) -> Any:
        """The Adam optimizer, made to work on this one's groups and state, which may be others than last time."""
        self._adam.param_groups = [group for group in self.param_groups if not group["use_muon"]]
        self._adam.state = self.state
        for group in self._adam.param_groups:
            for key, value in self._adam.defaults.items():
                group.setdefault(key, value)
        return self._adam


def _completed(group: Any) -> dict[str, Any]:
    """`group` with the defaults of its half."""
    if not isinstance(group, dict) or not isinstance(group.get("use_muon"), bool):
        found = f"keys {', '.join(sorted(group))}" if isinstance(group, dict) else type(group).__name__
        raise ValueError(
            f"MuonWithAuxAdam takes dicts with params and use_muon (true or false), found {found}; mark matrices of "
            "hidden layers true, embeddings, heads, norms and biases false"
        )
    complete = {**(MUON_DEFAULTS if group["use_muon"] else ADAM_DEFAULTS), **group}
    amounts = {key: complete[key] for key in ("lr", "weight_decay", "momentum", "eps") if key in complete}
    if group["use_muon"]:
        check_ns_method(complete["ns_method"])
        check_hyperparameters("MuonWithAuxAdam", **amounts)
    else:
        check_hyperparameters("MuonWithAuxAdam", betas=complete["betas"], **amounts)
    return complete
