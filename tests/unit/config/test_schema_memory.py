"""The `memory` section: sizes as people write them, and which keys belong together."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from deepspeed.config import load
from deepspeed.config.explain import json_schema
from deepspeed.config.features import keys_without_effect
from deepspeed.config.memory import MemoryConfig, read_size, size_text
from deepspeed.errors import DeepSpeedConfigError


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [
        (0, 0),
        (70_000_000_000, 70 * 10**9),
        (7e10, 70 * 10**9),
        ("70GB", 70 * 10**9),
        ("64GiB", 64 * 2**30),
        ("1.5 TB", 1_500_000_000_000),
        (" 12kb ", 12_000),
        ("1KiB", 1024),
        ("2mib", 2 * 2**20),
        ("3PB", 3 * 10**15),
        ("0.3KB", 300),
        ("17B", 17),
    ],
)
def test_sizes(written, nbytes):
    assert read_size(written) == nbytes
    assert MemoryConfig(host=written).host == nbytes


@pytest.mark.parametrize(
    "written",
    ["70", "70G", "GB", "-1GB", "1e9B", "1,5GB", "１GB", "", "1GB 2GB", -1, 1.5, float("nan"), float("inf"), True, [1]],
)
def test_what_is_no_size(written):
    with pytest.raises(
        ValidationError, match=r'expected bytes as a whole number, or a size with its unit such as "70GB"'
    ):
        MemoryConfig(device=written)


@given(st.integers(0, 10**18))
def test_a_size_for_a_reader_is_close(nbytes):
    assert abs(read_size(size_text(nbytes)) - nbytes) <= nbytes * 0.006


def test_null_is_no_limit_and_no_disk():
    assert MemoryConfig() == MemoryConfig(device=None, host=None, disk=None, path=None)


def test_a_disk_has_a_path_and_a_path_a_disk():
    assert MemoryConfig(disk="1TB", path="/fast").path == Path("/fast")
    assert MemoryConfig(disk=0).path is None
    with pytest.raises(ValidationError, match=r"disk is 1.00 TB but path is not given"):
        MemoryConfig(disk="1TB", path="")
    with pytest.raises(ValidationError, match=r"path is '/fast' but disk is not given"):
        MemoryConfig(path="/fast")


def test_the_loader_names_the_key():
    base = {"train_batch_size": 1}
    assert load({**base, "memory": {"device": "1GB"}}).schema.memory.device == 10**9
    assert load({**base, "memory": None}).schema == load(base).schema
    with pytest.raises(DeepSpeedConfigError, match=r"memory\.device: .*found '70G'"):
        load({**base, "memory": {"device": "70G"}})
    with pytest.raises(DeepSpeedConfigError, match="did you mean 'host'"):
        load({**base, "memory": {"hosts": 1}})


@pytest.mark.parametrize(("section", "told"), [({"device": 0}, []), ({"host": "1GB"}, ["memory.host"])])
def test_budgets_below_a_device_without_limit_are_told_to_be_idle(section, told):
    loaded = load({"train_batch_size": 1, "memory": section})
    assert [
        problem.path for problem in keys_without_effect(loaded.schema, told) if problem.path.startswith("memory")
    ] == told


def test_editors_take_numbers_and_text():
    options = json_schema()["$defs"]["MemoryConfig"]["properties"]["device"]["anyOf"]
    kinds = [kind["type"] for option in options for kind in option.get("anyOf", [option]) if "type" in kind]
    assert {"integer", "string", "null"} <= set(kinds)
