"""Reading: no code from files, four classes of DeepSpeed, damage named, blocks checked as they are needed."""

import fractions
import pickle
import sys
import threading
from types import ModuleType

import pytest
import torch

from deepspeed.checkpoint.formats import safe_load as module
from deepspeed.checkpoint.formats.safe_load import ALLOWED, CheckedFile, MappedCheck, safe_load
from deepspeed.checkpoint.storage.block_writer import BLOCK
from deepspeed.checkpoint.storage.durable import write_tensorfile
from deepspeed.config.zero import ZeroStageEnum
from deepspeed.errors import CheckpointError
from deepspeed.precision.loss_scaler import DynamicLossScaler, LossScaler


@pytest.fixture
def written(tmp_path, monkeypatch):
    """A file that names the classes as DeepSpeed does."""

    def write(state):
        homes = {cls: path.rpartition(".") for cls, path in ALLOWED if path.startswith("deepspeed.")}
        made = {home for home, _, _ in homes.values() if home not in sys.modules}
        for home in made:
            monkeypatch.setitem(sys.modules, home, ModuleType(home))
        for cls, (home, _, name) in homes.items():
            monkeypatch.setattr(sys.modules[home], name, cls, raising=False)
            monkeypatch.setattr(cls, "__module__", home)
        torch.save(state, tmp_path / "x.pt")
        monkeypatch.undo()
        return tmp_path / "x.pt"

    return write


def test_the_four_classes(written):
    scaler = DynamicLossScaler(256.0, 100, 1.0, 2, False)
    path = written(
        {
            "loss_scaler": scaler,
            "static": LossScaler(8),
            "zero_stage": ZeroStageEnum.gradients,
            "slices": [{"w": module.fragment_address(7, 3)}],
        }
    )
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)
    state = safe_load(path)
    assert vars(state["loss_scaler"]) == vars(scaler)
    assert state["static"].cur_scale == 8
    assert state["zero_stage"] is ZeroStageEnum.gradients
    assert state["slices"][0]["w"] == module.fragment_address(7, 3)
    with pytest.raises(pickle.UnpicklingError):  # the allow-list ended with the call
        torch.load(path, weights_only=True)


def test_threads_do_not_end_each_others_allow_list(written):
    path = written({"static": LossScaler(8)})
    errors = []

    def load():
        try:
            for _ in range(30):
                safe_load(path)
        except CheckpointError as error:
            errors.append(error)

    threads = [threading.Thread(target=load) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_foreign_class_is_named(tmp_path):
    torch.save({"share": fractions.Fraction("1.5")}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"x\.pt holds an object of fractions\.Fraction.*plain value"):
        safe_load(tmp_path / "x.pt")


def test_code_in_a_file_does_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"a": Evil()}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="holds an object of"):
        safe_load(tmp_path / "x.pt")
    assert not (tmp_path / "ran").exists()


def test_mapped_tensors_do_not_change_the_file(tmp_path):
    write_tensorfile(tmp_path / "x.pt", {"a": torch.ones(1000)})
    safe_load(tmp_path / "x.pt")["a"].zero_()
    assert safe_load(tmp_path / "x.pt")["a"].sum() == 1000


def test_the_older_format_is_read(tmp_path):
    write_tensorfile(tmp_path / "x.pt", {"a": torch.ones(3)}, zipped=False)
    assert safe_load(tmp_path / "x.pt")["a"].sum() == 3


@pytest.mark.parametrize("zipped", [True, False])
def test_any_truncation_is_told(tmp_path, zipped):
    path = tmp_path / "x.pt"
    write_tensorfile(path, {"a": torch.arange(5000.0), "b": "text"}, zipped=zipped)
    data = path.read_bytes()
    for part in (0, 1, 3, 4, 100, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:part])
        with pytest.raises(CheckpointError, match=str(path)):
            safe_load(path)


def test_no_torch_file(tmp_path):
    (tmp_path / "x.pt").write_text("hello, this is no checkpoint " * 30)
    with pytest.raises(CheckpointError, match=r"x\.pt .*no file of torch\.save"):
        safe_load(tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="No such file"):
        safe_load(tmp_path / "missing.pt")


def flip(path, place):
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 0x10]))


@pytest.fixture
def large(tmp_path):
    """Four blocks of one tensor, a small tensor before and after it."""
    state = {"first": torch.ones(5), "big": torch.arange(BLOCK, dtype=torch.float32), "last": torch.ones(7)}
    path = tmp_path / "big.pt"
    return path, write_tensorfile(path, state), state


def test_only_what_is_needed_is_read(large):
    path, facts, state = large
    file = CheckedFile(path, facts)
    assert file.blocks.checked == {0, 4}, "the pickle at the front and the zip's directory at the end"
    part = file.require(file.state["big"][BLOCK // 2 : BLOCK // 2 + 10])
    assert torch.equal(part, state["big"][BLOCK // 2 : BLOCK // 2 + 10])
    assert file.blocks.checked == {0, 2, 4}
    file.require(file.state["big"])
    assert file.blocks.checked == {0, 1, 2, 3, 4}


def test_damage_is_found_where_it_is_read(large):
    path, facts, _ = large
    flip(path, 2 * BLOCK + 12345)
    file = CheckedFile(path, facts)
    file.require(file.state["big"][:100])
    file.require(file.state["last"])
    with pytest.raises(CheckpointError, match=rf"{path}: damaged between bytes {2 * BLOCK} and {3 * BLOCK} "):
        file.require(file.state["big"].view(2, -1)[1])


def test_a_damaged_pickle_is_not_even_read(large, monkeypatch):
    path, facts, _ = large
    flip(path, 100)
    monkeypatch.setattr(torch, "load", lambda *args, **kwargs: pytest.fail("it was read"))
    with pytest.raises(CheckpointError, match="damaged between bytes 0"):
        CheckedFile(path, facts)


def test_without_a_memory_map_the_whole_file_is_checked(large, monkeypatch):
    path, facts, _ = large
    monkeypatch.setattr(module, "_mapped_at", lambda address, path: None)
    check = MappedCheck(path, facts)
    check.require(safe_load(path)["last"])
    assert check.blocks.checked == {0, 1, 2, 3, 4}
