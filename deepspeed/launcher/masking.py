"""What looks like a secret in a command line or a variable, masked before a person or a log file sees it.

A name decides: that of an option, a variable, a key of JSON or of a URL's query. Masking too much costs a look at the
script; masking too little costs a key.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

__all__ = ["MASK", "is_secret", "scrub", "without_secrets"]

MASK = "********"

# Anywhere in a name, or only as its end: `max_tokens`, `key_dim` and `author` are no secrets.
_ANYWHERE = r"secret|passw(?:or)?d|passphrase|credential|api[-_.]?key|authorization"
_AT_THE_END = r"key|token|auth|pass|pwd|creds?|cookie|bearer|sig|signature|sas|pat|jwt"
_SECRET_NAME = re.compile(rf"{_ANYWHERE}|(?:{_AT_THE_END})[-_]?\d*$", re.IGNORECASE)

_NAME = r"(?<![\w.\-])\w[\w.\-]*"  # from its beginning: long words would otherwise be tried from every letter
_VALUE = r"""(?:"[^"]*"|'[^']*'|[^\s"'&;,|]+)"""
# A name with what leads from it to its value, and the value. They are looked for one after the other: the value of a
# name that is no secret may hold a pair itself.
_PAIRS = [
    (re.compile(lead), re.compile(value, re.IGNORECASE))
    for lead, value in (
        (rf"{_NAME}=", _VALUE),
        (rf"""["']{_NAME}["']\s*:\s*""", r""""[^"]*"|'[^']*'|[^\s,}\]]+"""),
        (r"(?<!\S)--?\w[\w.\-]*\s+", rf"(?!--){_VALUE}"),
        (rf"{_NAME}:\s*", rf"(?:(?:bearer|basic|token)\s+)?{_VALUE}"),
    )
]
_BEARER = re.compile(r"(\bbearer\s+)\S+", re.IGNORECASE)
_KNOWN = re.compile(r"\b(?:hf_|sk-|gh[oprsu]_|github_pat_|glpat-|AKIA|xox[abprs]-|AIza)[\w-]{8,}")
_USER_AND_PASSWORD = re.compile(r"(://[^/@:]*:).*", re.DOTALL)
_ONLY_USER = re.compile(r"(https?://)[^/@\s:]+@", re.IGNORECASE)
_ANY_OPTION = re.compile(r"--[A-Za-z]")


def is_secret(name: str) -> bool:
    """True if what has this name should not be seen: `--wandb_api_key`, `HF_TOKEN`, `auth`."""
    return _SECRET_NAME.search(name) is not None


def without_secrets(words: Sequence[str]) -> list[str]:
    """A command for people: of every word what may be seen, and nothing of a word that follows a secret's option."""
    shown: list[str] = []
    awaited = False
    for word in words:
        if awaited and not _ANY_OPTION.match(word):
            shown.append(MASK)
            awaited = False
            continue
        shown.append(scrub(word))
        awaited = word.startswith("-") and "=" not in word and is_secret(word)
    return shown


def scrub(text: str) -> str:
    """The text without passwords of URLs, values of secret names, and keys of well-known shapes."""
    name, sign, value = text.partition("=")
    if sign and value and re.fullmatch(r"[-+~]*\w[\w.\-]*", name) and is_secret(name):
        return f"{name}={MASK}"  # the whole word, whatever the value is made of
    text = _ONLY_USER.sub(rf"\1{MASK}@", re.sub(r"\S+", _without_password, text))
    for lead, pattern in _PAIRS:
        text = _masked(text, lead, pattern)
    return _KNOWN.sub(MASK, _BEARER.sub(rf"\1{MASK}", text))


def _without_password(word: re.Match[str]) -> str:
    """A URL's password ends at the last @ of the word: people do not escape the ones in it."""
    before, at, after = word[0].rpartition("@")
    return _USER_AND_PASSWORD.sub(rf"\1{MASK}", before) + at + after


def _masked(text: str, lead: re.Pattern[str], pattern: re.Pattern[str]) -> str:
    parts, done, at = [], 0, 0
    while found := lead.search(text, at):
        at = found.end()
        if is_secret(found[0].strip(" \t\n\"'=:")) and (value := pattern.match(text, at)):
            parts += [text[done:at], MASK]
            done = at = value.end()
    return "".join([*parts, text[done:]])
