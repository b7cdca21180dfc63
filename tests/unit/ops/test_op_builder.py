"""Builders of ops: what is here loads functions that compute, what is not says what brings it, and others can build."""

from __future__ import annotations

import logging
import sys

import pytest
import torch

import deepspeed
from deepspeed import git_version_info
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import OpUnavailable, UsageError
from deepspeed.ops import op_builder
from deepspeed.ops.capability import has_cxx_compiler, has_gds, has_ninja
from deepspeed.ops.op_builder import builders, cuda
from deepspeed.ops.op_builder.all_ops import ALL_OPS
from deepspeed.ops.op_builder.builder import (
    CUDAMismatchException,
    CUDAOpBuilder,
    MissingCUDAException,
    OpBuilder,
    assert_no_cuda_mismatch,
    get_default_compute_capabilities,
    installed_cuda_version,
    probe_is_compatible,
)

INCLUDED = set("async_io cpu_adagrad cpu_adam cpu_lion fused_adam fused_lamb fused_lion pin_memory utils".split())
COMES_ALONG = {*INCLUDED, "gds"}  # but not every machine can use it


def test_every_op_is_included_or_names_what_brings_it():
    for name, builder in ALL_OPS.items():
        if name in INCLUDED:
            assert builder.is_compatible()
            assert builder.load() is sys.modules[builder.absolute_name()]
            with pytest.raises(OpUnavailable, match=rf"op '{name}' comes with the package"):
                builder.builder()
        elif name not in COMES_ALONG:
            assert not builder.is_compatible()
            for act in (builder.load, builder.jit_load, builder.builder):
                with pytest.raises(OpUnavailable, match=rf"op '{name}' .*it comes with {builder.feature}"):
                    act()
    assert set(ALL_OPS) >= INCLUDED


def test_a_verbose_question_is_answered(caplog):
    deepspeed.logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.WARNING):
            assert not op_builder.QuantizerBuilder().is_compatible()
            assert caplog.text == ""
            assert not op_builder.QuantizerBuilder().is_compatible(verbose=True)
    finally:
        deepspeed.logger.removeHandler(caplog.handler)
    assert "op quantizer: this version does not have it; it comes with ZeRO++" in caplog.text


def test_the_tables_of_ops_agree():
    installed = {name: name in COMES_ALONG for name in ALL_OPS}
    assert deepspeed.ops.__installed_ops__ == git_version_info.installed_ops == installed
    usable = {name: name in INCLUDED or (name == "gds" and has_gds.holds) for name in ALL_OPS}
    assert deepspeed.ops.__compatible_ops__ == git_version_info.compatible_ops == usable


def test_an_op_for_another_machine_says_what_is_missing(caplog):
    if has_gds.holds:
        assert hasattr(op_builder.GDSBuilder().load(), "gds_handle")
        return
    with pytest.raises(OpUnavailable, match=r"op 'gds' needs GPUDirect Storage: .*aio_handle"):
        op_builder.GDSBuilder().load()
    deepspeed.logger.addHandler(caplog.handler)
    try:
        with caplog.at_level(logging.WARNING):
            assert not op_builder.GDSBuilder().is_compatible(verbose=True)
    finally:
        deepspeed.logger.removeHandler(caplog.handler)
    assert f"op gds: {has_gds.verdict.reason}" in caplog.text


def test_the_accelerator_finds_builders():
    device = get_accelerator()
    assert device.op_builder_dir() == "deepspeed.ops.op_builder"
    assert device.get_op_builder("FusedAdamBuilder") is builders.FusedAdamBuilder
    assert isinstance(device.create_op_builder("CPULionBuilder"), builders.CPULionBuilder)
    assert device.create_op_builder("NoSuchBuilder") is None
    assert isinstance(op_builder.builder_closure("UtilsBuilder")(), builders.UtilsBuilder)


def test_version_facts():
    assert set(git_version_info.torch_info) == {
        "version",
        "bf16_support",
        "cuda_version",
        "nccl_version",
        "hip_version",
    }
    assert torch.__version__.startswith(git_version_info.torch_info["version"] + ".")
    assert git_version_info.torch_info["bf16_support"] is get_accelerator().is_bf16_supported()
    assert git_version_info.accelerator_name == get_accelerator()._name
    with pytest.raises(AttributeError, match="nonsense"):
        git_version_info.nonsense  # noqa: B018


# ---- the functions compute what torch's optimizers do


def pair(seed=0):
    torch.manual_seed(seed)
    value, grad = torch.randn(5, 3), torch.randn(5, 3)
    param = torch.nn.Parameter(value.clone())
    param.grad = grad.clone()
    return param, value, grad


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("name", ["fused_adam", "cpu_adam"])
def test_adam(name, decoupled):
    param, value, grad = pair()
    oracle = (torch.optim.AdamW if decoupled else torch.optim.Adam)([param], lr=0.1, weight_decay=0.2)
    first, second = torch.zeros_like(value), torch.zeros_like(value)
    op = ALL_OPS[name].load()
    for step in (1, 2, 3):
        oracle.step()
        if name == "fused_adam":
            lists = [[grad], [value], [first], [second]]
            op.multi_tensor_adam(2048, torch.zeros(1), lists, 0.1, 0.9, 0.999, 1e-8, step, int(decoupled), 1, 0.2)
        else:
            assert op.create_adam(7, 0.1, 0.9, 0.999, 1e-8, 0.2, decoupled, False) == 0
            assert op.adam_update(7, step, 0.1, 0.9, 0.999, 1e-8, 0.2, True, value, grad, first, second) == 0
            assert op.destroy_adam(7) == 0
    torch.testing.assert_close(value, param.data)


@pytest.mark.parametrize("name", ["fused_lion", "cpu_lion"])
def test_lion(name):
    _, value, grad = pair()
    momentum = torch.ones_like(value)
    expected = value * (1 - 0.1 * 0.2) - 0.1 * (0.9 * momentum + 0.1 * grad).sign()
    op = ALL_OPS[name].load()
    if name == "fused_lion":
        op.multi_tensor_lion(2048, torch.zeros(1), [[grad], [value], [momentum]], 0.1, 0.9, 0.99, 1, 0.2)
    else:
        op.create_lion(0)
        op.lion_update(0, 1, 0.1, 0.9, 0.99, 0.2, value, grad, momentum)
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(momentum, 0.99 + 0.01 * grad)


def test_adagrad():
    param, value, grad = pair()
    oracle = torch.optim.Adagrad([param], lr=0.1, weight_decay=0.2, eps=1e-8)
    sums = torch.zeros_like(value)
    op = ALL_OPS["cpu_adagrad"].load()
    op.create_adagrad(3)
    for step in (1, 2):
        oracle.step()
        op.adagrad_update(3, step, 0.1, 1e-8, 0.2, value, grad, sums)
    torch.testing.assert_close(value, param.data)


@pytest.mark.parametrize("copy", [torch.empty(0), torch.empty(5, 3, dtype=torch.bfloat16)], ids=["none", "bf16"])
def test_lamb(copy):
    param, value, grad = pair()
    oracle = deepspeed.ops.lamb.FusedLamb([param], lr=0.1, weight_decay=0.2)
    param.grad /= 4
    oracle.step()
    first, second = torch.zeros_like(value), torch.zeros_like(value)
    coefficient = (
        ALL_OPS["fused_lamb"]
        .load()
        .lamb(value, copy, first, second, grad, 0.1, 0.9, 0.999, 10.0, 0.01, 1e-8, 4.0, 1, 1, 1, 0.2)
    )
    torch.testing.assert_close(value, param.data)
    assert float(coefficient) == pytest.approx(float(oracle.get_lamb_coeffs()[0]))
    if copy.numel():
        torch.testing.assert_close(copy, value.bfloat16())


@pytest.mark.parametrize("flag", [torch.ones(1, dtype=torch.int), torch.tensor([0, 3])])
def test_a_raised_flag_leaves_everything_as_it_is(flag):
    _, value, grad = pair()
    before, moments = value.clone(), torch.zeros_like(value)
    ALL_OPS["fused_adam"].load().multi_tensor_adam(
        2048, flag, [[grad], [value], [moments], [moments.clone()]], 0.1, 0.9, 0.999, 1e-8, 1, 1, 1, 0.0
    )
    ALL_OPS["fused_lion"].load().multi_tensor_lion(2048, flag, [[grad], [value], [moments]], 0.1, 0.9, 0.999, 1, 0.0)
    assert torch.equal(value, before)
    assert not moments.any()


def test_empty_lists_are_fine():
    ALL_OPS["fused_adam"].load().multi_tensor_adam(1, None, [[], [], [], []], 0.1, 0.9, 0.999, 1e-8, 1, 1, 1, 0.0)
    ALL_OPS["fused_lion"].load().multi_tensor_lion(1, None, [[], [], []], 0.1, 0.9, 0.999, 1, 0.0)


@pytest.mark.parametrize(("name", "update"), [("cpu_adam", "adam_update"), ("cpu_lion", "lion_update")])
def test_an_optimizer_must_be_created_before_its_update(name, update):
    op = ALL_OPS[name].load()
    numbers = [1, 0.1, 0.9, 0.999, 1e-8, 0.0, True] if name == "cpu_adam" else [1, 0.1, 0.9, 0.999, 0.0]
    tensors = [torch.zeros(1)] * (4 if name == "cpu_adam" else 3)
    with pytest.raises(UsageError, match=rf"{name}: there is no optimizer 12345"):
        getattr(op, update)(12345, *numbers, *tensors)


def test_flatten_and_back():
    op = ALL_OPS["utils"].load()
    tensors = [torch.randn(2, 3), torch.randn(()), torch.randn(0), torch.randn(4).expand(2, 4)]
    flat = op.flatten(tensors)
    assert flat.shape == (15,)
    views = op.unflatten(flat, tensors)
    assert all(torch.equal(view, tensor) for view, tensor in zip(views, tensors, strict=True))
    views[0].zero_()
    assert not flat[:6].any()


# ---- builders of one's own


class Twice(OpBuilder):
    NAME = "twice_of_the_tests"

    def __init__(self, path="/nowhere.cpp"):
        super().__init__(name=self.NAME)
        self.path = path

    def absolute_name(self):
        return "tests.twice"

    def sources(self):
        return [str(self.path), ""]


@pytest.mark.skipif(not (has_cxx_compiler and has_ninja), reason="needs a C++ compiler and ninja")
def test_a_builder_of_ones_own_compiles(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    source = tmp_path / "twice.cpp"
    source.write_text(
        "#include <Python.h>\n"
        "static PyObject* twice(PyObject*, PyObject* x) { return PyNumber_Add(x, x); }\n"
        'static PyMethodDef methods[] = {{"twice", twice, METH_O, ""}, {nullptr, nullptr, 0, nullptr}};\n'
        'static PyModuleDef module = {PyModuleDef_HEAD_INIT, "twice_of_the_tests", "", -1, methods};\n'
        "PyMODINIT_FUNC PyInit_twice_of_the_tests() { return PyModule_Create(&module); }\n"
    )
    builder = Twice(source)
    module = builder.load()
    assert module.twice(21) == 42
    assert builder.load() is module


def test_the_extension_for_setuptools():
    extension = Twice().builder()
    assert (extension.name, extension.sources) == ("tests.twice", ["/nowhere.cpp"])


def test_a_builder_that_is_not_compatible_does_not_build():
    class Never(Twice):
        def is_compatible(self, verbose=False):
            return self.command_exists(["no-such-program", "nor-this"])

    with pytest.raises(OpUnavailable, match="cannot be built here: of the programs no-such-program, nor-this"):
        Never().load()


def test_probing_a_builder_that_fails():
    class Broken(Twice):
        def is_compatible(self, verbose=False):
            raise OSError("no such device")

    builder = Broken()
    assert probe_is_compatible(builder, verbose=True) is False
    assert builder.error_log == "OSError: no such device"


def test_versions_of_torch_are_compared():
    Twice.validate_torch_version(git_version_info.torch_info)
    Twice.validate_torch_op_version({"version": git_version_info.torch_info["version"]})
    with pytest.raises(OpUnavailable, match=r"built with version 1\.13, but .* is running"):
        Twice.validate_torch_version({**git_version_info.torch_info, "version": "1.13"})


def test_facts_about_the_machine(tmp_path, monkeypatch):
    builder = Twice()
    assert builder.cpu_arch() in ("-march=native", "-mcpu=native")
    assert builder.simd_width().startswith("-D__")
    assert builder.command_exists("sh")
    assert not builder.command_exists("no-such-program")
    if has_cxx_compiler:
        assert builder.has_function("cos", ("m",))
        assert not builder.has_function("no_such_function", ("m",), verbose=True)
    assert builder.strip_empty_entries(["", "-O3"]) == ["-O3"]
    assert builder.deepspeed_src_path("/a/b.cpp") == "/a/b.cpp"
    assert builder.deepspeed_src_path("adam/rule.py").endswith("deepspeed/ops/adam/rule.py")
    monkeypatch.setenv("ROCM_HOME", str(tmp_path))
    assert builder.installed_rocm_version() == (0, 0)
    (tmp_path / ".info").mkdir()
    (tmp_path / ".info" / "version").write_text("6.2.1-123\n")
    assert builder.installed_rocm_version() == (6, 2)
    monkeypatch.setenv("PYTORCH_ROCM_ARCH", "gfx942")
    assert builder.get_rocm_gpu_arch() == "gfx942"


# ---- CUDA


class Cuda(CUDAOpBuilder):
    NAME = "cuda_of_the_tests"

    def absolute_name(self):
        return "tests.cuda"

    def sources(self):
        return []


@pytest.fixture
def toolkit(monkeypatch, tmp_path):
    """Sets the version that nvcc says, or takes nvcc away."""

    def say(version):
        if version is None:
            monkeypatch.setattr(cuda, "nvcc", lambda: None)
            return
        program = tmp_path / "nvcc"
        program.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.99'\n")
        program.chmod(0o755)
        monkeypatch.setattr(cuda, "nvcc", lambda: str(program))

    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    return say


def test_the_compiler_must_fit_torch(toolkit, monkeypatch):
    toolkit(None)
    with pytest.raises(MissingCUDAException, match="op 'x': there is no CUDA compiler"):
        installed_cuda_version("x")
    assert not Cuda("c").is_compatible()
    toolkit("12.8")
    assert installed_cuda_version() == (12, 8)
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    assert assert_no_cuda_mismatch()
    assert Cuda("c").is_compatible()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(CUDAMismatchException, match=r"compiler is 12\.8, but torch was built with CUDA 13\.0"):
        assert_no_cuda_mismatch()
    builder = Cuda("c")
    assert not builder.is_compatible()
    with pytest.raises(OpUnavailable, match=r"torch was built with CUDA 13\.0"):
        builder.load()
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(CUDAMismatchException, match="built without CUDA"):
        assert_no_cuda_mismatch()


@pytest.mark.parametrize(
    ("version", "archs"),
    [
        (None, "6.0;6.1;7.0"),
        ("11.0", "6.0;6.1;7.0;7.5;8.0"),
        ("12.8", "6.0;6.1;7.0;7.5;8.0;8.6;8.9;9.0;10.0;12.0"),
        ("13.0", "7.5;8.0;8.6;8.9;9.0;10.0;12.0"),
    ],
)
def test_default_architectures(toolkit, version, archs):
    toolkit(version)
    assert get_default_compute_capabilities() == archs


def test_architectures_to_build_for(toolkit, monkeypatch):
    toolkit("11.0")
    assert Cuda("c").compute_capability_args("8.0;9.0+PTX") == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90,code=sm_90",
        "-gencode=arch=compute_90,code=compute_90",
    ]
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5")
    assert Cuda("c").compute_capability_args() == ["-gencode=arch=compute_75,code=sm_75"]
    assert "-gencode=arch=compute_75,code=sm_75" in Cuda("c").nvcc_args()

    class Modern(Cuda):
        def filter_ccs(self, ccs):
            return [cc.split(".") for cc in ccs if int(cc.split(".")[0]) >= 8]

    with pytest.raises(OpUnavailable, match=r"'c' supports none of the GPU architectures 7\.5"):
        Modern("c").compute_capability_args()
