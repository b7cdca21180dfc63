"""`ds_serve MODEL`: serve a model over HTTP as OpenAI's service does."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import socket
import stat
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

from deepspeed.errors import DeepSpeedError, UsageError
from deepspeed.log import logger
from deepspeed.trust import read_regular

if TYPE_CHECKING:
    from fastapi import FastAPI

    from deepspeed.inference.server.engine import EngineFactory
    from deepspeed.inference.server.service import Service

_DRAIN_SECONDS = 120  # for requests that run when the server is asked to end
_LONGEST_KEYS = 1 << 16
_MODES = ("wf6af16", "w8a16", "w4a16", "fp8")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What `ds_serve` was asked for."""

    model: str
    config: dict[str, Any] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    tp: int = 1
    replicas: int = 1
    dtype: str = "auto"
    max_queue: int = 1024
    api_key_file: str | None = None
    chat_template: str | None = None
    largest_body: int = 32 << 20

    def __post_init__(self) -> None:
        for name in ("tp", "replicas", "max_queue"):
            if getattr(self, name) < 1:
                raise UsageError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.port < 1 << 16:
            raise UsageError(f"--port is {self.port}; it must be 0 to 65535")


def parser() -> argparse.ArgumentParser:
    """The flags."""
    made = argparse.ArgumentParser("ds_serve", description="Serve a model over HTTP, as OpenAI's service does.")
    made.add_argument("model", metavar="MODEL", help="folder of a model of Transformers, or its name on the hub")
    made.add_argument("--config", metavar="FILE", help="JSON file with the keys of RaggedInferenceEngineConfig")
    made.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 opens it to other hosts")
    made.add_argument("--port", type=int, default=8000, help="port to listen at; 0 takes a free one")
    made.add_argument(
        "--served-model-name", dest="name", metavar="NAME", help="the model's name for clients; else MODEL"
    )
    made.add_argument("--tp", type=int, default=1, help="ranks that share every layer")
    made.add_argument("--replicas", type=int, default=1, help="engines with the whole model")
    made.add_argument("--dtype", default="auto", help="dtype of the weights; auto: that of the model")
    made.add_argument("--quantization", choices=_MODES, help="hold weights in fewer bits")
    made.add_argument("--max-context", type=int, metavar="TOKENS", help="longest prompt with its answer")
    made.add_argument("--max-queue", type=int, default=1024, help="requests that may wait for their first token")
    made.add_argument("--api-key-file", metavar="FILE", help="file with one key per line, readable by its owner alone")
    made.add_argument("--chat-template", metavar="FILE", help="Jinja file in place of the model's chat template")
    made.add_argument("--draft", metavar="MODEL", help="guess tokens by a smaller model of the same vocabulary")
    return made


def options(words: Sequence[str] | None = None) -> ServeOptions:
    """The options that a command line asks for."""
    given = vars(parser().parse_args(words))
    config = _read_config(given.pop("config"))
    mode, context, draft = (given.pop(name) for name in ("quantization", "max_context", "draft"))
    _override(config, "quantization", quantization_mode=mode)
    _override(config, "state_manager", max_context=context)
    _override(config, "speculative", method="draft" if draft else None, model=draft)
    return ServeOptions(config=config, **given)


def _override(config: dict[str, Any], section: str, **flags: Any) -> None:
    """Set keys of a section to the flags that are given."""
    given = {name: value for name, value in flags.items() if value is not None}
    held = config.get(section) or {}
    if given and not isinstance(held, dict):
        raise UsageError(f"--config: {section} is {held!r}; it must be an object")
    if given:
        config[section] = {**held, **given}


def _read_config(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        found = json.loads(read_regular(path, 1 << 20))
    except ValueError as error:
        raise UsageError(f"--config {path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"--config {path} holds a JSON {type(found).__name__}; it must hold an object")
    if "manager" in found:  # the other name of the section, which a flag may add to
        found["state_manager"] = found.pop("manager")
    return found


def read_keys(path: str) -> list[str]:
    """The keys of a file, which other users must not be able to read."""
    mode = os.stat(path).st_mode
    if mode & 0o077:
        raise UsageError(f"{path} has the mode {stat.filemode(mode)}; only its owner may read keys: chmod 600 {path}")
    keys = read_regular(path, _LONGEST_KEYS).decode().split()
    if not keys:
        raise UsageError(f"{path} has no key; write one per line")
    return keys


def listen(host: str, port: int) -> socket.socket:
    """A socket at the address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except OSError as error:
        made.close()
        raise UsageError(
            f"cannot listen at {host} port {port}: {error.strerror}; choose other --host or --port"
        ) from error
    return made


def serve(wanted: ServeOptions, make: EngineFactory, *, on_ready: Callable[[str], None]) -> int:
    """Serve until a signal or until an engine is lost; the exit code. `on_ready` gets the address."""
    try:
        from deepspeed.inference.server.app import make_app
        from deepspeed.inference.server.engine import EngineOptions
        from deepspeed.inference.server.metrics import Metrics
        from deepspeed.inference.server.replica import Replica
        from deepspeed.inference.server.service import Service
        from deepspeed.inference.server.text import TextModel
    except ModuleNotFoundError as error:
        raise UsageError(f"ds_serve needs {error.name}: pip install 'deepspeed[serve]'") from error
    keys = [] if wanted.api_key_file is None else read_keys(wanted.api_key_file)
    metrics, numbers = Metrics(), itertools.count()
    with listen(wanted.host, wanted.port) as place:
        text = TextModel.load(wanted.model, wanted.chat_template)
        replicas: list[Replica] = []
        before = signal.signal(signal.SIGTERM, _end_the_start)
        try:
            for number in range(wanted.replicas):
                each = EngineOptions(
                    wanted.model, wanted.config, wanted.dtype, ranks=wanted.tp, device=number * wanted.tp
                )
                replicas.append(Replica.start(number, each, make, metrics, numbers))
            ready = [replica.ready() for replica in replicas]
            service = Service(wanted.name or wanted.model, text, replicas, ready[0], metrics, wanted.max_queue)
            app = make_app(service, keys=keys, largest_body=wanted.largest_body)
            _warn_if_open(place, keys)
            asyncio.run(_run(app, service, place, on_ready))
        except BaseException:
            for replica in replicas:
                replica.kill()
            raise
        finally:
            signal.signal(signal.SIGTERM, before)
        for replica in replicas:
            replica.close()
    return int(service.lost)


async def _run(app: FastAPI, service: Service, place: socket.socket, on_ready: Callable[[str], None]) -> None:
    """Answer until a signal or a loss; then what runs is answered to its end, and nothing new."""
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            host, port = place.getsockname()[:2]
            on_ready(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    settings = uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_DRAIN_SECONDS,
    )
    server = Server(settings)

    def end() -> None:
        server.should_exit = True

    service.watch(end)
    for each in (signal.SIGTERM, signal.SIGINT):  # uvicorn raises them again after it has drained
        signal.signal(each, signal.SIG_IGN)
    await server.serve(sockets=[place])


def _end_the_start(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _warn_if_open(place: socket.socket, keys: Sequence[str]) -> None:
    host = place.getsockname()[0]
    if not keys and host not in ("127.0.0.1", "::1"):
        logger.warning("ds_serve listens at %s without keys: every host that reaches it may use it", host)


def _say(address: str) -> None:
    sys.stdout.write(f"ready at {address}\n")
    sys.stdout.flush()


def main(words: Sequence[str] | None = None) -> int:
    """The program `ds_serve`."""
    from deepspeed.inference.server.engine import make_llm

    try:
        return serve(options(words), make_llm, on_ready=_say)
    except (DeepSpeedError, OSError) as error:
        sys.stderr.write(f"ds_serve: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main())
