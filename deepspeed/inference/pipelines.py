"""`pipeline`: a model in this process, called with prompts as in DeepSpeed-MII; other tasks as in Transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from typing import Any

from deepspeed.errors import UsageError, printable
from deepspeed.generate.params import SamplingParams

TEXT_GENERATION = "text-generation"
_FIELDS = frozenset(each.name for each in fields(SamplingParams))
_RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "num_return_sequences": "n"}
_SWITCH = (bool, "true or false")
_KINDS = (("do_sample", *_SWITCH), ("return_full_text", *_SWITCH), ("max_length", Integral, "a whole number"))
_MAX_LENGTH = 1024  # tokens of prompt and answer, and the most probable part below, as in DeepSpeed-MII
_TOP_P = 0.9


@dataclass(frozen=True, slots=True)
class Response:
    """One generated text; `str` and `repr` are the text."""

    generated_text: str
    prompt_length: int
    generated_length: int
    finish_reason: str

    def __repr__(self) -> str:
        return self.generated_text


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """The arguments of a call: fields of `SamplingParams`, and what depends on the prompt."""

    sampling: Mapping[str, Any]
    max_length: int | None
    full_text: bool

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> GenerateOptions:
        """Arguments by DeepSpeed-MII's names or by those of `SamplingParams`."""
        given = {name: value for name, value in given.items() if value is not None}
        twice = next((name for name in given if _RENAMED.get(name) in given), None)
        if twice is not None:
            raise UsageError(f"{twice} and {_RENAMED[twice]} mean the same; give one of them")
        for name, kind, wanted in _KINDS:
            if not isinstance(given.get(name, True), kind):
                raise UsageError(f"{name} is {printable(repr(given[name]), 100)}; it must be {wanted}")
        found = {_RENAMED.get(name, name): value for name, value in given.items()}
        full_text, max_length = found.pop("return_full_text", False), found.pop("max_length", None)
        if not found.pop("do_sample", True):
            found["temperature"] = 0.0
        unknown = sorted(found.keys() - _FIELDS)
        if unknown:
            known = ", ".join(sorted({*_FIELDS, *_RENAMED, "max_length", "do_sample", "return_full_text"}))
            raise UsageError(f"generation has no argument {unknown[0]!r}; it has {known}")
        if "max_tokens" not in found and max_length is None:
            max_length = _MAX_LENGTH
        return cls({"top_p": _TOP_P, **found}, None if "max_tokens" in found else max_length, full_text)

    def params(self, prompt_length: int) -> SamplingParams:
        """For a prompt of so many tokens."""
        if self.max_length is None:
            return SamplingParams(**self.sampling)
        if prompt_length >= self.max_length:
            raise UsageError(
                f"the prompt has {prompt_length} tokens and max_length is {self.max_length}; raise it, or give "
                "max_new_tokens"
            )
        return SamplingParams(**{**self.sampling, "max_tokens": self.max_length - prompt_length})


def texts_of(prompts: object) -> list[str]:
    """One prompt or several, as a list."""
    listed: list[Any] = [prompts] if isinstance(prompts, str) or not isinstance(prompts, Iterable) else list(prompts)
    if not all(isinstance(each, str) for each in listed):
        raise UsageError(f"prompts are a text or several texts; found {printable(repr(prompts), 100)}")
    return listed


class Pipeline:
    """Generates texts; `destroy` frees the model."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._llm.tokenizer

    def __call__(self, prompts: str | Sequence[str], **params: Any) -> list[Response]:
        """A response for each prompt, or `n` for each in turn; `params` as `GenerateOptions.read` takes them."""
        texts = texts_of(prompts)
        if self.tokenizer is None:
            raise UsageError("a pipeline takes text, and this model has no tokenizer; pass tokenizer=… to pipeline()")
        options = GenerateOptions.read(params)
        tokens = [self.tokenizer(text)["input_ids"] for text in texts]
        made = self._llm.generate(tokens, [options.params(len(each)) for each in tokens], progress=False)
        count = int(options.sampling.get("n", 1))
        return [
            Response(
                (texts[at // count] if options.full_text else "") + each.text,
                len(each.prompt_token_ids),
                len(each.token_ids),
                each.finish_reason,
            )
            for at, each in enumerate(made)
        ]

    def destroy(self) -> None:
        """Free the model and its cache."""
        self._llm.close()


class TaskPipeline:
    """A pipeline of Transformers whose model is an inference engine."""

    def __init__(self, made: Any) -> None:
        self._made = made

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """What Transformers' pipeline returns."""
        return self._made(*inputs, **options)

    def destroy(self) -> None:
        """Free the model."""
        self._made.model.destroy()
        self._made = None


def pipeline(model: Any, task: str = TEXT_GENERATION, **keys: Any) -> Pipeline | TaskPipeline:
    """A model that is called with its inputs; `model` is a path or a name.

    Text generation takes the arguments of `LLM`, every other task those of `init_inference`.
    """
    if task == TEXT_GENERATION:
        from deepspeed.generate.llm import LLM

        return Pipeline(LLM(model, **keys))
    import transformers

    from deepspeed.inference.engine import init_inference

    make: Any = transformers.pipeline  # overloaded for each task
    made = make(task, model=model, trust_remote_code=False)
    made.model = init_inference(made.model, **keys)
    return TaskPipeline(made)
