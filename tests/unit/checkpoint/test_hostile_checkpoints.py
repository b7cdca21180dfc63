"""Checkpoints from strangers: each attack by itself, and a seeded sample of mutations through every reader and tool.

`DEEPSPEED_TEST_MUTATIONS=10000` tries as many.
"""

from __future__ import annotations

import _codecs
import contextlib
import json
import os
import pickle
import re
import subprocess
import sys
import time
import tracemalloc
import zipfile

import pytest
import torch

from deepspeed.checkpoint import __main__ as program
from deepspeed.checkpoint import zero_to_fp32
from deepspeed.checkpoint.formats.detect import find_tag, open_checkpoint
from deepspeed.checkpoint.formats.safe_load import safe_load
from deepspeed.checkpoint.formats.safetensors import open_file
from deepspeed.checkpoint.formats.universal.convert import convert, matches
from deepspeed.errors import CheckpointError, DeepSpeedError
from tests.checkpoint_states import SMALL
from tests.hostile_checkpoints import ESCAPE, Sandbox

MUTATIONS = int(os.environ.get("DEEPSPEED_TEST_MUTATIONS", "40"))


@pytest.fixture
def sandbox(tmp_path):
    made = Sandbox(tmp_path)
    yield made
    made.check()


def change(path, key, value):
    """One entry of a torch file, by its keys."""
    content = torch.load(path, weights_only=True)
    holder = content
    for part in key[:-1]:
        holder = holder[part]
    holder[key[-1]] = value
    torch.save(content, path)
    (path.parent / "manifest.json").unlink(missing_ok=True)


MODEL = "mp_rank_00_model_states.pt"


def names(sandbox):
    return ["/abs", str(sandbox.outside / "keys"), "../../outside/x", "../x", "a/b", "a\0", "", ".", "..", "x" * 300, 5]


@pytest.mark.slow
def test_names_do_not_become_paths(sandbox):
    """A parameter, a tied name and what it is tied to, a state of the optimizer."""
    for name in names(sandbox):
        folder = sandbox.fresh("deepspeed-2")
        content = torch.load(folder / "tag" / MODEL, weights_only=True)
        content["module"][name] = torch.zeros(2)
        torch.save(content, folder / "tag" / MODEL)
        (folder / "tag" / "manifest.json").unlink()
        with pytest.raises(DeepSpeedError):
            convert(folder / "tag", sandbox.out / "u")
        for aliases in ({name: "a.weight"}, {"alias": name}):
            folder = sandbox.fresh("deepspeed-2")
            change(folder / "tag" / MODEL, ("ds_extra", "aliases"), aliases)
            with pytest.raises(DeepSpeedError):
                convert(folder / "tag", sandbox.out / "u")
        folder = sandbox.fresh("deepspeed-2")
        for file in (folder / "tag").glob("*optim_states.pt"):
            content = torch.load(file, weights_only=True)
            for entry in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
                entry[name] = entry.pop("exp_avg")
            torch.save(content, file)
        (folder / "tag" / "manifest.json").unlink()
        assert not sandbox.out.exists()
        with contextlib.suppress(DeepSpeedError):  # "5.pt" is a good name of a file
            convert(folder / "tag", sandbox.out / "u")
        assert not list(sandbox.place.rglob(".u.*"))
        sandbox.check()


def test_a_state_name_that_ends_in_nul_replaces_no_file(sandbox):
    folder = sandbox.fresh("deepspeed-2")
    for file in (folder / "tag").glob("*optim_states.pt"):
        content = torch.load(file, weights_only=True)
        for entry in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            entry[f"{sandbox.outside}/keys\0"] = entry["exp_avg"]
        torch.save(content, file)
    (folder / "tag" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"NUL|absolute"):
        convert(folder / "tag", sandbox.out)


@pytest.mark.parametrize("text", ["/etc/passwd", "../../outside/keys", "..", "", "a\0", 5, None])
def test_the_native_index_names_files_inside(sandbox, text):
    folder = sandbox.fresh("native-2")
    index = json.loads((folder / "tag" / "index.json").read_text())
    index["files"][1] = text
    (folder / "tag" / "index.json").write_text(json.dumps(index))
    (folder / "tag" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="'files' has to name"):
        open_checkpoint(folder / "tag")


def outside_tag(sandbox):
    folder = sandbox.fresh("deepspeed-2")
    (folder / "tag").rename(folder / "moved")
    (folder / "in").mkdir()
    return folder


@pytest.mark.parametrize("text", ["../moved", "..", "{}/moved", "a\0", "in/../../run/moved"])
def test_tags_stay_inside(sandbox, text, capsys):
    folder = outside_tag(sandbox)
    tag = text.format(folder)
    (folder / "in" / "latest").write_text(tag)
    for more in ([], ["--tag", tag]):
        for command in (["inspect"], ["verify"]):
            assert program.main([*command, str(folder / "in"), *more]) == 1
        assert program.main(["convert", str(folder / "in"), str(sandbox.out), *more]) == 1
        with pytest.raises(SystemExit) as ended:
            zero_to_fp32.main([str(folder / "in"), str(sandbox.out), *more])
        assert ended.value.code == 1
    with pytest.raises(DeepSpeedError):
        find_tag(folder / "in")
    assert not sandbox.out.exists()


@contextlib.contextmanager
def bounded(megabytes, seconds=60.0):
    """Python's own memory, and time of the processor; torch's memory is bounded in the fuzzer's process."""
    tracemalloc.start()
    began = time.process_time()
    try:
        yield
        assert time.process_time() - began < seconds
        assert tracemalloc.get_traced_memory()[1] < megabytes * 2**20
    finally:
        tracemalloc.stop()


def test_a_tensor_of_more_elements_than_bytes(tmp_path):
    torch.save({"a": torch.zeros(1).expand(800_000_000)}, tmp_path / "x.pt")
    assert (tmp_path / "x.pt").stat().st_size < 4096
    with bounded(10), pytest.raises(CheckpointError, match="claims 3200000000 bytes"):
        safe_load(tmp_path / "x.pt")
    torch.save({"a": torch.zeros(1).expand(1000)}, tmp_path / "x.pt")  # somebody's buffer
    assert safe_load(tmp_path / "x.pt")["a"].shape == (1000,)


def test_many_tensors_over_the_same_bytes(tmp_path):
    memory = torch.zeros(2**20)
    torch.save({"a": [memory[place:] for place in range(200)]}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="its tensors claim"):
        safe_load(tmp_path / "x.pt")


def repacked(path, compression, data=None):
    """A torch file whose members are packed."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, data if data and name.endswith("data.pkl") else content)


def test_compressed_files_are_not_unpacked(tmp_path):
    torch.save({"a": 1}, tmp_path / "x.pt")
    bomb = b"\x80\x02" + pickle.dumps("x" * 60_000_000, 2)[2:]
    repacked(tmp_path / "x.pt", zipfile.ZIP_DEFLATED, bomb)
    assert (tmp_path / "x.pt").stat().st_size < 80_000
    with bounded(10), pytest.raises(CheckpointError, match="compressed"):
        safe_load(tmp_path / "x.pt")


class _Call:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("zipped", [True, False])
def test_byte_arrays_of_any_length_are_not_made(tmp_path, zipped):
    torch.save({"a": _Call(bytearray, 10**9)}, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    with bounded(10), pytest.raises(CheckpointError, match=r"torch\.save never does"):
        safe_load(tmp_path / "x.pt")
    values = {"a": [bytearray(b"abc"), b"\xff\0", bytearray(), b"abc", bytearray(b"abc")]}
    torch.save(values, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
    assert safe_load(tmp_path / "x.pt") == values


def test_text_that_takes_long_to_encode(tmp_path):
    torch.save({"a": _Call(_codecs.encode, "ä" * 10**6, "punycode")}, tmp_path / "x.pt")
    with bounded(50), pytest.raises(CheckpointError, match=r"torch\.save never does"):
        safe_load(tmp_path / "x.pt")


def test_containers_that_unfold_without_end(tmp_path):
    value = []
    for _ in range(60):
        value = [value] * 10
    torch.save({"a": value}, tmp_path / "x.pt")
    with bounded(10), pytest.raises(CheckpointError, match=r"unfolds to more|nested"):
        safe_load(tmp_path / "x.pt")
    itself = []
    itself.append(itself)
    torch.save(itself, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match="hold themselves"):
        safe_load(tmp_path / "x.pt")


@pytest.mark.parametrize("name", [MODEL, "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"])
@pytest.mark.parametrize("kind", ["pipe", "zero"])
def test_pipes_and_devices(sandbox, name, kind):
    for manifest in (True, False):
        folder = sandbox.fresh("deepspeed-2")
        path = folder / "tag" / name
        path.unlink()
        os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
        if not manifest:
            (folder / "tag" / "manifest.json").unlink()
        with bounded(20), pytest.raises(CheckpointError):
            SMALL.check(open_checkpoint(folder / "tag"))
        with bounded(20), pytest.raises(SystemExit):
            zero_to_fp32.main([str(folder), str(sandbox.out)])


PATTERNS = [
    r".*\.weight",
    r"a|b(c|d)*",
    r"\d+\.self_attention",
    r"^x.y$",
    r"[^.]+\.\w+\b",
    r"(?:ab){2,4}c?",
    r"x{0}",
    "",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_match_as_with_re(pattern):

    for name in (
        "a.weight",
        "ab",
        "bcdcd",
        "12.self_attention.x",
        "x.y",
        "x.y\n",
        "xzy.",
        "ababc",
        "abababab",
        "",
        "ä.b c",
    ):
        assert matches(pattern, name) == bool(re.match(pattern, name)), name


@pytest.mark.parametrize("pattern", ["(a*)*$", "(a|a)*b", "(a+)+b", "a*" * 50 + "b", "(.*)*(.*)*(.*)*x", "a{1000}{9}b"])
def test_patterns_that_would_never_end(pattern):
    with bounded(50), contextlib.suppress(CheckpointError):
        assert not matches(pattern, "a" * 200 + "!")


@pytest.mark.parametrize("pattern", [r"(a)\1", "(?=a)", "(?<!a)b", "(", "a" * 2000, 5, None, "a{99999}", "(" * 400])
def test_patterns_that_are_refused(pattern):
    with pytest.raises(CheckpointError, match="the rule"):
        matches(pattern, "aaa")


def test_a_pattern_in_a_checkpoint(sandbox):
    folder = sandbox.fresh("deepspeed-2")
    rules = {"tp_replicated_parameter_patterns": ["(.*)*(.*)*(.*)*(.*)*$x"]}
    change(folder / "tag" / MODEL, ("universal_checkpoint_info",), rules)
    with bounded(50):
        convert(folder / "tag", sandbox.out / "u")


def test_names_reach_no_terminal(sandbox, capsys):
    folder = sandbox.fresh("deepspeed-0")
    odd = f"[red]{ESCAPE}[/nonsense]\r\u202e\udcff"
    content = torch.load(folder / "tag" / MODEL, weights_only=True)
    content["module"][odd] = torch.zeros(2)
    content["ds_extra"]["client_state"] = {odd: 1}
    content["ds_version"] = odd
    torch.save(content, folder / "tag" / MODEL)
    (folder / "tag" / "manifest.json").unlink()
    assert program.main(["inspect", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "[red]\\x1b[2J[/nonsense]" in text
    assert all(c.isprintable() or c == "\n" for c in text)
    (folder / "tag").rename(folder / "[bold]x\x1b[0m")
    (folder / "latest").write_text("[bold]x\x1b[0m")
    assert program.main(["verify", str(folder)]) == 0
    assert program.main(["inspect", str(folder), "--tag", f"gone{ESCAPE}"]) == 1
    assert ESCAPE not in "".join(capsys.readouterr())


HEADERS = {
    "negative": '{"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}',
    "list": "[]",
    "number": "5",
    "entry": '{"a":5}',
    "offsets": '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0]}}',
    "texts": '{"a":{"dtype":"F32","shape":["1"],"data_offsets":["0","4"]}}',
    "floats": '{"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}}',
    "overlap": '{"a":{"dtype":"I8","shape":[4],"data_offsets":[0,4]},'
    '"b":{"dtype":"I8","shape":[4],"data_offsets":[0,4]}}',
    "beyond": '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    "huge": '{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,4]}}',
    "minus": '{"a":{"dtype":"F32","shape":[-1,-1],"data_offsets":[0,4]}}',
    "metadata": '{"__metadata__":5}',
    "dtype": '{"a":{"dtype":["F32"],"shape":[1],"data_offsets":[0,4]}}',
    "nested": "[" * 100_000,
    "hole": '{"a":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}',
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_of_safetensors(tmp_path, name):
    text = HEADERS[name].encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 4)
    with pytest.raises(CheckpointError, match="the header"):
        open_file(tmp_path / "x")


@pytest.mark.parametrize("value", [10**12, -1, 0, "2", None, [10**12], [2, 3], 2.5, torch.zeros(3)])
def test_counts_of_ranks(sandbox, value):
    for form, keys in (
        ("deepspeed-2", ("optimizer_state_dict", "partition_count")),
        ("deepspeed-3", ("optimizer_state_dict", "partition_count")),
    ):
        folder = sandbox.fresh(form)
        for file in (folder / "tag").glob("*optim_states.pt"):
            change(file, keys, value)
        with bounded(20), pytest.raises(CheckpointError):
            open_checkpoint(folder / "tag")


@pytest.mark.parametrize("shape", [[-1], [2**62], [2**40, 2**40], ["5"], 5, None, [1.5], [True] * 100])
def test_shapes(sandbox, shape):
    for form in ("deepspeed-2", "deepspeed-3"):
        folder = sandbox.fresh(form)
        for file in (folder / "tag").glob("*model_states.pt"):
            content = torch.load(file, weights_only=True)
            content["param_shapes"][0]["a.weight"] = shape
            content["frozen_param_shapes"]["ice.bias"] = shape
            torch.save(content, file)
        (folder / "tag" / "manifest.json").unlink()
        with bounded(20), pytest.raises(CheckpointError):
            SMALL.check(open_checkpoint(folder / "tag"))
        with bounded(20), pytest.raises(SystemExit):
            zero_to_fp32.main([str(folder), str(sandbox.out)])


@pytest.mark.slow
def test_mutations_through_every_reader_and_tool():
    """In a process of its own, whose memory is bounded."""
    program = [sys.executable, "-m", "tests.hostile_checkpoints", str(MUTATIONS), "20261116"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    assert f"{MUTATIONS} mutations" in done.stdout
