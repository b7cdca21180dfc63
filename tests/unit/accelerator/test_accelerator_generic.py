"""The generic class and the vendors' differences, against a made-up device module."""

from __future__ import annotations

import contextlib
import os
import sys
import types

import pytest
import torch

from deepspeed.accelerator import cuda as cuda_home
from deepspeed.accelerator.cuda import CUDA_Accelerator
from deepspeed.accelerator.interface import DeepSpeedAccelerator
from deepspeed.accelerator.vendors import (
    HPU_Accelerator,
    MLU_Accelerator,
    MPS_Accelerator,
    NPU_Accelerator,
    SDAA_Accelerator,
    XPU_Accelerator,
)
from deepspeed.errors import AcceleratorError

VENDORS = [
    # class, backend, visible-devices variables, exported prefixes
    (XPU_Accelerator, "ccl", ["ZE_AFFINITY_MASK"], ["CCL"]),
    (NPU_Accelerator, "hccl", ["ASCEND_RT_VISIBLE_DEVICES"], ["ASCEND", "HCCL", "LD_LIBRARY", "PATH"]),
    (SDAA_Accelerator, "tccl", ["SDAA_VISIBLE_DEVICES"], ["TCCL", "LD_LIBRARY", "PATH"]),
    (MPS_Accelerator, "gloo", [], []),
    (HPU_Accelerator, "hccl", ["HABANA_VISIBLE_MODULES"], []),
    (MLU_Accelerator, "cncl", ["MLU_VISIBLE_DEVICES"], ["NEUWARE_HOME", "CNCL", "LD_LIBRARY", "PATH"]),
]


class FakeDevice(types.ModuleType):
    """Stands for torch.<name>: answers with what it was asked, and remembers every call."""

    def __init__(self, **facts):
        super().__init__("fake")
        self.calls = []
        self.facts = {
            "current_device": 1,
            "device_count": 2,
            "is_available": True,
            "memory_allocated": 10,
            "max_memory_allocated": 20,
            "memory_reserved": 30,
            "max_memory_reserved": 40,
            "mem_get_info": (100, 500),
            "memory_stats": {"allocated_bytes.all.current": 10},
            "get_device_properties": types.SimpleNamespace(total_memory=500, has_fp64=False),
            "get_device_name": "GAUDI2",
            "is_bf16_supported": True,
            "initial_seed": 7,
            "current_allocated_memory": 11,
            "driver_allocated_memory": 33,
            "recommended_max_memory": 44,
            "is_current_stream_capturing": False,
            "get_rng_state": torch.zeros(2, dtype=torch.uint8),
            "device": contextlib.nullcontext(),
            "stream": contextlib.nullcontext(),
            "graph": contextlib.nullcontext(),
            "current_stream": "current",
            "default_stream": "default",
            **facts,
        }
        self.default_generators = (torch.Generator(), torch.Generator())
        self.random = types.SimpleNamespace(default_generators=self.default_generators)
        self.Stream, self.Event = type("Stream", (), {}), type("Event", (), {})

    def __getattr__(self, name):
        missing = (
            name.startswith("__") or name.endswith("Graph") or self.__dict__.get("facts", {}).get(name) is KeyError
        )
        if missing:
            raise AttributeError(name)

        def function(*args, **kwargs):
            self.calls.append((name, *args, *kwargs.values()))
            return self.facts.get(name)

        return function


@pytest.fixture
def fake(monkeypatch):
    device = FakeDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda name: device)
    for name in ("torch_npu", "torch_mlu", "torch_sdaa", "habana_frameworks.torch.hpu"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for parent in ("habana_frameworks", "habana_frameworks.torch"):
        monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
    return device


@pytest.mark.parametrize(("home", "backend", "visible", "exported"), VENDORS)
def test_facts_of_the_vendors(home, backend, visible, exported, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_xccl_available", lambda: False, raising=False)
    accelerator = home()
    assert accelerator.communication_backend_name() == backend
    assert accelerator.visible_devices_envs() == visible
    assert accelerator.export_envs() == exported
    env = {}
    accelerator.set_visible_devices_envs(env, ["2", "5"])
    assert env == dict.fromkeys(visible, "2,5")
    assert not accelerator.is_synchronized_device()
    assert not accelerator.use_host_timers()


@pytest.mark.parametrize("home", [row[0] for row in VENDORS])
def test_every_vendor_answers_the_whole_contract(home, fake, monkeypatch):
    if home is MPS_Accelerator:
        fake.facts["_get_default_mps_generator"] = torch.Generator()
        monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: True)
    accelerator = home()
    name = accelerator._name
    assert accelerator.device_name(1) == f"{name}:1"
    assert accelerator.current_device_name() in (f"{name}:0", f"{name}:1")
    assert accelerator.device_count() == 2
    assert accelerator.is_available()
    with accelerator.device(0), accelerator.stream(None), accelerator.capture_to_graph(accelerator.create_graph()):
        accelerator.set_device(0)
    accelerator.synchronize(0)
    accelerator.manual_seed(1)
    accelerator.manual_seed_all(1)
    assert isinstance(accelerator.initial_seed(), int)
    assert isinstance(accelerator.default_generator(0), torch.Generator)
    accelerator.set_rng_state(accelerator.get_rng_state(0), 0)
    assert accelerator.Event is fake.Event
    assert accelerator.memory_allocated(0) <= accelerator.max_memory_allocated(0)
    assert accelerator.memory_cached(0) == accelerator.memory_reserved(0) <= accelerator.max_memory_cached(0)
    assert accelerator.memory_stats(0)["allocated_bytes.all.current"] == accelerator.memory_allocated()
    assert accelerator.total_memory(0) > accelerator.available_memory(0) > 0
    accelerator.reset_peak_memory_stats(0)
    accelerator.reset_max_memory_allocated()
    accelerator.reset_max_memory_cached()
    accelerator.empty_cache()
    assert torch.float32 in accelerator.supported_dtypes()
    assert torch.bfloat16 in accelerator.supported_dtypes()
    accelerator.range_push("a")
    accelerator.range_pop()
    assert isinstance(accelerator.is_triton_supported(), bool)
    assert not accelerator.is_current_stream_capturing()


def test_an_index_is_passed_on_and_none_is_left_out(fake):
    npu = NPU_Accelerator()
    npu.synchronize(1)
    npu.synchronize()
    npu.current_stream(0)
    npu.set_rng_state("state", 1)
    npu.set_rng_state("state")
    assert fake.calls == [
        ("synchronize", 1),
        ("synchronize",),
        ("current_stream", 0),
        ("set_rng_state", "state", 1),
        ("set_rng_state", "state"),
    ]
    assert npu.total_memory() == 500
    assert fake.calls[-1] == ("get_device_properties", 1)  # the current device


def test_available_memory_counts_what_the_allocator_keeps_unused(fake):
    assert NPU_Accelerator().available_memory() == 100 + 30 - 10


def test_one_device_kinds_take_no_index(fake):
    HPU_Accelerator().synchronize(3)
    assert fake.calls == [("synchronize",)]


def test_hpu_differences(fake, monkeypatch):
    monkeypatch.setenv("PT_HPU_LAZY_ACC_PAR_MODE", "1")
    monkeypatch.delenv("PT_HPU_ENABLE_REFINE_DYNAMIC_SHAPES", raising=False)
    hpu = HPU_Accelerator()
    assert os.environ["PT_HPU_LAZY_ACC_PAR_MODE"] == "1"
    assert os.environ["PT_HPU_ENABLE_REFINE_DYNAMIC_SHAPES"] == "0"
    assert hpu.resolves_data_dependency()
    assert hpu.handles_memory_backpressure()
    assert hpu.is_fp16_supported()
    assert not hpu.is_fp64_supported()
    assert hpu.get_compile_backend() == "hpu_backend"
    hpu.set_compile_backend("eager")
    hpu.set_compile_backend("hpu_backend")
    fake.facts["get_device_name"] = "GAUDI"
    assert not hpu.is_fp16_supported()


def test_mps_differences(fake, monkeypatch):
    mps = MPS_Accelerator()
    assert mps.Stream is mps.current_stream() is mps.default_stream() is None
    assert (mps.memory_allocated(), mps.memory_reserved(), mps.total_memory()) == (11, 33, 44)
    fake.facts["current_allocated_memory"] = 5
    assert (mps.memory_allocated(), mps.max_memory_allocated()) == (5, 11)
    mps.reset_peak_memory_stats()
    assert mps.max_memory_allocated() == 5
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: False)
    assert mps.supported_dtypes() == [torch.float32, torch.float16]


def test_xpu_differences(fake, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_xccl_available", lambda: True, raising=False)
    xpu = XPU_Accelerator()
    assert xpu.communication_backend_name() == "xccl"
    assert xpu.default_stream(0) == "current"
    assert not xpu.is_fp64_supported()


def test_graphs_where_the_device_has_them(fake):
    made = []
    fake.NPUGraph = lambda: made.append(types.SimpleNamespace(replay=lambda: made.append("replayed"))) or made[0]
    npu = NPU_Accelerator()
    graph = npu.create_graph()
    with npu.capture_to_graph(graph, pool="pool", stream="stream"):
        pass
    npu.replay_graph(graph)
    assert fake.calls == [("graph", graph, "pool", "stream")]
    assert made == [graph, "replayed"]
    npu.replay_graph(None)


def test_lazy_calls_are_queued_by_the_device_or_made_at_once(fake):
    called = []
    NPU_Accelerator().lazy_call(called.append)
    assert fake.calls == [("_lazy_call", called.append)]
    fake.facts["_lazy_call"] = KeyError
    NPU_Accelerator().lazy_call(lambda: called.append(1))
    assert called == [1]


def test_what_the_device_module_lacks_is_asked_of_torch_accelerator(fake, monkeypatch):
    fake.facts["current_device"] = fake.facts["empty_cache"] = KeyError
    npu = NPU_Accelerator()
    with pytest.raises(
        AcceleratorError, match=r"neither torch\.npu nor torch\.accelerator.*'current_device'.*torch_npu"
    ):
        npu.current_device()
    here = types.SimpleNamespace(type="npu")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: here)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 6, raising=False)
    assert npu.current_device() == 6
    here.type = "cuda"  # torch's accelerator is another kind: its answers are not ours
    with pytest.raises(AcceleratorError, match="current_device"):
        npu.current_device()


@pytest.mark.parametrize("home", [NPU_Accelerator, HPU_Accelerator, MLU_Accelerator, SDAA_Accelerator])
def test_a_vendor_package_that_is_not_installed_is_named(home):
    assert "is not installed" in home.why_unavailable()
    accelerator = home()
    assert accelerator.device_name() == home.name  # asking for facts needs no device
    with pytest.raises(AcceleratorError, match=f"no device module '{home.name}'.*install {home.package}"):
        accelerator.device_count()


def test_a_vendor_package_that_fails_to_import_is_told(monkeypatch):
    monkeypatch.setattr("deepspeed.accelerator.interface.find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    assert NPU_Accelerator.why_unavailable().startswith("importing torch_npu failed: ")


def test_a_vendor_package_without_a_device_is_told(fake, monkeypatch):
    monkeypatch.setattr("deepspeed.accelerator.interface.find_spec", lambda name: object())
    assert NPU_Accelerator.why_unavailable() is None
    fake.facts["is_available"] = False
    assert NPU_Accelerator.why_unavailable() == "torch.npu finds no usable device"


def test_a_device_that_torch_does_not_know():
    other = type("Other", (DeepSpeedAccelerator,), {"name": "nosuch", "backend": "gloo"})
    assert "has no module torch.nosuch" in other.why_unavailable()
    with pytest.raises(AcceleratorError, match="install a torch build"):
        other().synchronize()


@pytest.mark.parametrize(
    ("capability", "deprecated", "fp16", "triton"),
    [((5, 2), "1", False, False), ((6, 1), None, False, False), ((6, 1), "1", True, False), ((7, 0), None, True, True)],
)
def test_cuda_capabilities(monkeypatch, capability, deprecated, fp16, triton):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(cuda_home, "find_spec", lambda name: object())
    monkeypatch.delenv("DS_ALLOW_DEPRECATED_FP16", raising=False)
    if deprecated:
        monkeypatch.setenv("DS_ALLOW_DEPRECATED_FP16", deprecated)
    cuda = CUDA_Accelerator()
    assert cuda.is_fp16_supported() is fp16
    assert cuda.is_triton_supported() is triton
    assert cuda.prefer_triton_grouped_mm() is triton


def test_cuda_grouped_products(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(cuda_home, "find_spec", lambda name: object())
    assert not CUDA_Accelerator().prefer_triton_grouped_mm()
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert CUDA_Accelerator().prefer_triton_grouped_mm()
    monkeypatch.setattr(cuda_home, "find_spec", lambda name: None)
    assert not CUDA_Accelerator().is_triton_supported()


def test_rocm_facts(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    rocm = CUDA_Accelerator()
    assert rocm.device_name(0) == "cuda:0"
    assert rocm.communication_backend_name() == "nccl"
    assert rocm.visible_devices_envs() == ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"]
    assert rocm.export_envs() == ["NCCL", "RCCL"]


def test_cuda_ranges_carry_domain_and_category(monkeypatch):
    said = []
    nvtx = types.SimpleNamespace(range_push=said.append, range_pop=lambda: said.append("pop"))
    monkeypatch.setattr(torch.cuda, "nvtx", nvtx)
    cuda = CUDA_Accelerator()
    cuda.range_push("step")
    cuda.range_push("step", domain="engine", category="forward")
    cuda.range_pop("engine")
    assert said == ["step", "engine/forward: step", "pop"]


class FakeRuntime:
    def __init__(self, status=0):
        self.status, self.calls = status, []

    def cudaHostRegister(self, *args):
        self.calls.append(args)
        return self.status

    def cudaHostUnregister(self, *args):
        self.calls.append(args)
        return self.status

    def cudaGetErrorString(self, status):
        return "out of memory"


def test_cuda_host_registration(monkeypatch):
    runtime = FakeRuntime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    cuda = CUDA_Accelerator()
    assert cuda.register_host_memory(4096, 8192) is True
    with pytest.raises(AcceleratorError, match="0x1000 is already registered with 8192 bytes"):
        cuda.register_host_memory(4096, 10)
    assert cuda.unregister_host_memory(4096) is True
    with pytest.raises(AcceleratorError, match="0x1000 was not registered"):
        cuda.unregister_host_memory(4096)
    with pytest.raises(AcceleratorError, match="cannot page-lock 0 bytes"):
        cuda.register_host_memory(4096, 0)
    assert runtime.calls == [(4096, 8192, 1), (4096,)]


def test_a_failed_registration_leaves_nothing_behind(monkeypatch):
    runtime = FakeRuntime(status=2)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    launched = []

    def launch(size, device):
        launched.append(device)
        raise RuntimeError("out of memory")  # what was left in CUDA's error slot

    monkeypatch.setattr(torch, "ones", launch)
    cuda = CUDA_Accelerator()
    with pytest.raises(AcceleratorError, match=r"cudaHostRegister failed with error 2 \(out of memory\).*ulimit -l"):
        cuda.register_host_memory(4096, 8192)
    assert launched == ["cuda"]
    runtime.status = 0
    assert cuda.register_host_memory(4096, 8192)


def test_a_flat_pinned_tensor_is_made_contiguous_before_it_is_pinned(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    tensor = torch.arange(6).reshape(2, 3)
    assert CUDA_Accelerator().pin_memory(tensor.t(), match_shape=False).tolist() == [0, 3, 1, 4, 2, 5]
    assert pinned[0].shape == (6,)
    assert CUDA_Accelerator().pin_memory(tensor) is tensor


@pytest.mark.parametrize(("value", "text"), [("native", "is not part of this version"), ("nativ", "is unknown")])
def test_another_pinning_backend_is_an_error(monkeypatch, value, text):
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", value)
    with pytest.raises(ValueError, match=f"DS_PIN_MEMORY_BACKEND='{value}' {text}"):
        CUDA_Accelerator().pin_memory(torch.ones(1))
    with pytest.raises(AcceleratorError):
        CUDA_Accelerator().pin_empty_like(torch.ones(1))


def test_op_builders_are_looked_up_by_name(monkeypatch):
    builder = type("FusedAdamBuilder", (), {})
    module = types.ModuleType("builders")
    module.FusedAdamBuilder = builder
    monkeypatch.setitem(sys.modules, "deepspeed.ops.op_builder", module)
    cuda = CUDA_Accelerator()
    assert cuda.op_builder_dir() == "deepspeed.ops.op_builder"
    assert cuda.get_op_builder("FusedAdamBuilder") is builder
    assert isinstance(cuda.create_op_builder("FusedAdamBuilder"), builder)
    assert cuda.get_op_builder("NoSuchBuilder") is cuda.create_op_builder("NoSuchBuilder") is None


def test_without_a_builder_module_there_are_no_builders(monkeypatch):
    cuda = CUDA_Accelerator()
    for missing in ("deepspeed.nosuch", "deepspeed.accelerator.nosuch.deeper"):
        monkeypatch.setattr(cuda, "op_builder_dir", lambda missing=missing: missing)
        assert cuda.create_op_builder("FusedAdamBuilder") is None


def test_a_broken_builder_module_is_not_taken_for_a_missing_one(monkeypatch, tmp_path):
    (tmp_path / "broken_builders.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    cuda = CUDA_Accelerator()
    monkeypatch.setattr(cuda, "op_builder_dir", lambda: "broken_builders")
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        cuda.get_op_builder("FusedAdamBuilder")


def test_build_extension():
    pytest.importorskip("setuptools")
    assert CUDA_Accelerator().build_extension().__name__ == "BuildExtension"
