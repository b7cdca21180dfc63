"""Include and exclude, counts, and world info: examples of the reference and properties."""

from __future__ import annotations

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed.errors import DeepSpeedError
from deepspeed.launcher.hosts import (
    apply_num_nodes_and_gpus,
    decode_world_info,
    encode_world_info,
    parse_inclusion_exclusion,
    parse_node_configs,
)

POOL = {"w0": 4, "w1": 4}
HOSTS = st.text(st.characters(codec="ascii", categories=["L", "N"], include_characters=".-_"), min_size=1)
POOLS = st.dictionaries(HOSTS, st.integers(1, 9), min_size=1, max_size=5)


def test_node_configs():
    assert parse_node_configs(["w0", "w1:2,0"]) == {"w0": [], "w1": [0, 2]}
    assert parse_node_configs(["w0:1", "w0:0", "w0:1"]) == {"w0": [0, 1]}
    assert parse_node_configs(["w0:1", "w0"]) == {"w0": []}
    assert parse_node_configs(["w0", "w0:1"]) == {"w0": []}


@pytest.mark.parametrize("text", ["w0:", "w0:a", "w0:-1", "w0:1,", "w0:1, 2", "", ":1", "w 0"])
def test_wrong_node_configs(text):
    with pytest.raises(ValueError, match="write "):
        parse_node_configs([text])


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ("", "", {"w0": [0, 1, 2, 3], "w1": [0, 1, 2, 3]}),
        ("w0@w1:0,2", "", {"w0": [0, 1, 2, 3], "w1": [0, 2]}),
        ("w1:0,2@w0", "", {"w0": [0, 1, 2, 3], "w1": [0, 2]}),
        ("w0:1@w0:0", "", {"w0": [0, 1]}),
        ("w1", "", {"w1": [0, 1, 2, 3]}),
        ("", "w1:0", {"w0": [0, 1, 2, 3], "w1": [1, 2, 3]}),
        ("", "w1", {"w0": [0, 1, 2, 3]}),
        ("", "w0:0,1,2,3@w1:3", {"w1": [0, 1, 2]}),
    ],
)
def test_filters(include, exclude, left):
    found = parse_inclusion_exclusion(POOL, include, exclude)
    assert found == left
    assert list(found) == list(left)


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        ("w9", "", "Hostname 'w9' not found in hostfile"),
        ("", "w9:1", "Hostname 'w9' not found in hostfile"),
        ("w1:7", "", "No slot '7' specified on host 'w1'"),
        ("", "w1:4", "No slot '4' specified on host 'w1'"),
        ("w0", "w1", "mutually exclusive"),
    ],
)
def test_wrong_filters(include, exclude, message):
    with pytest.raises(ValueError, match=message) as raised:
        parse_inclusion_exclusion(POOL, include, exclude)
    assert isinstance(raised.value, DeepSpeedError)


@given(POOLS, st.data())
def test_include_and_exclude_are_opposites(pool, data):
    chosen = {host: data.draw(st.sets(st.integers(0, count - 1)), label=host) for host, count in pool.items()}
    chosen = {host: slots for host, slots in chosen.items() if slots}
    if not chosen:
        return
    text = "@".join(f"{host}:{','.join(map(str, slots))}" for host, slots in chosen.items())
    inside = parse_inclusion_exclusion(pool, text, "")
    outside = parse_inclusion_exclusion(pool, "", text)
    assert inside == {host: sorted(slots) for host, slots in chosen.items()}
    assert list(inside) == [host for host in pool if host in chosen]
    for host, count in pool.items():
        assert sorted(inside.get(host, []) + outside.get(host, [])) == list(range(count))
    assert all(outside.values())


def test_counts():
    active = {"w0": [0, 1], "w1": [3], "w2": [0]}
    assert apply_num_nodes_and_gpus(active, -1, -1) == active
    assert apply_num_nodes_and_gpus(active, 2, -1) == {"w0": [0, 1], "w1": [3]}
    assert apply_num_nodes_and_gpus(active, 2, 3) == {"w0": [0, 1, 2], "w1": [0, 1, 2]}
    with pytest.raises(ValueError, match="--num_nodes 4 asks for more than the 3 hosts"):
        apply_num_nodes_and_gpus(active, 4, -1)


def test_world_info_is_json_in_base_64():
    coded = encode_world_info({"h1": [0, 1], "h2": [0, 1]})
    assert coded.startswith("eyJoMSI6")
    assert base64.urlsafe_b64decode(coded) == b'{"h1": [0, 1], "h2": [0, 1]}'


@given(st.dictionaries(st.text(), st.lists(st.integers(0, 2**16) | st.text())))
def test_world_info_survives(info):
    found = decode_world_info(encode_world_info(info))
    assert found == info
    assert list(found) == list(info)


@pytest.mark.parametrize("coded", ["???", "e", "aGk=", "é", base64.b64encode(json.dumps([1]).encode()).decode()])
def test_wrong_world_info(coded):
    with pytest.raises(ValueError, match="--world_info"):
        decode_world_info(coded)
