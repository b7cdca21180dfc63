"""What `ds_serve` adds to an engine: one that only counts answers 256 streams, then single requests."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benchmarks.case import Case, Job, Measure, Target

CASE = Case(
    name="serving",
    title="ds_serve without a model: 256 streams of 200 tokens, then single requests of 512 tokens",
    file=__file__,
    measures=(
        Measure("token_us", "HTTP process, each token", "µs", targets=(Target(80.0),)),
        Measure("engine_us", "engine process, each token", "µs"),
        Measure("tokens", "output", "tokens/s", better="higher", targets=(Target(10_000.0),)),
        Measure("request_ms", "HTTP process, each request", "ms"),
        Measure("first_ms", "first token, idle, median", "ms", targets=(Target(10.0),)),
    ),
    contenders=("ours",),
    rounds=3,
)
STREAMS, NEW, PROMPT = 256, 200, 220
SINGLE = 512  # tokens of the prompt of a single request
STEP = 0.02  # seconds: 12,800 tokens/s at most
WORDS = [first + second for first, second in itertools.product("bcdfgklmnprst", ("a", "en", "i", "ol", "us"))]


class Token(NamedTuple):
    """As `Token` of `LLM`."""

    uid: int
    index: int
    id: int
    text: str
    logprob: float | None
    top_logprobs: None
    finish_reason: str | None
    cached_tokens: int
    prompt_tokens: int
    prompt_scores: tuple[()] = ()


class Counter:
    """An engine that gives every request its next number as a token; a step of several takes as long as a GPU's."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._uids = itertools.count()
        self._open: dict[int, list[int]] = {}  # uid → tokens given, tokens wanted, prompt

    def submit(self, prompt: Any, params: Any, *, priority: int = 0) -> int:
        uid = next(self._uids)
        self._open[uid] = [0, params.max_tokens, len(prompt)]
        return uid

    def step(self) -> list[Token]:
        time.sleep(STEP if len(self._open) > 1 else 0)
        found = []
        for uid, state in self._open.items():
            state[0] += 1
            reason = "length" if state[0] == state[1] else None
            token = (uid + state[0]) % self._vocabulary
            found.append(Token(uid, 0, token, "", None, None, reason, 0, state[2]))
        for token in found:
            if token.finish_reason is not None:
                del self._open[token.uid]
        return found

    def cancel(self, uid: int) -> None:
        self._open.pop(uid, None)

    def stats(self) -> dict[str, Any]:
        return {"running": len(self._open), "waiting": 0}

    def close(self) -> None:
        self._open.clear()


def make_counter(options: Any) -> Any:
    """As `ds_serve` makes its engine."""
    from deepspeed.inference.server.engine import Ready

    return Counter(len(WORDS)), Ready(len(WORDS), 4096)


def serve(folder: str) -> int:
    """`ds_serve` with that engine."""
    from benchmarks.cases import serving  # a name by which the engine's process finds it
    from deepspeed.inference.server import cli

    return cli.serve(cli.options([folder, "--port=0"]), serving.make_counter, on_ready=cli._say)


def save_tokenizer(folder: Path) -> None:
    """A token for each word."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token=WORDS[0]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Whitespace(), decoders.Metaspace()
    made.save(str(folder / "tokenizer.json"))


async def ask(address: str, length: int, new: int) -> float:
    """Stream a completion; the seconds until its first token."""
    place = urlsplit(address)
    body = json.dumps({"prompt": " ".join((WORDS * 9)[:length]), "max_tokens": new, "stream": True}).encode()
    reader, writer = await asyncio.open_connection(place.hostname, place.port)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    )
    begin = time.perf_counter()
    writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
    seen = await reader.readuntil(b"data: ")
    first = time.perf_counter() - begin
    while part := await reader.read(1 << 16):
        seen = seen[-64:] + part
    writer.close()
    assert b"[DONE]" in seen, seen
    return first


def cpu_seconds(pid: int) -> float:
    """What a process used so far."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


async def load(address: str, http: int, engine: int) -> dict[str, float]:
    """Every figure."""
    await asyncio.gather(*(ask(address, PROMPT, 20) for _ in range(16)))
    before, begin = (cpu_seconds(http), cpu_seconds(engine)), time.perf_counter()
    await asyncio.gather(*(ask(address, PROMPT, NEW) for _ in range(STREAMS)))
    took, after = time.perf_counter() - begin, (cpu_seconds(http), cpu_seconds(engine))
    await asyncio.sleep(0.2)
    idle = cpu_seconds(http)
    firsts = [await ask(address, SINGLE, 1) for _ in range(50)]
    count = STREAMS * NEW
    return {
        "token_us": 1e6 * (after[0] - before[0]) / count,
        "engine_us": 1e6 * (after[1] - before[1]) / count,
        "tokens": count / took,
        "request_ms": 1e3 * (cpu_seconds(http) - idle) / len(firsts),
        "first_ms": 1e3 * statistics.median(firsts),
    }


def measure(job: Job) -> dict[str, float]:
    """Start a server and ask it."""
    save_tokenizer(Path(job.folder))
    program = [sys.executable, "-c", f"from benchmarks.cases import serving; serving.serve({job.folder!r})"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None, "it is a pipe"
            address = server.stdout.readline().split()[-1]
            children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
            engine = next(
                int(pid)
                for pid in children
                if not re.search("resource_tracker", Path(f"/proc/{pid}/cmdline").read_text())
            )
            return asyncio.run(load(address, server.pid, engine))
        finally:
            server.send_signal(signal.SIGTERM)
