"""Text out of tokens as they come, never to be taken back.

Bytes that could still become part of a longer character or of a stop string are held until that is decided. Each piece
of text keeps the tag (the provenance) of the token that completed it.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import NamedTuple

from specdecode_ref.errors import InputError


class Piece(NamedTuple):
    """Released text and the tag of its token."""

    text: str
    tag: str


class Stream:
    """token_bytes: what a token adds to the text. stop: strings that end it; they are not part of it."""

    def __init__(self, token_bytes: Callable[[int], bytes], stop: Sequence[str] = ()) -> None:
        if not all(stop):
            raise InputError("stop strings of at least one character", list(stop), "drop the empty ones")
        self._token_bytes = token_bytes
        try:
            self._stop = [s.encode() for s in stop]
        except UnicodeEncodeError as error:
            raise InputError("stop strings in UTF-8", repr(error.object)[:80], "convert them first") from None
        self._held: list[tuple[bytes, str]] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._tag = ""
        self.stopped = False

    def push(self, token: int, tag: str = "") -> list[Piece]:
        """Add a token; the text that is now certain. Sets `stopped` when a stop string is complete."""
        self._held.append((self._token_bytes(token), tag))
        held = b"".join(data for data, _ in self._held)
        found = [(at + len(s), at) for s in self._stop if (at := held.find(s)) >= 0]
        if found:
            # The one complete first, then the longest: as if bytes came one by one, however tokens split them.
            self.stopped = True
            return self._release(min(found)[1])
        return self._release(len(held) - self._undecided(held))

    def finish(self) -> list[Piece]:
        """What was still held at the end of a generation, unless a stop string ended it."""
        pieces = [] if self.stopped else self._release(sum(len(data) for data, _ in self._held))
        tail = self._decoder.decode(b"", final=True)
        return [*pieces, Piece(tail, self._tag)] if tail else pieces

    def _undecided(self, held: bytes) -> int:
        """Length of the longest end of `held` that begins a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        for n in range(min(longest, len(held)), 0, -1):
            if any(s.startswith(held[-n:]) for s in self._stop):
                return n
        return 0

    def _release(self, size: int) -> list[Piece]:
        pieces = []
        while self._held and size >= 0:
            data, self._tag = self._held[0]
            if len(data) > size:
                self._held[0] = (data[size:], self._tag)
                data = data[:size]
            else:
                del self._held[0]
            size -= len(data)
            if text := self._decoder.decode(data):
                pieces.append(Piece(text, self._tag))
            if size == 0:
                break
        return pieces
