"""Streamed text: what comes out piece by piece is the text, is never taken back, and ends before a stop string."""

from __future__ import annotations

import random

import pytest

from specdecode_ref.errors import InputError
from specdecode_ref.stream import Piece, Stream

TEXT = "naïve — 日本語 🙂🏽 end\u0301"


def streamed(chunks: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[list[Piece]], Stream]:
    """The pieces of each push, and of the end."""
    stream = Stream(lambda token: chunks[token], stop)
    out = []
    for token in range(len(chunks)):
        out.append(stream.push(token, f"t{token}"))
        if stream.stopped:
            break
    return [*out, stream.finish()], stream


def text_of(pieces: list[list[Piece]]) -> str:
    return "".join(piece.text for push in pieces for piece in push)


def text_by_bytes(data: bytes, stop: tuple[str, ...]) -> tuple[str, bool]:
    """The same by its definition: the first stop string that is complete, reading byte by byte, ends the text."""
    for end in range(1, len(data) + 1):
        starts = [end - len(s.encode()) for s in stop if data[:end].endswith(s.encode())]
        if starts:
            return data[: min(starts)].decode("utf-8", "replace"), True
    return data.decode("utf-8", "replace"), False


def cut(rng: random.Random, data: bytes) -> list[bytes]:
    """Data in random tokens; some add nothing, as control tokens do."""
    places = sorted(rng.randint(0, len(data)) for _ in range(rng.randint(0, len(data) + 2)))
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)]


def test_text_may_be_split_anywhere() -> None:
    data = TEXT.encode()
    for a in range(len(data) + 1):
        for b in range(a, len(data) + 1):
            pieces, stream = streamed([data[:a], data[a:b], data[b:]])
            assert text_of(pieces) == TEXT and not stream.stopped
            assert all(piece.text and "\ufffd" not in piece.text for push in pieces for piece in push)


def test_a_piece_carries_the_tag_of_the_token_that_completed_it() -> None:
    data = "é!".encode()
    pieces, _ = streamed([data[:1], data[1:2], data[2:]])
    assert pieces == [[], [Piece("é", "t1")], [Piece("!", "t2")], []]


def test_without_a_stop_string_nothing_complete_is_held() -> None:
    pieces, _ = streamed([bytes([b]) for b in b"plain"])
    assert [text_of([push]) for push in pieces] == [*"plain", ""]


@pytest.mark.parametrize("seed", range(200))
def test_bytes_in_random_tokens_with_random_stops(seed: int) -> None:
    """Small alphabets make stop strings that overlap, nest and begin again inside themselves."""
    rng = random.Random(seed)
    alphabet = rng.choice(["ab", "abc", "aé", "日本"])
    stop = tuple("".join(rng.choices(alphabet, k=rng.randint(1, 5))) for _ in range(rng.randint(0, 3)))
    data = "".join(rng.choices(alphabet, k=rng.randint(0, 25))).encode()
    if rng.random() < 0.4:  # not always UTF-8
        data = bytes(rng.choice([b, b, b, 0xFF, 0xE2, 0x80, 0xC3]) for b in data)
    expected, stopped = text_by_bytes(data, stop)
    for _ in range(5):
        pieces, stream = streamed(cut(rng, data), stop)
        assert text_of(pieces) == expected
        assert stream.stopped == stopped


@pytest.mark.parametrize(
    "text, stop, expected",
    [
        ("abcd", ("abcd", "bc"), "a"),  # the shorter one is complete first
        ("abc", ("c", "bc", "abc"), ""),  # all at once: the longest
        ("aab", ("ab",), "a"),
        ("ababac", ("abac",), "ab"),
        ("xSTOPy", ("STOP",), "x"),
        ("xSTO", ("STOP",), "xSTO"),
        ("\n\n", ("\n\n\n",), "\n\n"),
        ("\n\n\n", ("\n\n",), ""),
        ("ééé", ("é",), ""),
        ("ab", ("a", "b"), ""),
    ],
)
def test_stop_strings(text: str, stop: tuple[str, ...], expected: str) -> None:
    for chunks in ([text.encode()], [bytes([b]) for b in text.encode()]):
        assert text_of(streamed(chunks, stop)[0]) == expected


def test_what_may_begin_a_stop_string_is_held_until_it_does_not() -> None:
    pieces, _ = streamed([b"a", b"S", b"T", b"x", b"S"], ("STOP",))
    assert [text_of([push]) for push in pieces] == ["a", "", "", "STx", "", "S"]
    assert [piece.tag for push in pieces for piece in push] == ["t0", "t1", "t2", "t3", "t4"]


def test_bytes_that_are_no_text_are_replaced() -> None:
    pieces, _ = streamed([b"a\xff", b"\xe2\x82", b"b", b"\xf0\x9f"])
    assert text_of(pieces) == b"a\xff\xe2\x82b\xf0\x9f".decode("utf-8", "replace")
    assert text_of(streamed([b"\xe2", b"STOP"], ("STOP",))[0]) == "\ufffd", "half a character before a stop string"


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InputError, match="at least one character"):
        Stream(lambda _: b"", ["a", ""])
