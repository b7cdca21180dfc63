"""What tests of serving share: a small tokenizer, an engine without a model, and a server in a process of its own."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from deepspeed.generate.sequence import PromptScores, Token
from deepspeed.inference.server.engine import EngineOptions, Ready
from tests.harness import ROOT

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONTEXT = 512
TEXTS = ["the quick brown fox jumps over the lazy dog", "größer als zwölf Häuser 🦊", "hello world, hello again"] * 3


def make_tokenizer() -> Any:
    """Bytes and the merges of a few texts; 0 begins and 1 ends a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS, trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return made


def save_tokenizer(folder: Path) -> Path:
    """The files of a tokenizer with a chat template, as models have them."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False, "rstrip": False, "normalized": False},
        "pad_token": "<pad>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def save_model(folder: Path) -> Path:
    """A small random Llama with that tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=320, num_key_value_heads=2, max_position_embeddings=CONTEXT, bos_token_id=0, eos_token_id=1, **shape
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return save_tokenizer(folder)


class FakeEngine:
    """Repeats the prompt without its first token, one token a step; ends with </s> where the prompt does not go on.

    A prompt that holds <pad> fails as numbers that are not finite do. `pause`: seconds of a step.
    """

    END, PAD, BLOCKS = 1, 2, 64

    def __init__(self, pause: float = 0.0) -> None:
        self.pause = pause
        self.steps = 0
        self.cancelled: list[int] = []
        self.seen: list[tuple[list[int], Any, int]] = []
        self.closed = False
        self._open: dict[int, tuple[list[int], Any, int]] = {}  # prompt, params, tokens given
        self._next = 0
        self._output = 0

    def submit(self, prompt: Any, params: Any, *, priority: int = 0) -> int:
        uid, self._next = self._next, self._next + 1
        self._open[uid] = (list(prompt), params, 0)
        self.seen.append((list(prompt), params, priority))
        return uid

    def step(self) -> list[Token]:
        time.sleep(self.pause)
        self.steps += 1
        found = []
        for uid, (prompt, params, given) in [*self._open.items()]:
            if self.PAD in prompt:
                found += [self._token(uid, index, -1, "error", prompt, params) for index in range(params.n)]
                del self._open[uid]
                continue
            rest = prompt[1:]
            ends = given >= len(rest) and not params.ignore_eos
            token = self.END if ends else rest[given % len(rest)] if rest else self.END
            reason = "stop" if ends else "length" if given + 1 == params.max_tokens else None
            found += [self._token(uid, index, token, reason, prompt, params) for index in range(params.n)]
            if reason is None:
                self._open[uid] = (prompt, params, given + 1)
            else:
                del self._open[uid]
        self._output += len(found)
        return found

    def _token(self, uid: int, index: int, token: int, reason: str | None, prompt: list[int], params: Any) -> Token:
        asked = params.logprobs is not None and token >= 0
        top = {token: -0.5, self.END: -2.0} if params.logprobs else {}
        scores = ()
        if params.prompt_logprobs is not None and index == 0 and self._open[uid][2] == 0:  # in two parts, as of chunks
            tops = [{token: -0.25} if params.prompt_logprobs else {} for token in prompt[1:]]
            scores = PromptScores(1, [-0.25], tops[:1]), PromptScores(2, [-0.25] * (len(prompt) - 2), tops[1:])
        own, tops = (-0.5, top) if asked else (None, None)
        return Token(uid, index, token, "", own, tops, reason, len(prompt) // 2, len(prompt), scores)

    def cancel(self, uid: int) -> None:
        self.cancelled.append(uid)
        self._open.pop(uid, None)

    def stats(self) -> dict[str, Any]:
        return {
            "running": len(self._open),
            "waiting": 0,
            "steps": self.steps,
            "output_tokens": self._output,
            "total_blocks": self.BLOCKS,
            "free_blocks": self.BLOCKS - len(self._open),
        }

    def close(self) -> None:
        self.closed = True


def make_fake(options: EngineOptions) -> tuple[FakeEngine, Ready]:
    """As a server makes its engine; `options.config` has the arguments."""
    if options.config.get("broken"):
        raise ValueError("this model cannot be loaded")
    return FakeEngine(options.config.get("pause", 0.0)), Ready(320, CONTEXT, frozenset({FakeEngine.END}))


class Served:
    """A server in a process of its own, ended with its block; `words` are those of `ds_serve` after the model."""

    def __init__(self, model: Path, *words: str, fake: bool = False) -> None:
        module = "tests.serving" if fake else "deepspeed.inference.server.cli"
        program = [sys.executable, "-m", module, str(model), "--port=0", *words]
        self.process = subprocess.Popen(
            program, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        self.address = ""

    def __enter__(self) -> Served:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        line = self.process.stdout.readline()
        if not line.startswith("ready at "):
            self.process.kill()
            raise RuntimeError(self.process.stderr.read())
        self.address = line.split()[-1]
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
            raise

    def children(self) -> list[int]:
        """The processes that it started, as numbers."""
        found = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self.process.pid)], capture_output=True, text=True, check=False
        )
        return [int(word) for word in found.stdout.split()]

    def open_requests(self) -> int:
        """Requests that are being answered."""
        with urllib.request.urlopen(f"{self.address}/metrics") as answer:
            return int(re.search(r"^deepspeed_requests_open (\d+)$", answer.read().decode(), re.MULTILINE)[1])

    def engines(self) -> list[int]:
        """Its engines; the other child is the tracker of multiprocessing."""
        return [pid for pid in self.children() if "resource_tracker" not in _command(pid)]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def main() -> int:
    """`ds_serve` with the engine without a model."""
    from deepspeed.inference.server import cli

    return cli.serve(cli.options(sys.argv[1:]), make_fake, on_ready=cli._say)


if __name__ == "__main__":
    from tests import serving  # whose functions another process can import by name

    sys.exit(serving.main())
