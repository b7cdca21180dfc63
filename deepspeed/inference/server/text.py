"""`TextModel`: a model's tokenizer and chat template, from its files, without torch and without code of others."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed.errors import UsageError, printable
from deepspeed.inference.server.refusal import RequestRefused
from deepspeed.trust import read_regular

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer

_LARGEST = 1 << 28
_LONGEST_TEMPLATE = 1 << 20
# The letter that stands for each byte in byte-level tokenizers: visible bytes themselves, others from 256 on.
_VISIBLE = (*range(33, 127), *range(161, 173), *range(174, 256))
_BYTE_LETTERS = {chr(byte): byte for byte in _VISIBLE} | {
    chr(256 + at): byte for at, byte in enumerate(byte for byte in range(256) if byte not in _VISIBLE)
}
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")


class TextModel:
    """Text to tokens, messages to text, tokens to text."""

    def __init__(self, tokenizer: Tokenizer, special: Mapping[str, str], template: str | None) -> None:
        self.tokenizer = tokenizer
        self._special = dict(special)
        self._template = None if template is None else compile_template(template)
        self.bytes_of = lru_cache(65_536)(self._bytes_of)

    @classmethod
    def load(cls, model: str, template: str | None = None) -> TextModel:
        """From a model's folder, or by Transformers for a name or a folder without `tokenizer.json`.

        `template`: a file with another chat template.
        """
        own = None if template is None else _text(Path(template), _LONGEST_TEMPLATE)
        folder = Path(model)
        if not (folder / "tokenizer.json").is_file():
            return cls._by_transformers(model, own)
        from tokenizers import Tokenizer

        made = Tokenizer.from_str(_text(folder / "tokenizer.json", _LARGEST))
        config = _json(folder / "tokenizer_config.json")
        special = {**_json(folder / "special_tokens_map.json"), **config}
        of_file = folder / "chat_template.jinja"
        if own is None:
            own = _text(of_file, _LONGEST_TEMPLATE) if of_file.is_file() else _default(config.get("chat_template"))
        return cls(made, {name: _content(special[name]) for name in _SPECIAL if special.get(name)}, own)

    @classmethod
    def _by_transformers(cls, model: str, template: str | None) -> TextModel:
        from transformers import AutoTokenizer

        if not Path(model).is_dir() and (Path(model).is_absolute() or model.startswith(".")):
            raise UsageError(f"there is no folder {model}; give the folder of a model, or its name on the hub")
        try:
            found = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise UsageError(f"{model} has no tokenizer that can be loaded: {printable(error, 500)}") from error
        inner = getattr(found, "backend_tokenizer", None)
        if inner is None:
            raise UsageError(
                f"the tokenizer of {model} is {type(found).__name__}, for which there is no tokenizer.json"
            )
        special = {name: str(value) for name in _SPECIAL if (value := getattr(found, name, None)) is not None}
        return cls(inner, special, _default(found.chat_template) if template is None else template)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The tokens of a text; `special`: with those that begin and end a sequence."""
        return list(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return self.tokenizer.decode(list(tokens))

    def token_text(self, token: int) -> str:
        """The text of one token: special ones by their name, bytes that are a part of a character as `\\xf0`."""
        return self.bytes_of(token).decode("utf-8", "backslashreplace")

    def _bytes_of(self, token: int) -> bytes:
        """The bytes of one token: a character may take several tokens."""
        name = self.tokenizer.id_to_token(token)
        if name is None:
            return b""
        if token in self.tokenizer.get_added_tokens_decoder():
            return name.encode()
        if name.startswith("<0x") and len(name) == 6:
            return bytes([int(name[3:5], 16)])
        if self._by_bytes and all(letter in _BYTE_LETTERS for letter in name):
            return bytes(_BYTE_LETTERS[letter] for letter in name)
        return name.replace("▁", " ").encode()

    @property
    def _by_bytes(self) -> bool:
        return "ByteLevel" in repr(self.tokenizer.decoder)

    def render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> str:
        """The prompt for a conversation; RequestRefused if the template cannot take it."""
        if self._template is None:
            raise RequestRefused(
                400, "this model has no chat template; use /v1/completions, or start the server with --chat-template"
            )
        from jinja2 import TemplateError

        given = {"add_generation_prompt": True, **self._special, **options, "messages": messages}
        try:
            return self._template.render(given)
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise RequestRefused(400, f"the chat template refuses these messages: {error}", param="messages") from error


def compile_template(source: str) -> Template:
    """A chat template in a sandbox: it can neither change objects nor reach their internals."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what an assistant says, for training; here it is what it contains."""

        tags = {"generation"}  # noqa: RUF012  # as Extension has it

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def as_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = as_json  # without the escapes for HTML
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise UsageError(f"the chat template is not a Jinja template: {printable(error, 500)}") from error


def _default(template: Any) -> str | None:
    """Of several named templates the one named default."""
    if isinstance(template, list):
        template = {each["name"]: each["template"] for each in template}
    return template.get("default") if isinstance(template, Mapping) else template


def _content(token: Any) -> str:
    return str(token["content"] if isinstance(token, Mapping) else token)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(_text(path, _LARGEST))
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    return found if isinstance(found, dict) else {}


def _text(path: Path, limit: int) -> str:
    try:
        return read_regular(path, limit).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not text in UTF-8: {error}") from error
