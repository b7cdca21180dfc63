"""Text of tokens as it grows: characters of several tokens, stop strings over token borders."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from random import Random

import pytest
from tokenizers import Tokenizer, decoders, models

from deepspeed.generate.params import SamplingParams
from deepspeed.generate.stops import TextStream, end_ids

TEXT = "Grüße 東京, 👩‍👩‍👧 naïve — 𝔘𝔫𝔦! Ω≈ç√ end."


def by_bytes(tokens):
    """Every token is one byte, as the worst of byte-level tokenizers."""
    return bytes(tokens).decode(errors="replace")


def stream(decode, tokens, params=None, sizes=(1,)):
    """The text of a stream that takes as many tokens at once as `sizes` say, and its pieces."""
    text = TextStream(decode, params or SamplingParams())
    pieces, at = [], 0
    while at < len(tokens):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text.push(tokens[at : at + size]))
        at += size
    pieces.append(text.flush())
    return text, pieces


@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize("sizes", [(1,), (2, 3), (1000,)])
def test_characters_of_several_tokens(times, sizes):
    tokens = [*(TEXT * times).encode()]
    _, pieces = stream(by_bytes, tokens, sizes=sizes)
    assert "".join(pieces) == TEXT * times
    assert not any("\ufffd" in piece for piece in pieces)
    assert sizes != (1,) or sum(map(bool, pieces)) == len(TEXT * times)  # each as soon as it is whole


def test_bytes_that_are_no_characters():
    random = Random(0)
    for _ in range(200):
        tokens = random.choices([0x41, 0xE4, 0xB8, 0xAD, 0xF0, 0x9F, 0xFF, 0xC3], k=random.randint(1, 60))
        _, pieces = stream(by_bytes, tokens)
        assert "".join(pieces) == by_bytes(tokens)
        _, others = stream(by_bytes, tokens, sizes=(3, 1, 7))
        assert "".join(others) == "".join(pieces)
    _, pieces = stream(by_bytes, [0xFF] * 1000)
    assert "".join(pieces) == "\ufffd" * 1000


def test_few_tokens_are_decoded_again():
    counts = []

    def counted(tokens):
        counts.append(len(tokens))
        return by_bytes(tokens)

    stream(counted, [*b"abc " * 1000])
    assert len(counts) < 1.1 * 4000
    assert max(counts) <= 17
    counts.clear()
    stream(counted, [0xFF] * 4000)
    assert max(counts) <= 64


def test_a_real_tokenizer():
    """SentencePiece's decoder: it removes the first space, and special tokens have no text."""
    pieces = ["▁Hello", "▁", "▁world", ",", "▁a", "b", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: at for at, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.add_special_tokens(["<s>"])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    characters = [[7 + byte for byte in character.encode()] for character in "é東👩"]
    random = Random(1)
    for _ in range(100):
        words = [[at] for at in range(7)] + characters
        tokens = [token for word in random.choices(words, k=random.randint(1, 80)) for token in word]
        assert "".join(stream(decode, tokens)[1]) == decode(tokens)
        specials = [6] * 100 + tokens + [6] * 100 + tokens
        assert "".join(stream(decode, specials)[1]) == decode(specials)


@pytest.mark.parametrize(
    ("text", "stop", "shown", "found"),
    [
        ("one\n\ntwo", "\n\n", "one", "\n\n"),
        ("ababac", "abac", "ab", "abac"),
        ("aab", ["ab", "b"], "a", "ab"),
        ("xabc", ["c", "ab"], "x", "ab"),  # the first that is complete
        ("nothing", ["thinga", "z"], "nothing", None),  # held back at first
        ("stop", "stop", "", "stop"),
        ("grüß", ["ß"], "grü", "ß"),
    ],
)
@pytest.mark.parametrize("sizes", [(1,), (2,), (3, 1), (100,)])
def test_stop_strings(text, stop, shown, found, sizes):
    streamed, pieces = stream(by_bytes, [*text.encode()], SamplingParams(stop=stop), sizes)
    assert "".join(pieces) == shown
    assert streamed.stopped == found
    used = text.encode() if found is None else text[: text.index(found) + len(found)].encode()
    assert streamed.tokens == len(used)


def test_stop_strings_never_leak():
    """No piece shows what a stop string contains; the result is that of a search in the whole text."""
    random = Random(2)
    for _ in range(500):
        stops = ["".join(random.choices("ab", k=random.randint(1, 5))) for _ in range(random.randint(1, 3))]
        text = "".join(random.choices("abc", k=30))
        ends = {stop: text.find(stop) + len(stop) for stop in stops if stop in text}
        shown = (
            text if not ends else text[: min(at - len(stop) for stop, at in ends.items() if at == min(ends.values()))]
        )
        streamed, pieces = stream(by_bytes, [*text.encode()], SamplingParams(stop=stops), (random.randint(1, 4),))
        assert "".join(pieces) == shown
        assert all(shown.startswith(part) for part in accumulate(pieces))
        assert (streamed.stopped is None) == (not ends)


def test_what_cannot_be_a_stop_string_is_shown_at_once():
    streamed = TextStream(by_bytes, SamplingParams(stop="ab"))
    assert [streamed.push([byte]) for byte in b"xaxaab"] == ["x", "", "ax", "", "a", ""]
    assert streamed.flush() == ""


def test_stop_strings_wait_for_min_tokens():
    streamed, pieces = stream(by_bytes, [*b"abcabc"], SamplingParams(stop="bc", min_tokens=2))
    assert "".join(pieces) == "abca"
    assert streamed.stopped == "bc"


def test_end_ids():
    assert end_ids(SamplingParams(stop_token_ids=[3]), [1, 2]) == {1, 2, 3}
    assert end_ids(SamplingParams(stop_token_ids=[3], ignore_eos=True), [1]) == {3}
