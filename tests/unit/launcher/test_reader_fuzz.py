"""Readers of what people and programs write: any text is read, or refused by an error of ours, in little memory."""

from __future__ import annotations

import base64
import json
import random
import tracemalloc

import pytest

from deepspeed.config.read import read
from deepspeed.errors import DeepSpeedError
from deepspeed.launcher.hosts import (
    apply_num_nodes_and_gpus,
    decode_world_info,
    encode_world_info,
    fetch_hostfile,
    parse_hostfile,
    parse_inclusion_exclusion,
)

ROUNDS = 2500
MEMORY = 2**26  # bytes that one reading may need at most
PIECES = [
    *(" ", "\n", "\r\n", "\t", "\0", "\x1b[31m", "\ufeff", "\ud800", "é", "²", "٣", "#", "@", ":", ",", "=", "-", "+"),
    *("{", "}", "[", "]", '"', "'", "'''", "\\", "\\u12", "/*", "//", "0", "1", "-1", "1e999999", "9" * 20, "9" * 5000),
    *(
        "slots=",
        "slots=99999999999",
        "null",
        "true",
        "NaN",
        "a",
        "[" * 200,
        '{"a":' * 200,
        "x" * 300,
        "/etc",
        "..",
        "=",
    ),
]


def mutated(rng: random.Random, text: str) -> str:
    for _ in range(rng.randint(1, 6)):
        at, until = sorted((rng.randint(0, len(text)), rng.randint(0, len(text))))
        until = min(until, at + rng.randint(0, 8))
        text = text[:at] + rng.choice(["", rng.choice(PIECES), text[at:until] * 3]) + text[until:]
    return text


def coded(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode("utf-8", "surrogatepass")).decode()


def hostfile(rng):
    hosts = parse_hostfile(mutated(rng, "# ours\nworker-1 slots=4\nworker-2  slots=8 max=9\n").splitlines())
    parse_inclusion_exclusion(hosts, "", "")


def filters(rng):
    pool = {"w0": 4, "w1": 4}
    words = [mutated(rng, "w0@w1:0,2"), ""]
    rng.shuffle(words)
    active = parse_inclusion_exclusion(pool, *words)
    apply_num_nodes_and_gpus(active, rng.choice([-1, 1, 2, 10**30]), rng.choice([-1, 3, 10**12, 2**10]))


def world_info(rng):
    text = json.dumps({"h1": [0, 1], "h2": ["GPU-ab", 2]})
    world = decode_world_info(rng.choice([coded(mutated(rng, text)), mutated(rng, coded(text))]))
    assert decode_world_info(encode_world_info(world)) == world


def config(rng):
    texts = [
        '{"train_batch_size": 8, "fp16": {"enabled": true}}',
        "a: '''\n  x\n'''\nb: 1 # c\n{}",
        "{a: [1, 'x'], b: \"c\"}",
    ]
    read(coded(mutated(rng, rng.choice(texts))))


@pytest.mark.parametrize("reader", [hostfile, filters, world_info, config])
def test_any_text(reader):
    rng = random.Random(f"readers of {reader.__name__}")
    good = bad = 0
    tracemalloc.start()
    try:
        for _ in range(ROUNDS):
            try:
                reader(rng)
                good += 1
            except DeepSpeedError as error:
                bad += 1
                assert len(str(error)) < 20_000
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()
    assert min(good, bad) > ROUNDS // 50, f"{good} were read, {bad} refused: the mutations miss one side"


SLOTS = ["1", "[[0]]", "[{}]", "[true]", "[1.5]", "[-1]", "[99999999999]", f"[{'9' * 5000}]", "[NaN]", "null", "{}"]
NO_WORLDS = [
    *("", "!!!", "e30", "[]", "é", "=", "-", coded("[" * 100_000), coded('{"a":' * 100_000), coded("null")),
    *(coded(f'{{"a": {slots}}}') for slots in SLOTS),
    coded(coded('{"a": [0]}')),
]


@pytest.mark.parametrize("world", NO_WORLDS, ids=lambda text: text[:24])
def test_world_info_that_is_none(world):
    with pytest.raises(DeepSpeedError, match="--world_info"):
        decode_world_info(world)


def test_hosts_that_would_fill_the_memory():
    crowd = {f"h{number}": 2**16 for number in range(100)}
    with pytest.raises(DeepSpeedError, match="6553600 slots together"):
        parse_inclusion_exclusion(crowd, "", "")
    with pytest.raises(DeepSpeedError, match="--num_gpus 99999999999"):
        apply_num_nodes_and_gpus({"a": [0]}, -1, 99999999999)
    with pytest.raises(DeepSpeedError, match="slots together"):
        apply_num_nodes_and_gpus({f"h{number}": [0] for number in range(100)}, -1, 2**16)


def test_a_hostfile_without_end(tmp_path, monkeypatch):
    (tmp_path / "hosts").write_text("a slots=1\n" * 10)
    monkeypatch.setattr("deepspeed.launcher.hosts._MOST_BYTES", 50)
    with pytest.raises(DeepSpeedError, match=r"cannot be read.*larger than"):
        fetch_hostfile(str(tmp_path / "hosts"))
    (tmp_path / "hosts").write_bytes(b"a\xff slots=1")
    with pytest.raises(DeepSpeedError, match="cannot be read"):
        fetch_hostfile(str(tmp_path / "hosts"))


def test_a_terminal_does_not_obey_a_hostfile():
    with pytest.raises(DeepSpeedError) as raised:
        parse_hostfile(["\x1b[2Ja slots=1", "\x1b[2Ja slots=2"])
    assert str(raised.value).isprintable()
