"""Parts of `gpu_inference.py` that imitate users: requests at once, clients, a server, guesses, rollouts."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import log
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

import deepspeed
from benchmarks.inference_bench import Bench, params, prompts, start, timed
from deepspeed.generate.llm import LLM

__all__ = ["clients", "requests", "rollouts", "serve", "speculation"]

_SPREAD = 0.8  # of the logarithms of chat lengths
_GUESSES = (1, 2)  # right ones in turn: 2.5 tokens a step


def requests(bench: Bench) -> None:
    """256 requests at once, 100 to 1,024 tokens in and out."""
    chosen = random.Random(0)
    low, high = bench.count(100), bench.count(1024)
    asked = [(chosen.randint(low, high), chosen.randint(low, high)) for _ in range(bench.count(256))]
    texts = [prompts(bench, 1, length, seed=9000 + number)[0] for number, (length, _) in enumerate(asked)]
    with LLM(bench.model(), bench.config()) as llm:
        for text, (_, new) in zip(texts, asked, strict=True):
            llm.submit(text, params(new))
        count, hosts = 0, []

        def run() -> None:
            nonlocal count
            while llm.busy:
                count += len(llm.step())
                hosts.append(llm.stats()["host_seconds"])

        seconds = timed(run)
        hosts.sort()
    ours = count / seconds
    bench.row("256 requests, output", ours, steps=len(hosts), host_ms=f"{1000 * hosts[len(hosts) // 2]:.2f}")


def _lengths(bench: Bench, number: int) -> tuple[int, int]:
    """Tokens of a chat's prompt and answer: log-normal, means 220 and 200."""
    chosen = random.Random(number)
    most = 100 if bench.tiny else 2000
    found = (chosen.lognormvariate(log(mean) - _SPREAD**2 / 2, _SPREAD) for mean in (220, 200))
    read, new = (min(most, bench.count(max(1, round(each)))) for each in found)
    return read, new


def clients(bench: Bench) -> None:
    """256 clients of `LLM`, each of which asks again when it is answered."""
    asked, last, between, count = 0, {}, [], 0
    with LLM(bench.model(), bench.config()) as llm:

        def ask() -> None:
            nonlocal asked
            read, new = _lengths(bench, asked)
            last[llm.submit(prompts(bench, 1, read, seed=asked)[0], params(new))] = None
            asked += 1

        for _ in range(bench.count(256)):
            ask()
        warm, begin = time.perf_counter() + (0.2 if bench.tiny else 10), 0.0
        end = warm + (0.5 if bench.tiny else 20)
        while (now := time.perf_counter()) < end:
            tokens = llm.step()
            if now > warm:
                begin = begin or now
                count += len(tokens)
            for token in tokens:
                before = last.get(token.uid)
                if before is not None and now > warm:
                    between.append(now - before)
                last[token.uid] = now
                if token.finish_reason is not None:
                    del last[token.uid]
                    ask()
        rate = count / (time.perf_counter() - begin)
    between.sort()
    late = between[int(0.99 * (len(between) - 1))] if between else 0.0
    bench.row("256 clients, LLM", rate, requests=asked, p99_ms=f"{1000 * late:.1f}")


def serve(bench: Bench) -> None:
    """`ds_serve`: the first token of an idle server, then 256 clients for some time."""
    with tempfile.TemporaryDirectory(dir=bench.args.out) as name:
        folder = Path(name)
        bench.model().save_pretrained(folder)
        bench.drop()  # the server's engine needs the device
        _save_tokenizer(folder, bench.vocabulary)
        (folder / "keys.json").write_text(json.dumps(bench.config()))
        code = "import sys; from deepspeed.inference.server.cli import main; sys.exit(main())"
        words = [sys.executable, "-c", code, name, "--port=0", f"--config={folder / 'keys.json'}"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
            try:
                begin = time.perf_counter()
                assert server.stdout is not None, "it is a pipe"
                address = server.stdout.readline().split()[-1]
                bench.row("ds_serve is ready after", time.perf_counter() - begin, "s")
                asyncio.run(_load(bench, address))
            finally:
                server.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    server.wait(20)
                server.kill()


def _save_tokenizer(folder: Path, vocabulary: int) -> None:
    """A word for each token."""
    from tokenizers import Tokenizer, decoders, models

    made = Tokenizer(models.WordLevel({f"w{at}": at for at in range(vocabulary)}, unk_token="w0"))
    made.decoder = decoders.Metaspace()
    made.save(str(folder / "tokenizer.json"))


async def _load(bench: Bench, address: str) -> None:
    for number in range(3):
        await _ask(address, prompts(bench, 1, bench.count(512), seed=number)[0], 2)
    single = [
        await _ask(address, prompts(bench, 1, bench.count(512), seed=100 + number)[0], 1)
        for number in range(20 if bench.tiny else 100)
    ]
    bench.row("first token by HTTP, median", 1000 * statistics.median(each[0] for each in single), "ms")
    end = time.perf_counter() + (1 if bench.tiny else 30)
    warm = end - (0.7 if bench.tiny else 20)
    moments: list[float] = []
    gaps: list[float] = []

    async def client(number: int) -> None:
        while time.perf_counter() < end:
            read, new = _lengths(bench, number)
            _, times = await _ask(address, prompts(bench, 1, read, seed=number)[0], new)
            moments.extend(times)
            gaps.extend(after - before for before, after in itertools.pairwise(times) if before > warm)
            number += 1000

    running = [asyncio.create_task(client(number)) for number in range(bench.count(256))]
    await asyncio.gather(*running)
    within = [each for each in moments if warm < each < end]
    bench.row("256 clients, ds_serve", len(within) / (end - warm))
    gaps.sort()
    bench.row("between tokens by HTTP, p99", 1000 * gaps[int(0.99 * (len(gaps) - 1))] if gaps else 0.0, "ms")


async def _ask(address: str, prompt: list[int], new: int) -> tuple[float, list[float]]:
    """Stream a completion: (seconds until its first token, when each token came)."""
    place = urlsplit(address)
    keys = {"prompt": prompt, "max_tokens": new, "stream": True, "temperature": 0, "ignore_eos": True}
    body = json.dumps(keys).encode()
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=1 << 20)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n"
    begin = time.perf_counter()
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
    times: list[float] = []
    while line := await reader.readline():
        if line.startswith(b"HTTP/") and b" 200 " not in line:
            raise RuntimeError(f"ds_serve answers {line!r}: {(await reader.read())[-500:]!r}")
        if line.startswith(b"data: {") and b'"text":""' not in line and b'"text": ""' not in line:
            times.append(time.perf_counter())
    writer.close()
    if not times:
        raise RuntimeError("ds_serve gave no token")
    return times[0] - begin, times


class _Oracle:
    """Guesses of which so many are right: it has seen the texts that follow."""

    def __init__(self, texts: Mapping[tuple[int, ...], list[int]], vocabulary: int) -> None:
        self._texts, self._vocabulary = texts, vocabulary
        self._turn = 0

    def propose(self, sequences: Sequence[Any], seeds: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        found = {}
        for each in sequences:
            prompt = tuple(each.tokens[: each.prompt_length])
            at = len(each.tokens) - each.prompt_length
            right = _GUESSES[self._turn % len(_GUESSES)]
            self._turn += 1
            guesses = self._texts[prompt][at : at + 4]
            found[each.uid] = guesses[:right] + [(token + 1) % self._vocabulary for token in guesses[right:]]
        return found

    def forget(self, uid: int) -> None:
        pass


def speculation(bench: Bench) -> None:
    """One sequence with guesses of which 2.5 tokens a step come, beside the same one without."""
    new = bench.count(400, 20)
    prompt = prompts(bench, 1, bench.count(512), seed=3)[0]
    model, rates = bench.model(), []
    with torch.no_grad():  # a next token that is far more probable than others: rounding must not change the text
        model.lm_head.weight.copy_(model.model.embed_tokens.weight.normal_(0.0, 4.0).roll(1, 0))
    with LLM(model, bench.config()) as llm:
        for _ in range(2):
            seconds = timed(lambda: llm.generate(prompt, params(new), progress=False))
        text = llm.generate(prompt, params(new + 8), progress=False)[0].token_ids
        rates.append(new / seconds)
    with LLM(model, bench.config(), speculative={"method": "ngram", "tokens": 4}) as llm:
        oracle = _Oracle({tuple(prompt): text}, bench.vocabulary)
        llm._parts.loop._drafter = oracle
        for _ in range(2):
            before = llm.stats()
            seconds = timed(lambda: llm.generate(prompt, params(new), progress=False))
        steps = llm.stats()["steps"] - before["steps"]
        rates.append(new / seconds)
    facts = {"without": f"{rates[0]:.1f}", "with": f"{rates[1]:.1f}", "tokens_a_step": f"{new / steps:.2f}"}
    bench.row("speculation, times as fast", rates[1] / rates[0], "×", **facts)


def rollouts(bench: Bench) -> None:
    """`generate` of an engine that trains, beside `LLM` alone with the same model; then a switch and back."""
    batch, new = (2, 8) if bench.tiny else (32, 128)
    ids = torch.tensor(prompts(bench, batch, bench.count(512), seed=8), device=bench.device)
    model = bench.model()
    with LLM(model, bench.config(max_ragged_sequence_count=max(batch, 4))) as llm:
        start(bench, llm, batch, new, seed=1)
        while llm.busy:
            llm.step()
        alone = timed(lambda: llm.generate(ids.tolist(), params(new), progress=False))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
        "bf16": {"enabled": not bench.tiny},
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "hybrid_engine": {"enabled": True, "max_out_tokens": ids.shape[1] + new, "enable_cuda_graph": True},
    }
    engine = deepspeed.initialize(model=model, config=config)[0]
    try:

        def run() -> None:
            engine.eval()
            engine.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0)

        first = timed(run)
        seconds = timed(run)
        engine.train()
        engine.backward(engine(input_ids=ids[:1], labels=ids[:1]).loss)
        engine.step()
        switched = timed(run)
    finally:
        engine.destroy()
        bench.drop()
    facts = {"first_s": f"{first:.1f}", "switch_s": f"{max(0.0, switched - seconds):.2f}"}
    bench.row("rollouts, part of LLM", alone / seconds, "×", tokens=f"{batch * new / seconds:.0f}/s", **facts)
