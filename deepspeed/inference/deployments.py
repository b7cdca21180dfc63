"""`serve` and `client`: a server of its own process that goes on after the script, found again by its name.

[Note: deployments] A deployment has a folder with its key, its log, its address and a lock, for this user alone. The
server inherits the locked file and does not know of it, so the lock is held exactly as long as the server lives: a
number of a process that was given to another one is never signalled.
"""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from deepspeed.errors import DeepSpeedError, UsageError, printable
from deepspeed.inference.pipelines import GenerateOptions, Response, texts_of
from deepspeed.trust import inside, read_regular

_AT_ONCE = 64  # requests of one call
_PAUSE = 0.05  # seconds between two looks at a server that ends
_LOG_SHOWN = 2000  # characters
_OWN_FLAGS = ("dtype", "max_queue", "chat_template")


class DeploymentError(DeepSpeedError, RuntimeError):
    """A deployment that cannot start, is not there, or refuses a request."""


class _Place:
    """The files of a deployment."""

    def __init__(self, name: str) -> None:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepspeed" / "deployments"
        self.name = name
        self.folder = inside(home, name.replace("/", "--"), "the deployment", error=UsageError)

    def file(self, name: str) -> Path:
        return self.folder / name

    def lock(self) -> int | None:
        """A descriptor that holds the lock; None while a server has it."""
        descriptor = os.open(self.file("lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    def running(self) -> bool:
        if not self.folder.is_dir():
            return False
        descriptor = self.lock()
        if descriptor is not None:
            os.close(descriptor)
        return descriptor is None

    def write(self, name: str, text: str) -> Path:
        descriptor = os.open(self.file(name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        return self.file(name)

    def log_end(self) -> str:
        return printable(self.file("log").read_bytes()[-_LOG_SHOWN:].decode(errors="replace"))


class Client:
    """Generates by the server of a deployment."""

    def __init__(self, name: str, process: subprocess.Popen[str] | None = None) -> None:
        self._place = _Place(name)
        self._process = process
        if not self._place.running():
            raise DeploymentError(f"no deployment {name!r} runs for this user; start it by deepspeed.inference.serve")
        known = json.loads(read_regular(self._place.file("server.json"), 1 << 16))
        self.address: str = known["address"]
        self._pid: int = known["pid"]
        self._headers = {"Authorization": f"Bearer {known['key']}", "Content-Type": "application/json"}

    def __call__(self, prompts: str | Sequence[str], **params: Any) -> list[Response]:
        """As `generate`."""
        return self.generate(prompts, **params)

    def generate(
        self,
        prompts: str | Sequence[str],
        streaming_fn: Callable[[list[Response]], None] | None = None,
        **params: Any,
    ) -> list[Response]:
        """Responses as a `Pipeline` gives them; `streaming_fn` gets each piece of one prompt's text as it comes."""
        texts = texts_of(prompts)
        options = GenerateOptions.read(params)
        if streaming_fn is not None:
            if len(texts) != 1:
                raise UsageError(f"streaming_fn is given with {len(texts)} prompts; a stream has one")
            return self._stream(texts[0], options, streaming_fn)
        with ThreadPoolExecutor(min(_AT_ONCE, max(1, len(texts)))) as pool:
            return [each for found in pool.map(lambda text: self._whole(text, options), texts) for each in found]

    def _whole(self, prompt: str, options: GenerateOptions) -> list[Response]:
        body = json.loads(b"".join(self._post(prompt, options, stream=False)))
        before = prompt if options.full_text else ""
        length = body["usage"]["prompt_tokens"]
        return [
            Response(before + each["text"], length, len(each["token_ids"]), each["finish_reason"])
            for each in body["choices"]
        ]

    def _stream(
        self, prompt: str, options: GenerateOptions, streaming_fn: Callable[[list[Response]], None]
    ) -> list[Response]:
        """Every piece to the function; returns the whole texts."""
        texts: dict[int, list[str]] = {}
        counts: dict[int, int] = {}
        reasons: dict[int, str] = {}
        prompt_length = 0
        for line in self._post(prompt, options, stream=True):
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            if "error" in chunk:
                raise DeploymentError(f"deployment {self._place.name!r}: {chunk['error']['message']}")
            prompt_length = (chunk.get("usage") or {}).get("prompt_tokens", prompt_length)
            for choice in chunk["choices"]:
                at, new = choice["index"], len(choice.get("token_ids", ()))
                texts.setdefault(at, [prompt] if options.full_text else []).append(choice["text"])
                counts[at] = counts.get(at, 0) + new
                reasons[at] = choice["finish_reason"] or "none"
                streaming_fn([Response(choice["text"], prompt_length, new, reasons[at])])
        return [Response("".join(texts[at]), prompt_length, counts[at], reasons[at]) for at in sorted(texts)]

    def _post(self, prompt: str, options: GenerateOptions, *, stream: bool) -> Iterator[bytes]:
        """The lines of an answer."""
        asked = {key: _plain(value) for key, value in options.sampling.items()}
        schema = asked.pop("schema", None)
        if schema is not None:
            found = json.loads(schema) if isinstance(schema, str) else schema
            asked["response_format"] = {"type": "json_schema", "json_schema": {"schema": found}}
        body = {**asked, "prompt": prompt, "max_length": options.max_length, "return_token_ids": True, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        place = urlsplit(self.address)
        connection = http.client.HTTPConnection(place.hostname or "", place.port)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), self._headers)
            answer = connection.getresponse()
            if answer.status != http.HTTPStatus.OK:
                raise DeploymentError(f"deployment {self._place.name!r}: {_message(answer.read())}")
            yield from answer
        except (OSError, http.client.HTTPException) as error:
            raise DeploymentError(f"deployment {self._place.name!r} does not answer: {error}") from error
        finally:
            connection.close()

    def terminate_server(self) -> None:
        """End the server after what it runs, and wait for that."""
        if self._place.running():
            os.kill(self._pid, signal.SIGTERM)
        if self._process is not None:
            self._process.wait()
        while self._place.running():
            time.sleep(_PAUSE)
        for name in ("server.json", "key", "config.json"):
            self._place.file(name).unlink(missing_ok=True)


def client(name: str) -> Client:
    """A client of a deployment that runs."""
    return Client(name)


def serve(
    model: str,
    deployment_name: str | None = None,
    tensor_parallel: int = 1,
    replica_num: int = 1,
    **keys: Any,
) -> Client:
    """Start a server that goes on until `terminate_server`, also after this process.

    `keys`: `dtype`, `max_queue`, `chat_template` as of `ds_serve`; `quantization_mode` and `max_length` as of
    DeepSpeed-MII; all others are of `RaggedInferenceEngineConfig`. Without `deployment_name` its name is the model's.
    """
    place = _Place(deployment_name or Path(model).name)
    place.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    held = place.lock()
    if held is None:
        raise DeploymentError(f"a deployment {place.name!r} runs already; choose another deployment_name or end it")
    try:
        process, address, key = _start(place, held, model, _flags(place, tensor_parallel, replica_num, keys))
    finally:
        os.close(held)
    place.write("server.json", json.dumps({"address": address, "pid": process.pid, "key": key}))
    return Client(place.name, process)


def _flags(place: _Place, tensor_parallel: int, replica_num: int, keys: Mapping[str, Any]) -> list[str]:
    config = dict(keys)
    flags = [f"--tp={tensor_parallel}", f"--replicas={replica_num}"]
    flags += [f"--{name.replace('_', '-')}={config.pop(name)}" for name in _OWN_FLAGS if name in config]
    for name, flag in (("quantization_mode", "quantization"), ("max_length", "max-context")):
        if (value := config.pop(name, None)) is not None:
            flags.append(f"--{flag}={value}")
    return [*flags, f"--config={place.write('config.json', json.dumps(config))}"]


def _start(place: _Place, held: int, model: str, flags: Sequence[str]) -> tuple[subprocess.Popen[str], str, str]:
    """The server, its address and its key, once it takes requests."""
    key = secrets.token_urlsafe(32)
    words = [f"--api-key-file={place.write('key', key)}", "--port=0", *flags]
    program = [sys.executable, "-m", "deepspeed.inference.server.cli", model, *words]
    with open(place.write("log", ""), "w", encoding="utf-8") as log:
        process = subprocess.Popen(
            program,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            pass_fds=(held,),
            start_new_session=True,  # Ctrl-C is for the script
        )
    assert process.stdout is not None, "it is a pipe"
    with process.stdout:
        for line in process.stdout:
            if line.startswith("ready at "):
                return process, line.removeprefix("ready at ").strip(), key
    process.wait()
    raise DeploymentError(f"the server of {model} ended with exit code {process.returncode}: {place.log_end()}")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple | set | frozenset) else value


def _message(data: bytes) -> str:
    try:
        return printable(json.loads(data)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return printable(data[:200].decode(errors="replace"))
