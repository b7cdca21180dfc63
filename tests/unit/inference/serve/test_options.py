"""What `ds_serve` is asked for: flags over a config, and a clear message for each mistake."""

from __future__ import annotations

import json
import socket

import pytest

from deepspeed.errors import DeepSpeedError
from deepspeed.inference.server import cli
from tests.serving import make_fake, save_tokenizer


def test_flags_go_over_the_config(tmp_path):
    given = {"manager": {"max_context": 9, "block_size": 8}, "speculative": {"method": "ngram", "tokens": 2}}
    (tmp_path / "config.json").write_text(json.dumps(given))
    words = ["model", f"--config={tmp_path / 'config.json'}", "--max-context=77", "--quantization=fp8", "--draft=small"]
    assert cli.options(words).config == {
        "state_manager": {"max_context": 77, "block_size": 8},
        "quantization": {"quantization_mode": "fp8"},
        "speculative": {"method": "draft", "model": "small", "tokens": 2},
    }


@pytest.mark.parametrize(
    ("flags", "files", "message"),
    [
        (["--tp=0"], {}, "--tp is 0; it must be at least 1"),
        (["--replicas=-1"], {}, "--replicas is -1"),
        (["--max-queue=0"], {}, "--max-queue is 0"),
        (["--port=70000"], {}, "--port is 70000; it must be 0 to 65535"),
        (["--port={port}"], {}, "Address already in use"),
        (["--host=no.such.host.invalid"], {}, "cannot listen at no.such.host.invalid"),
        (["--config={folder}/c"], {"c": "{"}, "is not JSON"),
        (["--config={folder}/c"], {"c": "[]"}, "holds a JSON list"),
        (["--config={folder}/c"], {}, "No such file"),
        (["--config={folder}/c", "--draft=small"], {"c": '{"speculative": 3}'}, "speculative is 3; it must be"),
        (["--api-key-file={folder}/k"], {"k": "key"}, "has the mode -rw-r--r--; only its owner may read keys"),
        (["--api-key-file={folder}/k"], {"k": ""}, "has no key; write one per line"),
        (["--chat-template={folder}/t"], {"t": "{% if %}"}, "is not a Jinja template"),
        (["--chat-template={folder}/t"], {"t": b"\xff"}, "is not text in UTF-8"),
        (["{folder}/nothing"], {}, "there is no folder"),
    ],
)
def test_mistakes(tmp_path, capsys, flags, files, message):
    for name, data in files.items():
        (tmp_path / name).write_bytes(data if isinstance(data, bytes) else data.encode())
        (tmp_path / name).chmod(0o644 if data == "key" else 0o600)
    model = [] if "nothing" in flags[0] else [str(save_tokenizer(tmp_path))]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = [flag.format(folder=tmp_path, port=taken.getsockname()[1]) for flag in flags]
        assert cli.main([*model, *words]) == 1
    said = capsys.readouterr().err
    assert said.startswith("ds_serve: ")
    assert message in said
    assert "Traceback" not in said


def test_without_the_extra_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "deepspeed.inference.server.app", None)
    with pytest.raises(DeepSpeedError, match=r"pip install 'deepspeed\[serve\]'"):
        cli.serve(cli.ServeOptions("model"), make_fake, on_ready=pytest.fail)
