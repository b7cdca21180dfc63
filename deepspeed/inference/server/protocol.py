"""Bodies of requests in OpenAI's format: what they may hold, and the `SamplingParams` that they become."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from deepspeed.errors import UsageError
from deepspeed.generate.params import SamplingParams
from deepspeed.inference.server.refusal import RequestRefused

MOST_STOPS = 64
_NOT_SERVED = {
    "audio": "this server returns text",
    "function_call": "this server calls no tools",
    "functions": "this server calls no tools",
    "modalities": "this server returns text",
    "moderation": "this server moderates nothing",
    "prediction": "start the server with --draft instead",
    "reasoning_effort": "give the variables of the model's own template in chat_template_kwargs",
    "suffix": "models that fill gaps are not served",
    "tool_calls": "this server calls no tools",
    "tool_choice": "this server calls no tools",
    "tools": "this server calls no tools",
    "verbosity": "say in the messages how long the answer should be",
    "web_search_options": "this server searches nothing",
}


class _Body(BaseModel):
    """Fields have the types of JSON, and no others are allowed."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, value: Any) -> Any:
        """Clients send null for what was not given, in fields of later versions too."""
        return {k: v for k, v in value.items() if v is not None} if isinstance(value, Mapping) else value


class StreamOptions(_Body):
    """What a stream says beside its text."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class JsonSchemaFormat(_Body):
    """A JSON schema that the text follows."""

    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Body):
    """The form of the text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @property
    def schema_or_none(self) -> Mapping[str, object] | None:
        """The JSON schema that the text must follow."""
        if self.type == "json_object":
            return {"type": "object"}
        return self.json_schema.schema_ if self.json_schema is not None else None

    @model_validator(mode="after")
    def _has_a_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError(f"json_schema is given with type 'json_schema', and only then; found type {self.type!r}")
        return self


class _SampledBody(_Body):
    """What both kinds of completions take. Checks of ranges are those of `SamplingParams`."""

    model: str | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[Annotated[int, Field(strict=False)], float] | None = None  # JSON has keys of text
    n: int = 1
    seed: int | None = None
    stop: str | list[str] = Field(default=[], max_length=10_000)
    stop_token_ids: list[int] = Field(default=[], max_length=1000)
    min_tokens: int = 0
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    priority: int = 0
    return_token_ids: bool = False
    user: str | None = None  # whom the client serves; nothing depends on it

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> _SampledBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is given without stream; set stream to true")
        if not isinstance(self.stop, str) and len(self.stop) > MOST_STOPS:
            raise ValueError(f"stop has {len(self.stop)} strings; at most {MOST_STOPS} are allowed")
        return self

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(
        self, max_tokens: int | None, logprobs: int | None, *, prompt_logprobs: int | None = None
    ) -> SamplingParams:
        """How the engine samples; RequestRefused where a value cannot work."""
        try:
            return SamplingParams(
                **{name: getattr(self, name) for name in _SAMPLED},
                max_tokens=max_tokens,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
                schema=None if self.response_format is None else self.response_format.schema_or_none,
            )
        except UsageError as error:
            message = str(error).removeprefix("SamplingParams: ")
            raise RequestRefused(400, message, param=message.split(" ")[0].split("[")[0]) from error


_SAMPLED = _SampledBody.model_fields.keys() & {each.name for each in fields(SamplingParams)}


class CompletionRequest(_SampledBody):
    """The body of `/v1/completions`."""

    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = None
    max_length: int | None = None  # tokens of a prompt and its answer, where max_tokens is not given
    logprobs: int | None = None
    echo: bool = False
    best_of: int | None = None

    @model_validator(mode="after")
    def _best_is_all(self) -> CompletionRequest:
        if self.best_of not in (None, self.n):
            raise ValueError(f"best_of is {self.best_of}; this server returns all n = {self.n} texts, so leave it out")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens is 0; without echo it must be at least 1")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Every prompt, as text or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]  # its first item says what the others are
        return self.prompt  # type: ignore[return-value]

    def params(self) -> SamplingParams:
        """How the engine samples. Without new tokens one is sampled, and left out of the answer."""
        scored = self.logprobs if self.echo else None
        return self.sampling(1 if self.max_tokens == 0 else self.max_tokens, self.logprobs, prompt_logprobs=scored)


class TextPart(_Body):
    """A part of a message."""

    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] = ""
    name: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None  # clients send back what they received

    def plain(self) -> dict[str, Any]:
        """As chat templates read it."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content} | ({} if self.name is None else {"name": self.name})


class ChatRequest(_SampledBody):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] = {}
    # of OpenAI's service; no text depends on them
    metadata: dict[str, str] | None = None
    modalities: list[Literal["text"]] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    tool_choice: Literal["none", "auto"] | None = None
    tools: Annotated[list[Any], Field(max_length=0)] = []

    @model_validator(mode="after")
    def _fields_agree(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is given without logprobs; set logprobs to true")
        if "messages" in self.chat_template_kwargs:
            raise ValueError("chat_template_kwargs has 'messages', which the template gets from messages; remove it")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise ValueError(f"max_tokens is {both[0]} and max_completion_tokens {both[1]}; give one of them")
        return self

    def params(self) -> SamplingParams:
        """How the engine samples."""
        most = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        return self.sampling(most, (self.top_logprobs or 0) if self.logprobs else None)


B = TypeVar("B", CompletionRequest, ChatRequest)


def parse(kind: type[B], data: bytes) -> B:
    """The request in a body; RequestRefused names the field that is wrong."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise _refusal(kind, error) from error


def _refusal(kind: type[BaseModel], error: ValidationError) -> RequestRefused:
    """About the first problem; of a field with several types, the first that goes deepest."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    first = problems[0]
    if first["type"] == "json_invalid":
        return RequestRefused(400, f"the body is not a JSON object in UTF-8: {first['msg']}", code="invalid_json")
    if not first["loc"]:
        return RequestRefused(400, first["msg"].removeprefix("Value error, "))
    field = str(first["loc"][0])
    if field in _NOT_SERVED or field not in kind.model_fields:
        return RequestRefused(400, _unknown(field, tuple(kind.model_fields)), param=field, code="unknown_field")
    deepest = max((each for each in problems if each["loc"][0] == field), key=lambda each: len(each["loc"]))
    path = _path(deepest)
    if deepest["type"] == "extra_forbidden":
        return RequestRefused(400, _unknown(str(deepest["loc"][-1]), ()), param=path)
    return RequestRefused(400, _sentence(path, [each for each in problems if _path(each) == path]), param=path)


def _path(problem: Any) -> str:
    """Where it is, without the types that were tried."""
    steps = (str(part) for part in problem["loc"])
    return ".".join(each for each in steps if each not in ("str", "[key]") and not each.startswith("list["))


def _unknown(field: str, known: tuple[str, ...]) -> str:
    if field in _NOT_SERVED:
        return f"{field} is not supported: {_NOT_SERVED[field]}"
    near = get_close_matches(field, known, 1)
    return f"unknown field {field!r}" + (f"; did you mean {near[0]!r}?" if near else "; remove it")


def _sentence(path: str, problems: list[Any]) -> str:
    if problems[0]["type"] == "missing":
        return f"{path} is missing"
    wanted = dict.fromkeys(each["msg"].removeprefix("Value error, ") for each in problems)
    return f"{path}: {', or '.join(list(wanted)[:3])}"
