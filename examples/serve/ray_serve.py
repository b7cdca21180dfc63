"""Serve a model on several hosts with Ray Serve: each replica is a `ds_serve` of its host, behind one address.

python examples/serve/ray_serve.py served-model --replicas 2 --gpus 1

Ray places the replicas, starts them again when they end, and spreads the requests. Bodies pass unchanged, so clients
of OpenAI see what a single `ds_serve` answers.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import signal
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
from ray import serve
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

DROPPED = {"host", "content-length", "connection", "transfer-encoding"}  # of one connection alone


def end_with_parent() -> None:
    """Let Linux send SIGTERM to this process when its parent ends, however that is."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


@serve.deployment(health_check_period_s=2)
class Replica:
    """Starts `ds_serve` and passes requests to it."""

    async def __init__(self, model: str, words: list[str]) -> None:
        program = [sys.executable, "-m", "deepspeed.inference.server.cli", model, "--port=0", *words]
        self._process = await asyncio.create_subprocess_exec(
            *program, stdout=asyncio.subprocess.PIPE, preexec_fn=end_with_parent
        )
        assert self._process.stdout is not None, "it is a pipe"
        line = (await self._process.stdout.readline()).decode()
        if not line.startswith("ready at "):
            raise RuntimeError(f"ds_serve {model} did not start; its log has the reason")
        self._client = httpx.AsyncClient(base_url=line.split()[-1], timeout=None)

    async def check_health(self) -> None:
        """Ray starts another replica where this fails."""
        (await self._client.get("/health")).raise_for_status()

    async def __call__(self, request: Request) -> Response:
        headers = {name: value for name, value in request.headers.items() if name not in DROPPED}
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        passed = self._client.build_request(request.method, path, headers=headers, content=await request.body())
        answer = await self._client.send(passed, stream=True)

        async def parts() -> AsyncIterator[bytes]:
            try:
                async for part in answer.aiter_raw():
                    yield part
            finally:  # also of a client that is gone: its request is cancelled
                await answer.aclose()

        kept = {name: value for name, value in answer.headers.items() if name not in DROPPED}
        return StreamingResponse(parts(), answer.status_code, kept)

    def __del__(self) -> None:
        if getattr(self, "_process", None) is not None and self._process.returncode is None:
            self._process.terminate()


def deployment(model: str, replicas: int, gpus: float, words: list[str]) -> Any:
    """What `serve.run` starts."""
    options: Any = Replica.options(num_replicas=replicas, ray_actor_options={"num_gpus": gpus, "num_cpus": 1})
    return options.bind(model, ["--served-model-name=served", *words])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="folder of the model, on every host")
    parser.add_argument("--replicas", type=int, default=1, help="how many, over all hosts")
    parser.add_argument("--gpus", type=float, default=0, help="of each replica")
    parser.add_argument("--port", type=int, default=8000, help="of the address in front of them")
    args, words = parser.parse_known_args()
    serve.start(http_options={"host": "127.0.0.1", "port": args.port})
    serve.run(deployment(args.model, args.replicas, args.gpus, words), route_prefix="/")
    print(f"ready at http://127.0.0.1:{args.port}", flush=True)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        serve.shutdown()


if __name__ == "__main__":
    main()
