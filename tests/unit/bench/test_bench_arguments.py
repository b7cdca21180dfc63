"""The options of ds_bench: what they choose, what they refuse, and that ranks get the same ones."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.bench import ds_bench
from deepspeed.bench.ds_bench import RunFacts, as_json, draw_picture, parse, sizes_of, words_of
from deepspeed.bench.operations import OPERATIONS, Sample

SETTING = RunFacts(ranks=4, hosts=2, backend="gloo", device="cpu", dtype="float32", trials=3, unit="GBps")


@given(st.integers(1, 2**20), st.integers(0, 2**24), st.integers(2, 9), st.sets(st.sampled_from(sorted(OPERATIONS))))
def test_ranks_get_the_options_of_the_command(smallest, more, factor, chosen):
    words = [f"--min-size={smallest}", f"--max-size={smallest + more}", "--factor", str(factor)]
    words += [f"--{name.replace('_', '-')}" for name in chosen]
    first, rest = parse([*words, "--num_gpus", "2"])
    assert rest == ["--num_gpus", "2"]
    again, nothing = parse(words_of(first))
    assert nothing == []
    assert (again.operations, again.min_size, again.max_size) == (first.operations, smallest, smallest + more)
    assert words_of(again) == words_of(first)
    sizes = sizes_of(first)
    assert (sizes[0], sizes[-1]) == (smallest, smallest + more)
    assert sizes == sorted(set(sizes))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--min-size", "2M", "--max-size", "1M"], "--min-size 2097152 is larger than --max-size 1048576"),
        (["--max-size", "a lot"], "expected a number of bytes"),
        (["--factor", "1"], "expected 2 or more"),
        (["--trials", "0"], "from 1 up"),
        (["--dtype", "float31"], "invalid choice: 'float31'"),
        (["--codec", "int7"], "invalid choice: 'int7'"),
        (["--codec", "int8", "--broadcast"], "broadcast sends no codes; choose among all_reduce, all_gather"),
        (["--codec", "int8", "--dtype", "int32"], "found --dtype int32"),
        (["--codec", "int8", "--async-op"], "cannot be combined with --async-op"),
        (["--plot", "picture.jpeg"], "ends with .png, .svg, .pdf"),
        (["--plot", "/no/such/folder/picture.png"], "there is no folder /no/such/folder"),
    ],
)
def test_bad_input_is_named(words, told, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(("words", "told"), [(["--sizes", "3"], "--sizes"), (["fast"], "'fast', which is no option")])
def test_what_neither_it_nor_the_launcher_knows_is_an_error(words, told, capsys, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    try:
        code = ds_bench.main(words)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert told in capsys.readouterr().err


def test_options_of_the_launcher_come_too_late_for_a_rank(capsys, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert ds_bench.main(["--num_gpus", "2"]) == 2
    assert "--num_gpus 2: no options of ds_bench" in capsys.readouterr().err


@given(st.integers(2, 10_000))
def test_bus_bandwidth_is_what_a_rank_sends(world):
    factor = {name: operation.bus(world) for name, operation in OPERATIONS.items()}
    assert factor["all_reduce"] == factor["reduce_scatter"] + factor["all_gather"]
    assert 0.5 <= factor["all_gather"] == factor["all_to_all"] < 1
    assert factor["broadcast"] == factor["reduce"] == factor["pt2pt"] == 1


def test_json_is_in_bytes_per_second():
    told = as_json([Sample("all_reduce", 1024, 1e-6, 1.024e9, 1.536e9)], {"reduce": "not there"}, SETTING)
    assert json.loads(json.dumps(told)) == {
        "setting": {
            "ranks": 4,
            "hosts": 2,
            "backend": "gloo",
            "device": "cpu",
            "dtype": "float32",
            "trials": 3,
            "codec": None,
        },
        "results": [{"operation": "all_reduce", "nbytes": 1024, "seconds": 1e-6, "algorithm": 1.024e9, "bus": 1.536e9}],
        "unavailable": {"reduce": "not there"},
    }
    assert SETTING.rate(1e9) == 1


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_picture_is_drawn(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    samples = [Sample(name, size, size / 1e9, 1e9, 1e9) for name in OPERATIONS for size in (1024, 2**20)]
    draw_picture(tmp_path / f"speed{suffix}", samples, SETTING)
    assert (tmp_path / f"speed{suffix}").stat().st_size > 5_000
