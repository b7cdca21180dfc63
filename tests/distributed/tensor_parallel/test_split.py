"""A model split without an engine, as inference needs it: over any group, and sums in place where no gradient is."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed.config.parallel import TPTrainingConfig
from deepspeed.errors import UsageError
from deepspeed.tensor_parallel import GroupMembers, split
from deepspeed.tensor_parallel.layers import RowParallel
from tests.distributed.tensor_parallel.families import make, tokens
from tests.harness import shared_ranks


@shared_ranks(2)
def test_the_group_of_a_script():
    model, plain = make("llama")
    made = split(model, GroupMembers(dist.group.WORLD), TPTrainingConfig(autotp_size=2))
    assert (made.ranks, made.divides) == (2, True)
    batch = tokens()
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            torch.testing.assert_close(model(batch).logits, plain(batch).logits, atol=1e-5, rtol=1e-5)
    with pytest.raises(UsageError, match="no layer of Linear can be split"):
        split(nn.Linear(2, 2), GroupMembers(dist.group.WORLD), TPTrainingConfig(autotp_size=2))


@shared_ranks(2)
def test_sums_in_place():
    """Without gradients the product's own memory becomes the sum; with them nothing is overwritten."""
    model, _ = make("llama")
    split(model, GroupMembers(dist.group.WORLD), TPTrainingConfig(autotp_size=2))
    layer = next(each for each in model.modules() if isinstance(each, RowParallel))
    assert layer.bias is None
    x = torch.randn(2, 3, layer.in_features, generator=torch.Generator().manual_seed(dist.get_rank()))
    products = []
    product = layer.product
    layer.product = lambda *args, **options: products.append(product(*args, **options)) or products[-1]
    outs = []
    for mode, in_place in ((torch.inference_mode, True), (torch.no_grad, True), (torch.enable_grad, False)):
        with mode():
            outs.append(layer(x))
        assert (outs[-1].data_ptr() == products[-1].data_ptr()) is in_place
    assert all(torch.equal(out, outs[0]) for out in outs)


class Gated(nn.Module):
    """A feed-forward layer of unusual names."""

    def __init__(self, kind):
        super().__init__()
        self.up, self.down, self.kind = nn.Linear(8, 24), nn.Linear(24, 8), kind
        self.other = {"gate": nn.Linear(8, 24), "norm": nn.LayerNorm(24), "second": nn.Linear(24, 8)}[kind]

    def forward(self, x):
        up = self.up(x)
        if self.kind == "gate":
            return self.down(self.other(x) * up)
        return self.down(self.other(up)) if self.kind == "norm" else self.down(up) + self.other(up)


@shared_ranks(2)
def test_a_layer_that_rules_forgot():
    """The error of a forward names it; a layer that is as wide and has nothing to do with it is none."""
    specs = [{"patterns": [r".*\.up"]}, {"patterns": [r".*\.down"], "partition_type": "row"}]
    section = TPTrainingConfig(autotp_size=2, partition_config={"layer_specs": specs})
    for kind in ("gate", "norm", "second"):
        model = nn.Sequential(Gated(kind))
        split(model, GroupMembers(dist.group.WORLD), section)
        with pytest.raises(UsageError, match=r"'\.\*\\\\.up' of .*splits the 24 outputs of 0\.up, but .* 0\.other"):
            model(torch.randn(2, 8))
        with pytest.raises(RuntimeError, match="3x9 and 8x"):  # another error stays what it is
            model(torch.randn(3, 9))
    model = nn.Sequential(Gated("second"))
    split(model, GroupMembers(dist.group.WORLD), section)
    model[0].kind, model[0].other = "norm", nn.Identity()
    assert model(torch.randn(2, 8)).shape == (2, 8)
