"""`OnebitLamb`: LAMB for `freeze_step` steps; then momenta are exchanged as signs, and coefficients follow a factor.

Momenta travel as one tensor, each multiplied so that their mean squares are alike. After the exchange a fresh variance
is advanced with the gradient that the new momentum tells of; by how much larger it makes steps, within bounds, the
coefficient that LAMB had on average is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepspeed.ops.batch_rule import BatchRule, update_
from deepspeed.ops.lamb import LAMB, LambRule
from deepspeed.ops.moments import Group
from deepspeed.ops.onebit.base import Member, OneBitOptimizer, gradient_of, masked

__all__ = ["OnebitLamb"]


class OnebitLamb(OneBitOptimizer):
    """1-bit LAMB. `deepspeed`, `cuda_aware` and the name of a backend change nothing."""

    moments: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh")
    positive: ClassVar[frozenset[str]] = frozenset({"exp_avg_sq", "exp_avg_sq_fresh"})
    settings: ClassVar[tuple[str, ...]] = ("freeze_step", "steps")
    rule: ClassVar[BatchRule] = LAMB

    _coefficients: Sequence[float | Tensor] = ()

    def __init__(
        self,
        params: Any,
        deepspeed: Any = None,
        lr: float = 1e-3,
        freeze_step: int = 100000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
    ) -> None:
        refused = {"eps_inside_sqrt": eps_inside_sqrt, "max_grad_norm": max_grad_norm, "amsgrad": amsgrad}
        self.freeze_step = freeze_step
        rates = {"lr": lr, "bias_correction": bias_correction, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        bounds = {"max_coeff": max_coeff, "min_coeff": min_coeff, "coeff_beta": coeff_beta}
        factors = {"factor_max": factor_max, "factor_min": factor_min, "factor_threshold": factor_threshold}
        if not 0 <= coeff_beta < 1:
            raise ValueError(f"OnebitLamb: coeff_beta is {coeff_beta}; expected a share in [0, 1)")
        for low, high in (("min_coeff", "max_coeff"), ("factor_min", "factor_max")):
            least, most = (bounds | factors)[low], (bounds | factors)[high]
            if not 0 <= least <= most:
                raise ValueError(f"OnebitLamb: {low} is {least} and {high} {most}; expected 0 <= {low} <= {high}")
        whole = {"freeze_step": (freeze_step, 0)}
        self._begin_as(params, rates | bounds | factors, refused, comm_backend_name, whole)

    def get_lamb_coeffs(self) -> list[float]:
        """The coefficients of the last step, one for each parameter that it updated."""
        return [float(coefficient) for coefficient in self._coefficients]

    def _update(self) -> None:
        self._coefficients = ()
        if self.steps < self.freeze_step:
            for group in self.param_groups:
                self._warm(group)
            return
        members: list[Member] = []
        for group, settled, others in self._divide():
            self._warm_others(group, others)
            members += [(group, param, self.state[param]["exp_avg"].clone()) for param in settled]
        if self.exchange is not None and self.exchange.owned:
            self._exchange_pieces(members)
        elif members:
            self._exchange_momenta(members)
        self._follow(members)

    def _warm(self, group: Group) -> None:
        """LAMB, with the mean of its coefficients."""
        for param in group["params"]:
            if param.grad is not None and "step" not in self.state[param]:
                self._begin(group, param, self.state[param], self.moments)
                self.state[param].update(lamb_coeff_freeze=0.0, last_factor=1.0)
        if self.exchange is not None and self.exchange.owned:
            found = self._warm_pieces(group)
        else:
            found = self._warm_whole(group)
        params = [param for param in group["params"] if param in found]
        ratios = torch.stack([found[param] for param in params]).tolist() if params else []
        self._coefficients = [*self._coefficients, *ratios]
        for param, ratio in zip(params, ratios, strict=True):
            state = self.state[param]
            if ratio != 1.0:
                state["lamb_coeff_freeze"] += (1 - group["coeff_beta"]) * (ratio - state["lamb_coeff_freeze"])
            if state["step"] == self.freeze_step:
                state["exp_avg_sq_fresh"].copy_(state["exp_avg_sq"])

    def _rule_of(self, group: Group) -> LambRule:
        return LambRule.of(group, eps_inside_sqrt=False, scale=1.0)

    def _warm_whole(self, group: Group) -> dict[Tensor, Tensor]:
        found: dict[Tensor, Tensor] = {}
        for batch in self._batches(group, self.moments[:2]):
            results = update_(LAMB, batch, self._rule_of(group), None, one_pass=False)
            found.update(zip(batch.params, chain.from_iterable(results), strict=True))
        return found

    def _warm_pieces(self, group: Group) -> dict[Tensor, Tensor]:
        """The same with norms of whole parameters, of which this rank has pieces."""
        rule, params = self._rule_of(group), [param for param in group["params"] if param.grad is not None]
        updates: list[Tensor] = []
        for param in params:
            state, gradient = self.state[param], gradient_of(param)
            state["step"] += 1
            state["exp_avg"].lerp_(gradient, 1 - rule.beta1)
            state["exp_avg_sq"].mul_(rule.beta2).addcmul_(gradient, gradient, value=1 - rule.beta2)
            update = state["exp_avg"] / state["exp_avg_sq"].sqrt().add_(rule.eps)
            updates.append(update.add_(param, alpha=rule.weight_decay))
        squares = [each.square().sum() for pair in zip(params, updates, strict=True) for each in pair]
        norms = self._of_whole(params, squares, 2).sqrt()
        ratios = rule.coefficients(norms[:, 0], norms[:, 1]).float()
        for param, update, ratio in zip(params, updates, ratios, strict=True):
            param.sub_(update.mul_(ratio.to(param.device)), alpha=rule.step_size(self.state[param]["step"]))
        return dict(zip(params, ratios, strict=True))

    def _of_whole(
        self, params: Sequence[Tensor], numbers: list[Tensor], count: int, *, largest: bool = False
    ) -> Tensor:
        """Rows of so many numbers of each parameter: the sum over its pieces, or the largest of them."""
        rows = torch.stack(numbers).view(-1, count).double() if numbers else torch.zeros(0, count)
        return rows if self.exchange is None else self.exchange.over_pieces(params, rows, largest=largest)

    def _exchange_pieces(self, members: Sequence[Member]) -> None:
        """Each piece of a parameter by itself, so that nothing has to be of one size."""
        self._advance_momenta([(group, param, self.state[param]["exp_avg"]) for group, param, _ in members])
        for group, param, _ in members:
            self.state[param]["step"] += 1
            masked(group, self.state[param]["exp_avg"])

    def _exchange_momenta(self, members: Sequence[Member]) -> None:
        """As one tensor, in which the momenta are of one size; the sizes are those at the end of the warm-up."""
        if any("scaling_coeff" not in self.state[param] for _, param, _ in members):
            roots = torch.stack([old.float().square().mean().sqrt() for _, _, old in members]).tolist()
            united = sum(roots) / len(roots)
            for (_, param, _), root in zip(members, roots, strict=True):
                self.state[param]["scaling_coeff"] = united / root if root > 0 else 1.0
        for group, param, _ in members:
            state = self.state[param]
            state["step"] += 1
            state["exp_avg"].lerp_(gradient_of(param), 1 - group["betas"][0]).mul_(state["scaling_coeff"])
        momenta = [self.state[param]["exp_avg"] for _, param, _ in members]
        if self.exchange is not None:
            flat = torch.cat([momentum.reshape(-1).float() for momentum in momenta])
            self._exchanged({"momenta": flat})
            parts = flat.split([momentum.numel() for momentum in momenta])
            for momentum, part in zip(momenta, parts, strict=True):
                momentum.copy_(part.view(momentum.shape))
        for (group, param, _), momentum in zip(members, momenta, strict=True):
            masked(group, momentum.div_(self.state[param]["scaling_coeff"]))

    def _follow(self, members: Sequence[Member]) -> None:
        """The step of momenta that were exchanged; members have what these were before."""
        updates: list[Tensor] = []
        told: list[Tensor] = []
        squares: list[Tensor] = []
        for group, param, old in members:
            state, (beta1, beta2) = self.state[param], group["betas"]
            gradient = (state["exp_avg"] - old * beta1) / (1 - beta1)
            state["exp_avg_sq_fresh"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            frozen = state["exp_avg_sq"].sqrt().add_(group["eps"])
            update = state["exp_avg"] / frozen
            plain = update.square().sum()
            update.add_(param, alpha=group["weight_decay"])
            squares += [plain, update.square().sum()]
            told.append((frozen / state["exp_avg_sq_fresh"].sqrt().add_(group["eps"])).max())
            updates.append(update)
        params = [param for _, param, _ in members]
        factors = self._of_whole(params, told, 1, largest=True)
        plain_norms, norms = self._of_whole(params, squares, 2).sqrt().unbind(1)
        ratios = (plain_norms / norms).nan_to_num(1.0).tolist()
        steps = zip(members, updates, factors.view(-1).tolist(), ratios, strict=True)
        for (group, param, _), update, factor, ratio in steps:
            coefficient = self._coefficient(group, self.state[param], factor, ratio)
            self._coefficients = [*self._coefficients, coefficient]
            param.sub_(update, alpha=self._rate(group, self.state[param]["step"]) * coefficient)

    @staticmethod
    def _coefficient(group: Group, state: dict[str, Any], factor: float, ratio: float) -> float:
        """Of a parameter whose fresh variance makes steps larger by `factor`, which weight decay has no part in."""
        if group["weight_decay"] > 0:
            ratio = min(1.0, ratio)
            factor = factor * ratio + 1.0 - ratio
        factor = min(max(factor, group["factor_min"]), group["factor_max"])
        last, change = state["last_factor"], group["factor_threshold"]
        state["last_factor"] = factor = min(max(factor, last * (1.0 - change)), last * (1.0 + change))
        return float(state["lamb_coeff_freeze"]) * factor

    def _rate(self, group: Group, step: int) -> float:
        """The learning rate with the bias correction of both moments."""
        if not group["bias_correction"]:
            return float(group["lr"])
        beta1, beta2 = group["betas"]
        return float(group["lr"] * (1 - beta2**self.freeze_step) ** 0.5 / (1 - beta1**step))
