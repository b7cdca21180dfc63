"""What old import paths offer beside the library's own homes: each does what its name says."""

from __future__ import annotations

import collections
import importlib
import math
import os
import random
from types import SimpleNamespace

import pytest
import torch
from deepspeed.comm.torch import Noop, TorchBackend, disable_compiler_collective
from deepspeed.comm.utils import (
    get_debug_log_name,
    get_default_args,
    get_local_rank_from_launcher,
    get_msg_size_from_args,
    get_tensor_kwarg,
    get_tensor_position,
    get_world_rank_from_launcher,
    get_world_size_from_launcher,
)
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from torch import nn

import deepspeed
from deepspeed.errors import DeepSpeedConfigError, UsageError
from deepspeed.runtime import config, constants, utils
from deepspeed.runtime.sparse_tensor import SparseTensor


def parameter(*grad):
    param = nn.Parameter(torch.zeros(len(grad)))
    param.grad = torch.tensor(grad) if grad else None
    return param


# ---- runtime.utils


@pytest.mark.parametrize("norm_type", [1, 2, 3.0, math.inf])
def test_clipping_is_torchs(norm_type):
    torch.manual_seed(0)
    ours, theirs = ([nn.Parameter(torch.zeros(n)) for n in (3, 5, 1)] for _ in range(2))
    for one, other in zip(ours, theirs, strict=True):
        one.grad = torch.randn_like(one)
        other.grad = one.grad.clone()
    norm = utils.clip_grad_norm_(ours, 0.5, norm_type=norm_type)
    expected = nn.utils.clip_grad_norm_(theirs, 0.5, norm_type=norm_type)
    assert float(norm) == pytest.approx(float(expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_clipping_of_little_or_nothing():
    small = parameter(0.3, 0.4)
    assert float(utils.clip_grad_norm_(small, 1.0)) == pytest.approx(0.5)
    assert small.grad.tolist() == pytest.approx([0.3, 0.4])
    assert float(utils.clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0)) == 0
    assert float(utils.clip_grad_norm_([], 1.0)) == 0


def test_norms():
    assert utils.get_global_norm([3.0, 4.0]) == 5
    assert utils.get_global_norm([]) == 0
    assert float(utils.get_global_norm_of_tensors([torch.tensor([3.0, 4.0]), torch.tensor([12.0])])) == 13
    assert float(utils.get_global_norm_of_tensors([torch.tensor([3.0, -4.0])], norm_type=math.inf)) == 4
    assert float(utils.get_global_norm_of_tensors([torch.tensor([math.nan])])) == -1
    assert utils.get_weight_norm([nn.Parameter(torch.tensor([3.0, 4.0]))]) == 5
    assert float(utils.combine_grad_norm_groups([torch.tensor(3.0), torch.tensor(4.0)])) == 5
    assert [utils.is_invalid_grad_norm(norm) for norm in (1.0, -1.0, math.inf, math.nan)] == [False, True, True, True]


def test_clipping_of_tensors():
    tensors = [torch.tensor([3.0, 4.0])]
    assert float(utils.clip_tensors_by_global_norm(tensors, max_norm=1.0)) == 5
    assert tensors[0].tolist() == pytest.approx([0.6, 0.8], rel=1e-5)
    assert utils.clip_tensors_by_global_norm(tensors, max_norm=1.0, global_norm=10.0) == 10
    assert tensors[0].tolist() == pytest.approx([0.06, 0.08], rel=1e-5)
    broken = [torch.tensor([math.inf, 1.0])]
    utils.clip_tensors_by_global_norm(broken, max_norm=1.0)
    assert broken[0][1] == 1


def test_overflow():
    good, bad = parameter(1.0), parameter(1.0, math.inf)
    checker = utils.CheckOverflow()
    assert [checker.has_overflow([each]) for each in (good, bad)] == [False, True]
    assert [checker.has_overflow_serial([each]) for each in (good, bad)] == [False, True]
    assert [checker.check_using_norm(norms) for norms in ([1.0], [1.0, -1])] == [False, True]
    assert utils.CheckOverflow([[good], [bad]]).check()
    assert utils.CheckOverflow([{"params": [bad]}]).check()
    assert not utils.CheckOverflow([[bad]]).check([[good]])
    with pytest.raises(ValueError, match="without param_groups"):
        checker.check()
    assert [bool(utils.has_inf_or_nan(torch.tensor([x]))) for x in (1.0, math.inf, math.nan)] == [False, True, True]


Pair = collections.namedtuple("Pair", "one two")


def test_moving_structures():
    tensor = torch.ones(1)
    moved = utils.move_to_device({"a": (tensor, [3, None]), "b": Pair(tensor, "x")}, "meta")
    assert moved["a"][0].is_meta
    assert moved["a"][1] == [3, None]
    assert moved["b"].one.is_meta
    assert moved["b"].two == "x"
    assert not tensor.is_meta
    param = nn.Parameter(torch.ones(2))
    assert utils.move_to_device([param], "cpu", lambda x: isinstance(x, nn.Parameter))[0] is param
    copied = utils.copy_to_device([tensor, torch.ones(1, dtype=torch.int)], "meta", lambda x: x.is_floating_point())
    assert [each.is_meta for each in copied] == [True, False]
    assert utils.get_tensor_bytes([torch.ones(3), {"a": torch.ones(2, dtype=torch.half)}, 7]) == 16


def test_comparing_structures():
    same = utils.compare_tensors_in_structures
    assert same([torch.ones(1), {"a": 1}], [torch.ones(1), {"a": 1}])
    assert not same([torch.ones(1)], [torch.zeros(1)])
    assert not same([torch.ones(1)], [torch.ones(2)])
    assert not same({"a": torch.ones(1)}, {"b": torch.ones(1)})
    assert not same([torch.ones(1)], (torch.ones(1),))


def test_hooks_on_outputs():
    calls = []
    x = torch.ones(2, requires_grad=True)
    outputs = {"y": x * 2, "z": [(x * 3).sum(), torch.ones(1)]}
    manager = utils.register_output_backward_hooks(
        outputs, lambda: calls.append("once"), lambda tensor: calls.append(tuple(tensor.shape))
    )
    loss = outputs["y"].sum() + outputs["z"][0]
    loss.backward(retain_graph=True)
    assert calls[0] == "once"
    assert sorted(calls[1:]) == [(), (2,)]
    manager.remove_hooks()
    loss.backward()
    assert len(calls) == 3


def test_small_functions(tmp_path, capsys):
    assert utils.call_to_str("f") == "f()"
    assert utils.call_to_str("f", 1, "a", x=2) == "f(1, 'a', x=2)"
    assert utils.noop_decorator(len) is len
    with utils.noop_context():
        pass
    assert utils.get_only_unique_item([2, 2]) == 2
    for items in ([1, 2], []):
        with pytest.raises(RuntimeError, match="one value"):
            utils.get_only_unique_item(items)
    utils.ensure_directory_exists(str(tmp_path / "a" / "b" / "file"))
    assert (tmp_path / "a" / "b").is_dir()
    param = nn.Parameter(torch.ones(1))
    assert utils.DummyOptim([param]).param_groups == [{"params": [param]}]
    assert [t.numel() for t in utils.align_dense_tensors([torch.ones(3), torch.ones(4)], 4)] == [3, 4, 1]
    assert [t.numel() for t in utils.align_dense_tensors([torch.ones(4)], 4)] == [4]
    assert utils.get_inactive_params([param]) == []
    assert utils.filter_empty_parameters([nn.Parameter(torch.ones(0)), param]) == [param]
    assert utils.is_model_parallel_parameter(param) is False
    param.tensor_model_parallel = True
    assert utils.is_model_parallel_parameter(param) is True
    assert utils.get_ma_status() >= 0
    utils.memory_status("here")
    assert "here | MA" in capsys.readouterr().out
    utils.empty_cache()


def test_the_seed_reaches_every_generator():
    numpy = pytest.importorskip("numpy")
    drawn = []
    for _ in range(2):
        utils.set_random_seed(7)
        drawn.append((random.random(), float(torch.rand(())), float(numpy.random.rand())))
    assert drawn[0] == drawn[1]


def test_an_mpu_of_any_age():
    old = SimpleNamespace(get_model_parallel_rank=lambda: 3, get_model_parallel_world_size=lambda: 4)
    new = SimpleNamespace(get_tensor_model_parallel_rank=lambda: 1, get_model_parallel_rank=lambda: 5)
    rank, size = utils.bwc_tensor_model_parallel_rank, utils.bwc_tensor_model_parallel_world_size
    assert [rank(None), rank(old), rank(new)] == [0, 3, 1]
    assert [size(None), size(old)] == [1, 4]
    assert utils.bwc_pipeline_parallel_world_size(old) == 1
    assert utils.bwc_pipeline_parallel_group(old) is None


# ---- runtime.config and runtime.constants


def test_constants_are_keys_and_defaults_of_the_schema():
    assert constants.GRADIENT_CLIPPING == "gradient_clipping"
    assert constants.GRADIENT_CLIPPING_DEFAULT == 1.0
    assert (constants.FP16, constants.FP16_LOSS_SCALE_WINDOW_DEFAULT) == ("fp16", 1000)
    assert constants.CHECKPOINT_PARALLEL_WRITE_PIPELINE_STAGE_DEFAULT is False
    assert constants.ROUTE_TRAIN == "train"
    assert (config.ADAM_OPTIMIZER, config.TRAIN_BATCH_SIZE) == ("adam", "train_batch_size")
    for module in (config, constants):
        with pytest.raises(AttributeError, match="NO_SUCH"):
            module.NO_SUCH  # noqa: B018


def test_functions_that_read_a_config():
    given = {
        "train_batch_size": 6,
        "optimizer": {"type": "Adam", "params": {"lr": 0.5}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        "communication_data_type": "bf16",
        "torch_autocast": {"enabled": True, "dtype": "bf16"},
    }
    assert config.get_train_batch_size(given) == 6
    assert config.get_optimizer_name(given) == "Adam"
    assert config.get_optimizer_params(given) == {"lr": 0.5}
    assert config.get_scheduler_name(given) == "WarmupLR"
    assert config.get_scheduler_params(given) == {"warmup_num_steps": 3}
    assert config.get_torch_autocast_enabled(given) is True
    assert config.get_communication_data_type(given) is torch.bfloat16
    assert config.get_communication_data_type({}, comm_data_type_default="x") == "x"
    with pytest.raises(DeepSpeedConfigError, match="fp8"):
        config.get_communication_data_type({"communication_data_type": "fp8"})
    assert config.get_optimizer_name({}) is config.get_scheduler_name({}) is None
    assert config.get_scheduler_params({}) == {}
    assert config.get_optimizer_gradient_clipping({"optimizer": {"params": {"max_grad_norm": 2.0}}}) == 2.0
    assert config.get_optimizer_gradient_clipping({}) is None
    for name in (*config._READERS, *config._OF_SECTIONS):
        getattr(config, name)({})


def test_a_config_written_key_by_key(tmp_path):
    path = str(tmp_path / "config.json")
    writer = config.DeepSpeedConfigWriter()
    writer.add_config("train_batch_size", 4)
    writer.write_config(path)
    other = config.DeepSpeedConfigWriter()
    other.load_config(path)
    assert other.data == {"train_batch_size": 4}


# ---- the package's own names


def test_a_model_on_another_device_and_dtype():
    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        model = nn.Sequential(nn.Linear(2, 3), nn.Embedding(4, 2))
        steps = torch.arange(3)
        explicit = torch.zeros(2, dtype=torch.float64)
        here = torch.ones(2, device="cpu")
    assert {(param.dtype, param.device.type) for param in model.parameters()} == {(torch.bfloat16, "meta")}
    assert steps.dtype == torch.int64
    assert explicit.dtype == torch.bfloat16
    assert (here.dtype, here.device.type) == (torch.bfloat16, "cpu")
    assert torch.ones(1).dtype == torch.float32
    assert torch.ones(1).device.type == "cpu"


def test_on_device_may_be_off_nested_and_left_by_an_error():
    with deepspeed.OnDevice(dtype=torch.half, device="meta", enabled=False):
        assert torch.ones(1).dtype == torch.float32
    context = deepspeed.OnDevice(dtype=torch.half, device="cpu")
    with pytest.raises(KeyError), context, context:
        assert torch.ones(1).dtype == torch.half
        raise KeyError("x")
    assert torch.get_default_dtype() == torch.float32
    made = context.fp_tensor_constructor(torch.ones, torch.bfloat16)(2)
    assert made.dtype == torch.bfloat16
    assert context.get_new_tensor_fn_for_dtype(torch.half)(torch.Tensor, 2, 3).shape == (2, 3)


def test_flags_for_muon():
    model = nn.ModuleDict({"embed": nn.Embedding(4, 2), "body": nn.Linear(2, 2), "lm_head": nn.Linear(2, 4)})
    plain = deepspeed.DeepSpeedConfig({"train_batch_size": 1, "optimizer": {"type": "AdamW"}})
    deepspeed.set_optimizer_flags(plain, model)
    assert not hasattr(model["body"].weight, "use_muon")
    muon = deepspeed.DeepSpeedConfig({"train_batch_size": 1, "optimizer": {"type": "Muon"}})
    deepspeed.set_optimizer_flags(muon, model)
    marked = {name: param.use_muon for name, param in model.named_parameters()}
    assert marked == {
        "embed.weight": False,
        "body.weight": True,
        "body.bias": False,
        "lm_head.weight": False,
        "lm_head.bias": False,
    }


def test_importing_the_module_of_a_name_does_not_hide_the_name():
    module = importlib.import_module("deepspeed.utils.z3_leaf_module")
    assert module.z3_leaf_module is deepspeed.utils.z3_leaf_module
    assert callable(deepspeed.utils.z3_leaf_module)


# ---- sparse tensors


def embedding_gradient(rows, size=(5, 2)):
    weight = nn.Parameter(torch.zeros(size))
    nn.functional.embedding(torch.tensor(rows), weight, sparse=True).sum().backward()
    return weight.grad


def test_a_sparse_tensor_of_rows():
    grad = embedding_gradient([1, 3, 3])
    sparse = SparseTensor(grad)
    assert sparse.indices.tolist() == [1, 3]
    assert torch.equal(sparse.to_dense(), grad.to_dense())
    assert torch.equal(sparse.to_coo_tensor().to_dense(), grad.to_dense())
    assert sparse.sparse_size() == (6, 10)
    assert sparse.type() == SparseTensor.type() == "deepspeed.SparseTensor"
    sparse.add(SparseTensor(embedding_gradient([3])))
    assert sparse.to_dense()[:, 0].tolist() == [0, 1, 0, 3, 0]
    assert "dense_size=[5, 2]" in str(sparse)
    with pytest.raises(UsageError, match=r"\[5, 2\] cannot take one of \[4, 2\]"):
        sparse.add(SparseTensor(embedding_gradient([3], (4, 2))))
    with pytest.raises(UsageError, match=r"shape \(2, 2\)"):
        SparseTensor(torch.zeros(2, 2))
    empty = SparseTensor()
    empty.indices, empty.values, empty.dense_size = torch.empty(0, dtype=torch.long), torch.empty(0, 2), [5, 2]
    assert not empty.to_dense().any()


# ---- comm


def test_ranks_of_a_launcher(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("OMPI_", "PMI_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")):
            monkeypatch.delenv(name)
    facts = (get_local_rank_from_launcher, get_world_rank_from_launcher, get_world_size_from_launcher)
    assert [fact() for fact in facts] == [0, 0, 1]
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert [fact() for fact in facts] == [1, 5, 8]


def test_arguments_of_collectives():
    reduce, gather = deepspeed.comm.all_reduce, deepspeed.comm.all_gather
    assert get_tensor_position(reduce) == 0
    assert get_tensor_position(len) == -1
    assert get_default_args(reduce)["async_op"] is False
    assert get_tensor_kwarg(reduce, {"tensor": 3}) == 3
    assert get_msg_size_from_args(reduce, torch.ones(4)) == 16
    assert get_msg_size_from_args(reduce, tensor=torch.ones(4)) == 16
    assert get_msg_size_from_args(gather, [torch.ones(4), torch.ones(4)], torch.ones(4)) == 32
    assert get_msg_size_from_args(deepspeed.comm.barrier) == 0
    assert get_debug_log_name({"log_name": "all_reduce", "debug": "train"}, False) == "all_reduce"
    assert get_debug_log_name({"log_name": "all_reduce", "debug": "train"}, True) == "all_reduce | [Caller Func: train]"


def test_handles_and_decorators():
    assert Noop().wait() is None
    assert disable_compiler_collective(lambda x: x + 1)(1) == 2
    assert TorchBackend.all_reduce is deepspeed.comm.all_reduce


# ---- config models


def test_a_backend_of_ones_own():
    from deepspeed.comm.backend import Backend

    backend = Backend("mine", rank=1, size=2)
    assert (backend.name, backend.world_rank, backend.world_size, backend.is_initialized()) == ("mine", 1, 2, False)
    backend.init_process_group()
    assert backend.is_initialized()
    with pytest.raises(TypeError, match="mine"):
        backend.new_group([0])


def test_the_comms_section_of_a_dict():
    from deepspeed.comm.config import DeepSpeedCommsConfig

    assert DeepSpeedCommsConfig({}).comms_logger_enabled is False
    given = DeepSpeedCommsConfig({"comms_logger": {"enabled": True, "prof_ops": ["all_reduce"]}})
    assert given.comms_logger_enabled
    assert given.comms_logger.prof_ops == ["all_reduce"]
    assert DeepSpeedZeroConfig().stage == 0
