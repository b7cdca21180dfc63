"""All ranks of 1-bit Adam, 1-bit LAMB and 0/1 Adam in one process, step by step as their rule was published."""

from __future__ import annotations

import itertools
import math

import torch
from torch import nn

SIZES = {"weight": (5, 7), "bias": (5,), "scale": (3, 5)}


class Model(nn.Module):
    """A loss whose gradients differ from rank to rank."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SIZES.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator)))

    def forward(self, rows, wanted):
        hidden = torch.tanh(rows @ self.weight.T + self.bias)
        return (hidden @ self.scale.T - wanted).square().mean()


def data(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(4, 7, generator=generator), torch.randn(4, 3, generator=generator)


# ---- the published rule, without a line of the library


def signs(values):
    scale = values.norm() / values.numel() ** 0.5
    return scale * torch.where(values < 0, -1.0, 1.0)


class Exchange:
    """The compressed mean of all workers, by the size of a chunk that every one of them owns."""

    owned = False

    def __init__(self, workers):
        self.workers, self.errors = workers, {}

    def mean(self, key, values):
        count, numel = self.workers, values[0].numel()
        chunk = -(-numel // (8 * count)) * 8
        mine, theirs = self.errors.setdefault(key, ([torch.zeros(numel) for _ in values], torch.zeros(numel)))
        meant = []
        for worker, value in enumerate(values):
            whole = value.reshape(-1) + mine[worker]
            meant.append(signs(whole))
            mine[worker].copy_(whole - meant[-1])
        total = sum(meant) / count + theirs
        found = torch.cat([signs(part) for part in total.split(chunk)])
        theirs.copy_(total - found)
        return found.view(values[0].shape)


class OwnedExchange(Exchange):
    """The same where workers own pieces of parameters, each of which is compressed by itself."""

    owned = True

    def __init__(self, workers, stage):
        super().__init__(workers)
        self.stage = stage

    def cuts(self, name):
        """Elements of a parameter that each of its owners has."""
        numels = {each: math.prod(shape) for each, shape in SIZES.items()}
        if self.stage == 3:
            return chunks(0, numels[name], -(-numels[name] // self.workers))
        start = sum(numels[each] for each in list(SIZES)[: list(SIZES).index(name)])
        return chunks(start, numels[name], -(-sum(numels.values()) // self.workers))

    def mean(self, key, values):
        count, cuts = self.workers, self.cuts(key)
        mine, theirs = self.errors.setdefault(
            key, ([torch.zeros(values[0].numel()) for _ in values], torch.zeros(values[0].numel()))
        )
        meant = []
        for worker, value in enumerate(values):
            whole = value.reshape(-1) + mine[worker]
            meant.append(torch.cat([signs(part) for part in whole.split(cuts)]))
            mine[worker].copy_(whole - meant[-1])
        total = sum(meant) / count + theirs
        found = torch.cat([signs(part) for part in total.split(cuts)])
        theirs.copy_(total - found)
        return found.view(values[0].shape)


def chunks(start, numel, size):
    """The lengths of the runs into which multiples of `size` cut so many elements from `start` on."""
    places = [start, *range((start // size + 1) * size, start + numel, size), start + numel]
    return [stop - begin for begin, stop in itertools.pairwise(places)]


class Simulation:
    """All workers one after the other; they agree on parameters except inside of local steps."""

    def __init__(self, workers, *, stage=0, lr=1e-2, betas=(0.9, 0.99), eps=1e-3, decay=0.01, **numbers):
        self.models = [Model() for _ in range(workers)]
        self.renewed = lambda: OwnedExchange(workers, stage) if stage else Exchange(workers)
        self.exchange = self.renewed()
        self.count = 0
        self.lr, self.betas, self.eps, self.decay = lr, betas, eps, decay
        self.numbers = numbers
        self.m = {name: torch.zeros(shape) for name, shape in SIZES.items()}
        self.v = {name: torch.zeros(shape) for name, shape in SIZES.items()}

    def gradients(self):
        found = []
        for rank, model in enumerate(self.models):
            model.zero_grad()
            model(*data(self.count, rank)).backward()
            found.append({name: param.grad.clone() for name, param in model.named_parameters()})
        return found

    def move(self, name, amount):
        for model in self.models:
            getattr(model, name).data.add_(amount)

    def step(self):
        self.count += 1
        gradients = self.gradients()
        for name in SIZES:
            self.update(name, [each[name] for each in gradients], self.models[0].get_parameter(name).data)
        return self

    def adam(self, name, mean):
        self.m[name] = self.betas[0] * self.m[name] + (1 - self.betas[0]) * mean
        self.v[name] = self.betas[1] * self.v[name] + (1 - self.betas[1]) * mean**2


class SimulatedAdam(Simulation):
    def update(self, name, gradients, param):
        freeze, (beta1, beta2) = self.numbers["freeze_step"], self.betas
        if self.count <= freeze:
            self.adam(name, sum(gradients) / len(gradients))
        else:
            self.m[name] = self.exchange.mean(name, [beta1 * self.m[name] + (1 - beta1) * g for g in gradients])
        root = (self.v[name] / (1 - beta2 ** min(self.count, freeze))).sqrt() + self.eps
        update = self.m[name] / (1 - beta1**self.count) / root
        self.move(name, -self.lr * (update + self.decay * param))


class SimulatedZeroOne(Simulation):
    """0/1 Adam with an interval of the variance, then local steps."""

    def __init__(self, workers, **numbers):
        super().__init__(workers, **numbers)
        self.interval, self.updates, self.seen = 1, 0, 0
        self.local, self.locals = 1, 0
        self.own = None

    def step(self):
        self.count += 1
        beta1, beta2 = self.betas
        numbers, gradients = self.numbers, self.gradients()
        first = 1 - beta1**self.count
        frozen = self.count > numbers["var_freeze_step"] + 1
        varies = not frozen and self.count % self.interval == 0
        self.updates += varies
        second = 1 - beta2**self.updates
        if frozen and self.own is None:
            self.own = [{name: value.clone() for name, value in self.m.items()} for _ in self.models]
            self.sums = [{name: torch.zeros(shape) for name, shape in SIZES.items()} for _ in self.models]
            self.lrs, self.exchange = 0.0, self.renewed()
        self.lrs = self.lrs + self.lr / first if frozen else 0.0
        for name in SIZES:
            grads = [each[name] for each in gradients]
            root = lambda: (self.v[name] / second).sqrt() + self.eps  # noqa: B023, E731
            if not frozen:
                if varies:
                    self.adam(name, sum(grads) / len(grads))
                else:
                    mean = self.exchange.mean(name, grads)
                    self.m[name] = beta1 * self.m[name] + (1 - beta1) * mean
                param = self.models[0].get_parameter(name).data
                self.move(name, -self.lr * (self.m[name] / first / root() + self.decay * param))
                continue
            for own, sums, model, grad in zip(self.own, self.sums, self.models, grads, strict=True):
                own[name] = beta1 * own[name] + (1 - beta1) * grad
                param = model.get_parameter(name).data
                moved = -self.lr * (own[name] / first / root() + self.decay * param)
                param.add_(moved)
                sums[name] += moved
            if self.count % self.local == 0:
                for sums, model in zip(self.sums, self.models, strict=True):
                    model.get_parameter(name).data.sub_(sums[name])
                total = self.exchange.mean(name, [sums[name] * root() for sums in self.sums])
                for own, sums in zip(self.own, self.sums, strict=True):
                    own[name] = -total / self.lrs
                    sums[name].zero_()
                self.move(name, total / root())
        if frozen and self.count % self.local == 0:
            self.lrs = 0.0
        if frozen:
            self.locals += 1
            if self.locals == numbers["local_step_scaler"]:
                self.locals, self.local = 0, min(numbers["local_step_clipper"], 2 * self.local)
        elif varies:
            self.seen += 1
            if self.seen == numbers["var_update_scaler"]:
                self.seen, self.interval = 0, 2 * self.interval
        return self


class SimulatedLamb(Simulation):
    """1-bit LAMB."""

    def step(self):
        self.count += 1
        gradients, (beta1, beta2), freeze = self.gradients(), self.betas, self.numbers["freeze_step"]
        rate = self.lr * (1 - beta2 ** min(self.count, freeze)) ** 0.5 / (1 - beta1**self.count)
        params = {name: param.data for name, param in self.models[0].named_parameters()}
        if self.count == 1:
            self.kept, self.last = dict.fromkeys(SIZES, 0.0), dict.fromkeys(SIZES, 1.0)
        if self.count <= freeze:
            for name in SIZES:
                self.adam(name, sum(each[name] for each in gradients) / len(gradients))
                update = self.m[name] / (self.v[name].sqrt() + self.eps) + self.decay * params[name]
                ratio = float((params[name].norm() / update.norm()).clamp(0.01, 10.0))
                if ratio != 1.0:
                    self.kept[name] = 0.9 * self.kept[name] + 0.1 * ratio
                self.move(name, -rate * ratio * update)
            self.fresh = {name: value.clone() for name, value in self.v.items()}
            return self
        if self.exchange.owned:
            self.scaling = dict.fromkeys(SIZES, 1.0)
        elif self.count == freeze + 1:
            roots = {name: float(self.m[name].square().mean().sqrt()) for name in SIZES}
            self.scaling = {name: sum(roots.values()) / len(roots) / root for name, root in roots.items()}
        old = dict(self.m)
        flats = [
            torch.cat(
                [((beta1 * old[name] + (1 - beta1) * each[name]) * self.scaling[name]).reshape(-1) for name in SIZES]
            )
            for each in gradients
        ]
        sizes = [params[name].numel() for name in SIZES]
        if self.exchange.owned:
            each = zip(SIZES, zip(*(flat.split(sizes) for flat in flats), strict=True), strict=True)
            parts = [self.exchange.mean(name, list(values)) for name, values in each]
        else:
            parts = self.exchange.mean("all", flats).split(sizes)
        for name, part in zip(SIZES, parts, strict=True):
            self.m[name] = part.view(SIZES[name]) / self.scaling[name]
            told = (self.m[name] - beta1 * old[name]) / (1 - beta1)
            self.fresh[name] = beta2 * self.fresh[name] + (1 - beta2) * told**2
            root = self.v[name].sqrt() + self.eps
            plain = self.m[name] / root
            update = plain + self.decay * params[name]
            share = min(1.0, float(plain.norm() / update.norm()))
            factor = float((root / (self.fresh[name].sqrt() + self.eps)).max()) * share + 1 - share
            factor = min(max(factor, 0.5), 4.0)
            factor = min(max(factor, self.last[name] * 0.9), self.last[name] * 1.1)
            self.last[name] = factor
            self.move(name, -rate * self.kept[name] * factor * update)
        return self


CASES = {
    "OneBitAdam": (SimulatedAdam, {"freeze_step": 10}),
    "OneBitLamb": (SimulatedLamb, {"freeze_step": 10}),
    "ZeroOneAdam": (
        SimulatedZeroOne,
        {"var_freeze_step": 24, "var_update_scaler": 4, "local_step_scaler": 8, "local_step_clipper": 4},
    ),
}
