"""Builders of ops: what is here loads, and others can build."""

from __future__ import annotations

import logging
import shutil
import sys

import pytest
import torch

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.errors import OpUnavailable
from deepspeed.ops import op_builder
from deepspeed.ops.capability import has_cxx_compiler, has_gds
from deepspeed.ops.op_builder import builders
from deepspeed.ops.op_builder.builder import OpBuilder
from deepspeed.published import git_version_info

INCLUDED = set("async_io cpu_adagrad cpu_adam cpu_lion fused_adam fused_lamb fused_lion pin_memory transformer".split())
INCLUDED.add("fp_quantizer")
INCLUDED |= set("transformer_inference inference_core_ops cutlass_ops ragged_device_ops ragged_ops".split())
INCLUDED |= {"quantizer", "random_ltd", "sparse_attn", "evoformer_attn", "spatial_inference"}
COMES_ALONG = {*INCLUDED, "gds"}  # but not every machine can use it


def test_every_op_is_included():
    for name, builder in builders.all_ops().items():
        if name in INCLUDED:
            assert builder.is_compatible()
            assert builder.load() is sys.modules[builder.absolute_name()]
    assert set(builders.all_ops()) == COMES_ALONG
    assert op_builder.CPUAdamBuilder().load().DeepSpeedCPUAdam is deepspeed.ops.adam.DeepSpeedCPUAdam


def test_the_tables_of_ops_agree():
    assert deepspeed.ops.__installed_ops__ == git_version_info.installed_ops == dict.fromkeys(COMES_ALONG, True)
    usable = {name: name in INCLUDED or (name == "gds" and has_gds.holds) for name in builders.all_ops()}
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
            assert not op_builder.GDSBuilder().is_compatible()
            assert caplog.text == ""
            assert not op_builder.GDSBuilder().is_compatible(verbose=True)
    finally:
        deepspeed.logger.removeHandler(caplog.handler)
    assert f"op gds: {has_gds.verdict.reason}" in caplog.text


def test_the_accelerator_finds_builders():
    device = get_accelerator()
    assert device.op_builder_dir() == "deepspeed.ops.op_builder"
    assert device.get_op_builder("FusedAdamBuilder") is op_builder.FusedAdamBuilder
    assert isinstance(device.create_op_builder("CPULionBuilder"), op_builder.CPULionBuilder)
    assert device.create_op_builder("NoSuchBuilder") is None
    assert device.create_op_builder("QuantizerBuilder").NAME == "quantizer"


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


@pytest.mark.skipif(not (has_cxx_compiler and shutil.which("ninja")), reason="needs a C++ compiler and ninja")
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


def test_a_builder_that_is_not_compatible_does_not_build():
    class Never(Twice):
        def is_compatible(self, verbose=False):
            self.warning("no such device")
            return False

    with pytest.raises(OpUnavailable, match="cannot be built here: no such device"):
        Never().load()
    assert OpBuilder.is_rocm_pytorch() is (torch.version.hip is not None)
