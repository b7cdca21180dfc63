"""Every method of the published contract exists, with the published parameter names and defaults."""

from __future__ import annotations

import inspect

import pytest

from deepspeed.accelerator import DeepSpeedAccelerator
from deepspeed.accelerator.cpu import CPU_Accelerator
from deepspeed.accelerator.cuda import CUDA_Accelerator
from deepspeed.accelerator.detect import BUILT_IN, _built_in
from deepspeed.errors import AcceleratorError

TABLE = """
    is_synchronized_device() use_host_timers() resolves_data_dependency() handles_memory_backpressure()
    device_name(device_index) device(device_index) set_device(device_index) current_device() current_device_name()
    device_count() synchronize(device_index=None)
    random() set_rng_state(new_state,device_index=None) get_rng_state(device_index=None) manual_seed(seed)
    manual_seed_all(seed) initial_seed() default_generator(device_index)
    stream(stream) current_stream(device_index=None) default_stream(device_index=None)
    empty_cache() memory_allocated(device_index=None) max_memory_allocated(device_index=None)
    reset_max_memory_allocated(device_index=None) memory_cached(device_index=None) max_memory_cached(device_index=None)
    reset_max_memory_cached(device_index=None) memory_stats(device_index=None)
    reset_peak_memory_stats(device_index=None) memory_reserved(device_index=None)
    max_memory_reserved(device_index=None) total_memory(device_index=None) available_memory(device_index=None)
    is_bf16_supported() is_fp16_supported() is_fp64_supported() supported_dtypes()
    is_available() range_push(msg,domain=None,category=None) range_pop(domain=None) lazy_call(callback)
    communication_backend_name() is_triton_supported() prefer_triton_grouped_mm()
    is_current_stream_capturing() create_graph() capture_to_graph(graph,pool=None,stream=None) replay_graph(graph)
    register_host_memory(address,num_bytes) unregister_host_memory(address) pin_memory_alignment()
    pin_memory(tensor,make_copy=True,match_shape=True) pin_empty(*size,dtype,device='cpu')
    pin_empty_like(tensor,device='cpu',dtype=None) is_pinned(tensor) unpin_memory(tensor) on_accelerator(tensor)
    op_builder_dir() create_op_builder(class_name) get_op_builder(class_name) build_extension()
    export_envs() visible_devices_envs() set_visible_devices_envs(current_env,local_accelerator_ids)
    get_compile_backend() set_compile_backend(backend)
"""
METHODS = TABLE.split()

TENSORS = ("BFloat16Tensor", "ByteTensor", "DoubleTensor", "FloatTensor", "HalfTensor", "IntTensor", "LongTensor")
PROPERTIES = ("Stream", "Event", *TENSORS)

CLASSES = [DeepSpeedAccelerator, *map(_built_in, BUILT_IN)]


def published(parameter: inspect.Parameter) -> str:
    star = "*" if parameter.kind is parameter.VAR_POSITIONAL else ""
    default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
    return star + parameter.name + default


@pytest.mark.parametrize("home", CLASSES, ids=lambda home: home.__name__)
def test_signatures(home):
    for row in METHODS:
        name, _, rest = row.partition("(")
        parameters = list(inspect.signature(getattr(home, name)).parameters.values())[1:]
        found = [published(parameter) for parameter in parameters]
        # device_name and device take None for the current device, which the published text does not show.
        if name in ("device_name", "device"):
            found = [text.removesuffix("=None") for text in found]
        assert f"{name}({','.join(found)})" == f"{name}({rest}"


@pytest.mark.parametrize("home", CLASSES, ids=lambda home: home.__name__)
def test_properties(home):
    for name in PROPERTIES:
        assert isinstance(inspect.getattr_static(home, name), property), name


# What a class of a device states of itself.
FACTS = {
    *("name", "backend", "package", "one_device", "has_streams", "graph_class", "compile_backend", "exported"),
    *("visible", "why_unavailable"),
}


def test_the_contract_has_nothing_else():
    own = {name for name in vars(DeepSpeedAccelerator) if not name.startswith("_")}
    assert own == {row.partition("(")[0] for row in METHODS} | set(PROPERTIES) | FACTS


def test_every_built_in_class_is_complete_and_named_as_users_know_it():
    for name in BUILT_IN:
        home = _built_in(name)
        assert home.__name__ == f"{name.upper()}_Accelerator"
        accelerator = home()
        assert accelerator._name == accelerator.device_name() == name
        assert accelerator.communication_backend_name() == accelerator._communication_backend_name


def test_an_old_third_party_class_without_the_late_methods_still_works():
    late = {
        "is_fp64_supported": True,
        "prefer_triton_grouped_mm": False,
        "pin_memory_alignment": 64,
    }

    class Old(DeepSpeedAccelerator):
        def __init__(self):
            super().__init__()
            self._name, self._communication_backend_name = "old", "gloo"

    old = Old()
    assert (old.device_name(1), old.communication_backend_name()) == ("old:1", "gloo")
    for name, answer in late.items():
        assert getattr(old, name)() == answer
    assert old.register_host_memory(4096, 1) is False
    assert old.unregister_host_memory(4096) is False
    assert old.unpin_memory(None) is None


def test_what_neither_the_class_nor_torch_has_is_an_error_that_names_the_device():
    old = type("Old", (DeepSpeedAccelerator,), {"name": "nosuch"})()
    with pytest.raises(AcceleratorError, match="no device module 'nosuch'"):
        old.device_count()


def test_cuda_and_cpu_answer_the_environment_questions_without_a_device():
    cuda, cpu = CUDA_Accelerator(), CPU_Accelerator()
    assert cuda.export_envs() == ["NCCL"]
    assert cuda.visible_devices_envs() == ["CUDA_VISIBLE_DEVICES"]
    env = {"PATH": "/bin"}
    cuda.set_visible_devices_envs(env, [0, 3])
    assert env == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0,3"}
    assert cpu.visible_devices_envs() == []
    cpu.set_visible_devices_envs(env, [7])
    assert env["CUDA_VISIBLE_DEVICES"] == "0,3"
