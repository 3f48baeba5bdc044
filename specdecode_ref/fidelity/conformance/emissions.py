"""What a batched function returns, in any of the shapes that engines use, as the tokens that each row emits.

Accepted: token ids [B, K + 1] padded with -1; a pair of token ids and how many drafts were accepted; a list of lists.
Anything else is a `Breach` with a name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from torch import Tensor

from specdecode_ref.fidelity.conformance.contract import Breach, Question, shown


def emitted_rows(
    said: Any, rows: int, width: int, vocab: int, question: Callable[[int], Question | None]
) -> list[list[int]]:
    """The tokens of every row: 1 to width + 1 of them, all below vocab. Raises Breach."""
    counts: list[int] | None = None
    if (isinstance(said, tuple) and len(said) == 2 and rows != 2) or (
        isinstance(said, tuple) and len(said) == 2 and not _is_row(said[0])
    ):
        said, counts = said[0], _counts(said[1], rows, question)
    table = _plain(said)
    if not isinstance(table, list) or not all(isinstance(row, list) for row in table):
        raise Breach(
            "wrong type", f"token ids [B, K + 1] or lists of them are due, not {shown(said)}", question(0), said
        )
    if len(table) != rows:
        raise Breach("wrong length", f"{rows} rows are due, {len(table)} came", question(0))
    return [_emitted(row, width, vocab, counts[i] if counts else None, question, i) for i, row in enumerate(table)]


def _emitted(
    row: list[Any],
    width: int,
    vocab: int,
    accepted: int | None,
    question: Callable[[int], Question | None],
    i: int,
) -> list[int]:
    if any(type(x) is not int for x in row):
        raise Breach("wrong type", f"whole token ids are due, not {shown(row)}", question(i), row)
    count = next((k for k, x in enumerate(row) if x == -1), len(row)) if accepted is None else accepted + 1
    if accepted is None and any(x != -1 for x in row[count:]):
        raise Breach("wrong length", f"{row}: a token stands behind a -1", question(i), row)
    if not 1 <= count <= min(len(row), width + 1):
        raise Breach("wrong length", f"{row}: from 1 to {width + 1} tokens are due, {count} came", question(i), row)
    if any(not 0 <= x < vocab for x in row[:count]):
        raise Breach("not a token", f"{row[:count]} are no tokens of a vocabulary of {vocab}", question(i), row)
    return row[:count]


def _counts(value: Any, rows: int, question: Callable[[int], Question | None]) -> list[int]:
    found = np.asarray(_plain(value)).reshape(-1)
    if len(found) != rows or found.dtype.kind not in "iu":
        raise Breach("wrong length", f"{rows} counts of accepted drafts are due, not {shown(value)}", question(0))
    return [int(n) for n in found]


def _is_row(value: Any) -> bool:
    """Whether this is one row of tokens, rather than a table of them."""
    plain = _plain(value)
    return isinstance(plain, list) and all(type(x) is int for x in plain)


def _plain(value: Any) -> Any:
    """Tensors and arrays as lists."""
    if isinstance(value, Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, Iterable) and not isinstance(value, str | bytes | dict):
        return [_plain(x) for x in value]
    return value.item() if isinstance(value, np.generic) else value
