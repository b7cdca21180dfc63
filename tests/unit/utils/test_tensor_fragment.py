from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from deepspeed.errors import UsageError
from deepspeed.utils import tensor_fragment as home
from deepspeed.utils.tensor_fragment import fragment_address, get_hp_fragment_mapping, map_to_flat_opt_states


def mapping(param, start, flat, partition_start, gradients=None):
    return get_hp_fragment_mapping(param, start, flat, gradients or {}, {}, False, 0, partition_start, flat.numel())


@given(st.integers(0, 20), st.integers(1, 12), st.integers(0, 20), st.integers(1, 12))
def test_a_fragment_is_what_parameter_and_partition_share(start, numel, partition_start, size):
    everything = torch.arange(64.0)
    param = nn.Parameter(everything[start : start + numel].clone())
    flat = everything[partition_start : partition_start + size].clone()
    shared = sorted(set(range(start, start + numel)) & set(range(partition_start, partition_start + size)))
    found = mapping(param, start, flat, partition_start)
    if not shared:
        assert found is None
        return
    assert found.lp_fragment.tolist() == found.hp_fragment.tolist() == [float(i) for i in shared]
    assert found.get_hp_fragment_address() == fragment_address(len(shared), shared[0] - partition_start)
    assert found.lp_fragment_address == fragment_address(len(shared), shared[0] - start)
    found.hp_fragment.neg_()
    found.update_lp()
    assert param.detach()[shared[0] - start] == -everything[shared[0]]
    found.lp_fragment.zero_()
    found.update_hp()
    assert not flat[shared[0] - partition_start]


def test_optimizer_states_of_a_fragment():
    flat, param = torch.arange(6.0), nn.Parameter(torch.zeros(4))
    found = mapping(param, 4, flat, 0, gradients={0: [torch.ones(2)]})
    states = {"exp_avg": flat * 10, "step": torch.tensor(3.0)}
    found.set_optim_state_fragment(flat, states)
    assert found.get_optim_state_keys() == ["exp_avg"]
    assert found.get_hp_fragment("exp_avg").tolist() == [40.0, 50.0]
    assert found.get_hp_fragment().tolist() == [4.0, 5.0]
    assert found.get_lp_grad_fragment(0).tolist() == [1.0, 1.0]
    for call in (lambda: found.get_hp_fragment("other"), lambda: mapping(param, 4, flat, 0).get_lp_grad_fragment(0)):
        try:
            call()
        except UsageError:
            continue
        raise AssertionError("expected an error")


def test_states_are_joined_and_cut_again():
    flat = nn.Parameter(torch.zeros(6))
    params = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2))]
    for param, start, value in zip(params, (0, 4), (1.0, 2.0), strict=True):
        param._hp_mapping = mapping(param, start, flat.detach(), 0)
        param._hp_mapping.optim_fragment = {"exp_avg": torch.full((param.numel(),), value)}
    state = {flat: {"step": torch.tensor(1.0)}}
    map_to_flat_opt_states(flat, params, state, ["exp_avg"])
    assert state[flat]["exp_avg"].tolist() == [1.0] * 4 + [2.0] * 2
    state[flat]["exp_avg"].fill_(7.0)
    assert params[1]._hp_mapping.get_hp_fragment("exp_avg").tolist() == [7.0, 7.0]


def test_a_parameter_that_nobody_trains():
    param = nn.Parameter(torch.zeros(3))
    assert home.get_full_hp_param(param) is None
    assert home.get_full_hp_param(param, "exp_avg") is None
    assert home.get_full_hp_grad(param) is None
    assert home.safe_get_local_fp32_param(param) is None
