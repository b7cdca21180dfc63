"""How text ends: tokens and strings that stop a sequence, and its text as far as it can be shown already."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from deepspeed.generate.params import SamplingParams

_REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no character, or not yet
_INCOMPLETE = 3  # so many at the end may become a character, which has at most four bytes
_WINDOW = 16  # tokens that are decoded again for each new one
_LONGEST_WINDOW = 64  # also if its end never becomes a character


def end_ids(params: SamplingParams, eos: Iterable[int]) -> frozenset[int]:
    """The tokens that end a sequence."""
    return frozenset(params.stop_token_ids).union(() if params.ignore_eos else eos)


class TextStream:
    """The text of a sequence, token by token: the same whether it is read as it grows or at the end.

    Characters of several tokens and what may become a stop string are held back. A stop string is not shown. Strings
    that begin in the first `min_tokens` tokens do not stop.
    """

    def __init__(self, decode: Callable[[list[int]], str], params: SamplingParams) -> None:
        """`decode`: text of tokens, for example `tokenizer.decode` with its options."""
        self._decode = decode
        self._stops = [_StopString(text) for text in params.stop_strings]
        self._min_tokens = params.min_tokens
        self._window: list[int] = []  # the last tokens
        self._complete = 0  # of the window: tokens whose characters are complete
        self._read = 0  # characters of the window's text that were taken from it
        self._held = ""  # the begin of a stop string, perhaps
        self.tokens = 0  # that it took; after a stop the rest is ignored
        self.stopped: str | None = None  # the stop string that was found

    def push(self, tokens: Iterable[int]) -> str:
        """Take tokens; the text that can be shown now."""
        shown = ""
        for token in tokens:
            if self.stopped is not None:
                break
            self.tokens += 1
            shown += self._until_stop(self._text(token))
        return shown

    def flush(self) -> str:
        """What was held back, at the end of the sequence."""
        shown = ""
        if self.stopped is None and self._window:
            shown = self._until_stop(self._decode(self._window)[self._read :])
        if self.stopped is None:
            shown += self._held
        self._window, self._complete, self._read, self._held = [], 0, 0, ""
        return shown

    def _text(self, token: int) -> str:
        """The characters that a token completes."""
        window = self._window
        window.append(token)
        text = self._decode(window)
        held = len(text) - len(text.rstrip(_REPLACEMENT))
        if len(window) - self._complete > _INCOMPLETE:  # else some decoders replace what was complete, too
            held = min(held, _INCOMPLETE)
        ends = len(text) - held
        new = text[self._read : ends]
        if not held and not new and (self._read or len(window) > _LONGEST_WINDOW):
            window.pop()  # it has no text: special tokens
            return ""
        self._read = max(self._read, ends)
        if len(window) >= (_LONGEST_WINDOW if held or not self._complete else _WINDOW):
            self._shorten(held)
        elif not held:
            self._complete = len(window)
        return new

    def _shorten(self, held: int) -> None:
        """Decode fewer tokens from now on: those after the last character that was complete before the newest token.

        Something has to stay, since decoders treat the first text specially: some remove its space.
        """
        self._window = self._window[max(self._complete, len(self._window) - _WINDOW) :]
        self._complete = 0 if held else len(self._window)
        self._read = max(0, len(self._decode(self._window)) - held)

    def _until_stop(self, new: str) -> str:
        """What can be shown of the text held back and of a new one."""
        if not self._stops:
            return new
        if self.tokens <= self._min_tokens:
            return new
        text = self._held + new
        for at, character in enumerate(new, len(self._held) + 1):
            found = [stop for stop in self._stops if stop.ends_with(character)]
            if found:
                longest = max((stop.text for stop in found), key=len)
                self.stopped, self._held = longest, ""
                return text[: at - len(longest)]
        held = max(stop.matched for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


class _StopString:
    """Finds a string in a text that comes character by character (Knuth, Morris and Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # characters at the end of the text so far that are its begin
        self._shorter = [0]  # for each prefix: the longest begin of the string that is its end, too
        for character in text[1:]:
            self._shorter.append(self._next(character, self._shorter[-1]))

    def ends_with(self, character: str) -> bool:
        """Take a character; whether the string is complete."""
        self.matched = self._next(character, self.matched)
        return self.matched == len(self.text)

    def _next(self, character: str, matched: int) -> int:
        while matched and self.text[matched] != character:
            matched = self._shorter[matched - 1]
        return matched + 1 if self.text[matched] == character else 0
