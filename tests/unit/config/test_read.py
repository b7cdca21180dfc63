"""Every way to hand over a config, and every way to get it wrong."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path

import pytest

from deepspeed.config.read import read
from deepspeed.errors import DeepSpeedConfigError

CONFIG = {"train_batch_size": 8, "fp16": {"enabled": True, "loss_scale": 0}}


def encode(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(CONFIG),
        "{\n  # a comment\n  train_batch_size: 8\n  fp16: {enabled: true, loss_scale: 0,}\n}",
        "// no outer braces\ntrain_batch_size: 8\nfp16: {\n  enabled: true\n  loss_scale: 0\n}",
        "\ufeff" + json.dumps(CONFIG),
    ],
    ids=["json", "hjson", "braceless", "byte order mark"],
)
def test_files(tmp_path, text):
    path = tmp_path / "ds.json"
    path.write_text(text, encoding="utf-8")
    for spelled in (path, str(path)):
        assert read(spelled) == (CONFIG, str(path))


def test_base64_with_and_without_padding():
    text = encode(json.dumps(CONFIG))
    assert read(text)[0] == CONFIG
    assert read(text.rstrip("="))[0] == CONFIG


def test_infinity_survives_json_text(tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps({"steps_per_print": math.inf}))
    assert read(tmp_path / "ds.json")[0] == {"steps_per_print": math.inf}


def test_the_callers_dict_is_not_shared():
    leaf = object()
    config = {"a": {"b": [1, {"c": leaf}]}}
    copy, _ = read(config)
    assert copy == config
    assert copy["a"] is not config["a"]
    assert copy["a"]["b"][1] is not config["a"]["b"][1]
    assert copy["a"]["b"][1]["c"] is leaf


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '{"x": {"a": 1, "b": 2, "a": 3}}', "a: 1\na: 2"])
def test_duplicate_keys_are_found_in_files_and_base64(tmp_path, text):
    path = tmp_path / "ds.json"
    path.write_text(text)
    for source in (path, encode(text)):
        with pytest.raises(DeepSpeedConfigError, match=r"Duplicate keys in DeepSpeed config: \['a'\]"):
            read(source)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("no/such/file.json", "there is no such file"),
        ("", "is empty"),
        (None, "found NoneType"),
        (3, "found int"),
        ([1], "found list"),
        ({1: 2}, "keys are text, found 1"),
        ({"a": {None: 2}}, "a: keys are text, found None"),
        (encode("[1, 2]"), "a config is a JSON object, found list"),
        (encode("{:"), "is neither JSON .* nor HJSON"),
        (encode("a: '''"), "is neither JSON .* nor HJSON .it ends in the middle of a string"),
        (encode("{a: '''x"), "is neither JSON .* nor HJSON"),
        (encode("{a: 'x"), "is neither JSON .* nor HJSON"),
        (encode("a: 1e999999"), "is neither JSON .* nor HJSON"),
        (encode("a: " + "9" * 5000), "is neither JSON .* nor HJSON"),
        ("/dev/zero", "has more than 67108864 bytes"),
    ],
)
def test_what_cannot_be_read_is_a_config_error(source, said):
    with pytest.raises(DeepSpeedConfigError, match=said):
        read(source)


def test_a_folder_or_a_binary_file_is_a_config_error(tmp_path):
    (tmp_path / "ds.json").write_bytes(b"\xff\xfe\x00\x80")
    for path in (tmp_path, tmp_path / "ds.json", Path("/dev/null")):
        with pytest.raises(DeepSpeedConfigError):
            read(path)


def test_a_dict_that_contains_itself():
    config: dict = {}
    config["again"] = config
    with pytest.raises(DeepSpeedConfigError, match="contains itself"):
        read(config)
