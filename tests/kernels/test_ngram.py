"""A kernel finds the n-gram the reference finds, and what followed it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from specdecode_kernels import ngram as kernels
from torch import Tensor

from specdecode_ref.batched import ngram as reference
from specdecode_ref.errors import InputError, NotApplicableError

pytestmark = pytest.mark.usefixtures("poisoned")


def compare(tokens: Tensor, lengths: Tensor, gamma: int, longest: int, shortest: int) -> reference.Found:
    out = kernels.find(tokens, lengths, gamma, longest, shortest)
    expected = reference.find(tokens, lengths, gamma, longest, shortest)
    wrong = ((out.length != expected.length) | (out.tokens != expected.tokens).any(1)).nonzero()[:, 0].tolist()
    assert not wrong, [(tokens[b, : lengths[b]].tolist(), out.length[b], out.tokens[b], expected) for b in wrong[:1]]
    return out


@pytest.mark.parametrize("alphabet", [1, 2, 3])
@pytest.mark.parametrize(("gamma", "longest", "shortest"), [(6, 4, 2), (1, 1, 1), (3, 9, 1), (5, 3, 3), (9, 12, 5)])
def test_small_alphabets(alphabet: int, gamma: int, longest: int, shortest: int) -> None:
    """Many matches of every length, overlapping ones too, in texts down to none; what is behind a text is a bait."""
    rng = random.Random(alphabet)
    rows, width = 160, 19
    tokens = torch.tensor([[rng.randrange(alphabet) for _ in range(width)] for _ in range(rows)])
    lengths = torch.tensor([b if b <= width else rng.randint(0, width) for b in range(rows)])
    out = compare(tokens, lengths, gamma, longest, shortest)
    assert len(set(out.length.tolist())) > 1


def test_all_texts_of_two_letters() -> None:
    texts = torch.arange(2**9)[:, None] >> torch.arange(9) & 1
    for length in (9, 6):
        compare(texts, torch.full((2**9,), length), 3, 4, 2)


def test_the_latest_of_the_longest_wins_across_blocks() -> None:
    """In blocks of 1024 places: a longer match before a later one, equal ones in two blocks, one across a border."""
    tokens = torch.arange(10, 10 + 2600).repeat(4, 1)
    end = torch.tensor([1, 2, 3])
    tokens[:, -3:] = end
    tokens[0, 5:8], tokens[0, 2000:2002] = end, end[1:]
    tokens[1, 5:8], tokens[1, 2000:2003], tokens[1, 1000:1003] = end, end, end
    tokens[2, 1022:1025], tokens[2, 2047:2049] = end, end[1:]
    out = compare(tokens, torch.tensor([2600, 2600, 2600, 2600]), 4, 4, 2)
    assert out.length.tolist() == [3, 3, 3, 0]
    assert out.tokens[:3, 0].tolist() == [18, 2013, 1035]


def test_large_ids_and_a_strided_batch() -> None:
    """Token ids that agree in their low words only do not match."""
    ids = torch.tensor([5, 5 + 2**32, -7, 2**62])
    rng = random.Random(0)
    wide = ids[torch.tensor([[rng.randrange(4) for _ in range(46)] for _ in range(6)])]
    lengths = torch.tensor([[23, 0], [22, 0], [9, 0]])[:, 0]
    compare(wide[::2, :23], lengths, 4, 3, 1)
    compare(wide[::2, ::2], lengths, 4, 3, 1)
    compare(wide.T.contiguous().T[:3], lengths, 4, 3, 1)


def test_no_requests() -> None:
    out = kernels.find(torch.zeros(0, 5, dtype=torch.int64), torch.zeros(0, dtype=torch.int64), 3, 4, 2)
    assert out.length.shape == (0,) and out.tokens.shape == (0, 3)


@pytest.mark.parametrize("width", [0, 1])
def test_no_text(width: int) -> None:
    out = compare(torch.zeros(3, width, dtype=torch.int64), torch.full((3,), width), 2, 4, 1)
    assert out.length.tolist() == [0, 0, 0] and out.tokens.tolist() == [[-1, -1]] * 3


def test_lengths_that_cannot_be() -> None:
    """Below 0 there is no text, and beyond the width the text ends with it."""
    tokens = torch.tensor([[1, 2, 1, 2]]).repeat(4, 1)
    out = kernels.find(tokens, torch.tensor([-1, -(2**63), 5, 2**40]), 2, 4, 1)
    assert out.length.tolist() == [0, 0, 2, 2]
    assert out.tokens.tolist() == [[-1, -1]] * 2 + [[1, 2]] * 2


def test_ngrams_longer_than_any_text() -> None:
    """Are no matches, and no work: a round for each of 2^30 lengths would never end."""
    tokens = torch.tensor([[7, 7, 7, 7, 7]])
    assert compare(tokens, torch.tensor([5]), 2, 2**30, 1).length == 4
    assert compare(tokens, torch.tensor([5]), 2, 2**30, 6).length == 0


def test_bytes(traffic: Any) -> None:
    """Where no token comes twice, the text is read once; every repeated token costs its look back."""
    tokens = torch.arange(1501).repeat(2, 1)
    lengths = torch.tensor([1501, 1501])
    with traffic(tokens=tokens) as moved:
        kernels.find(tokens, lengths, 5, 4, 2)
    nothing_found = 2 * 5 * 8
    assert moved.bytes == kernels.bytes_moved(2, 1501, 1501, 5, 4) - nothing_found
    tokens[:, 700:703] = tokens[:, -3:]
    with traffic(tokens=tokens) as moved:
        kernels.find(tokens, lengths, 5, 4, 2)
    assert moved.bytes == kernels.bytes_moved(2, 1501, 1501, 5, 4, again=2 * 3)


def test_what_it_refuses() -> None:
    tokens, lengths = torch.zeros(2, 5, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    for gamma, longest, shortest in [(0, 4, 2), (3, 1, 2), (3, 4, 0)]:
        with pytest.raises(InputError):
            kernels.find(tokens, lengths, gamma, longest, shortest)
    with pytest.raises(NotApplicableError, match="tokens of dtype int64"):
        kernels.find(tokens.int(), lengths, 3, 4, 2)
    with pytest.raises(NotApplicableError, match="lengths of dtype int64"):
        kernels.find(tokens, lengths.int(), 3, 4, 2)
    with pytest.raises(InputError, match="lengths of shape"):
        kernels.find(tokens, lengths[:1], 3, 4, 2)
