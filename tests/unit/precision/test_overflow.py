"""Finding inf and NaN in lists of gradients."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.precision import loss_scaler
from deepspeed.precision.loss_scaler import has_overflow

BAD = [float("inf"), float("-inf"), float("nan")]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def found(*tensors):
    answer = has_overflow(tensors)
    assert answer.shape == ()
    assert answer.dtype == torch.bool
    return answer.item()


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", [0, 500, 1000])
def test_one_bad_element_is_found(bad, dtype, place):
    grads = [torch.randn(1001).to(dtype) for _ in range(3)]
    assert not found(*grads)
    grads[2][place] = bad
    assert found(*grads)


@pytest.mark.parametrize("bad", BAD)
def test_the_path_of_devices_gives_the_same_answer(bad, monkeypatch):
    """What runs on an accelerator, run on the CPU."""

    def foreach(tensors):
        return torch.stack(list(torch._foreach_norm(tensors, float("inf"))))

    monkeypatch.setattr(loss_scaler, "_extremes", foreach)
    assert not found(torch.randn(9), torch.randn(3, 3))
    assert found(torch.randn(9), torch.tensor([1.0, bad]))


def test_nothing_holds_no_overflow():
    assert not found()
    assert not found(None, torch.empty(0), torch.empty(3, 0, dtype=torch.float16))
    assert not found(torch.tensor([1, 2]), torch.tensor([True]))


def test_large_finite_values_are_no_overflow():
    assert not found(*(torch.full((64,), torch.finfo(dtype).max, dtype=dtype) for dtype in DTYPES))
    assert not found(torch.full((4,), 1e300, dtype=torch.float64), torch.ones(2))


@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 5), st.booleans()), max_size=6))
def test_mixed_dtypes(parts):
    grads = [torch.ones(size, dtype=dtype) for dtype, size, _ in parts]
    for grad, (_, size, bad) in zip(grads, parts, strict=True):
        if bad and size:
            grad[-1] = float("nan")
    assert found(*grads) == any(bad and size for _, size, bad in parts)


def sparse(values, dtype=torch.float32, indices=(0, 1)):
    return torch.sparse_coo_tensor([list(indices)], torch.tensor(values, dtype=dtype), (4,), check_invariants=True)


def test_sparse_gradients():
    assert not found(sparse([1.0, 2.0]), torch.ones(2))
    assert found(sparse([1.0, float("nan")]), torch.ones(2))
    assert not found(torch.sparse_coo_tensor(size=(4,), check_invariants=True))
    assert found(torch.tensor([[1.0, float("inf")]]).to_sparse_csr())


def test_entries_of_one_index_are_added_first():
    assert found(sparse([6e4, 6e4], torch.float16, (1, 1)))
    assert not found(sparse([6e4, 6e4], torch.float16, (1, 2)))


def test_complex_gradients():
    assert not found(torch.tensor([1 + 2j]))
    assert found(torch.tensor([complex(1, float("inf"))]))
    assert found(torch.tensor([complex(float("nan"), 0)]).conj())


def test_gradients_are_only_read():
    grad = torch.tensor([1.0, float("inf")])
    version = grad._version
    found(grad)
    assert grad._version == version
    assert found(torch.ones(2, requires_grad=True) / 0)
