"""Coins: the published Philox, and a uniform that depends on its key and on nothing else."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from specdecode_ref.coins import ACCEPT, DRAFT, EMIT, Coins, philox
from specdecode_ref.errors import InputError

ONES = 0xFFFFFFFF
KNOWN = {
    "zeros": ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    "ones": ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    "pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
}
"""philox4x32 with 10 rounds: the lines of Random123's tests/kat_vectors."""


@pytest.mark.parametrize("name", KNOWN)
def test_philox_gives_the_published_words(name: str) -> None:
    counter, key, words = KNOWN[name]
    assert philox(counter, key) == words


def test_arrays_give_the_same_words_as_integers() -> None:
    random.seed(1)
    counters = [tuple(random.getrandbits(32) for _ in range(4)) for _ in range(200)]
    key = (random.getrandbits(32), random.getrandbits(32))
    columns = tuple(np.array(column, dtype=np.uint64) for column in zip(*counters, strict=True))
    vector = [tuple(map(int, words)) for words in zip(*philox(columns, key), strict=True)]
    assert vector == [philox(counter, key) for counter in counters]


def test_a_coin_is_the_top_53_bits_of_two_words() -> None:
    words = philox((9, 77, 3, DRAFT), (5, 2))
    expected = ((words[0] >> 5) << 26 | words[1] >> 6) / 2**53
    assert Coins(seed=2 << 32 | 5, sequence=3).draft(base=77, node=9) == expected


def test_accept_coins_do_not_depend_on_how_many_are_asked_for() -> None:
    coins = Coins(seed=2**64 - 1, sequence=2**32 - 1)
    many = coins.accept(1000, 1024)
    for count in (0, 1, 2, 7, 1024):
        assert coins.accept(1000, count) == many[:count]
    assert all(type(u) is float for u in many)
    words = philox((1023, 1000, 2**32 - 1, ACCEPT), (ONES, ONES))
    assert many[1023] == ((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53


def test_emit_coins_belong_to_their_position() -> None:
    coins = Coins(seed=3)
    assert coins.emits(40, 5) == [coins.emit(p) for p in range(40, 45)]
    assert coins.emits(42, 2) == coins.emits(40, 5)[2:4]
    assert coins.emits(42, 0) == []


def test_the_order_of_asking_is_nothing_to_a_coin() -> None:
    keys = [(base, node) for base in range(20) for node in range(20)]
    there = {key: Coins(seed=7).draft(*key) for key in keys}
    random.seed(2)
    random.shuffle(keys)
    assert {key: Coins(seed=7).draft(*key) for key in keys} == there


def test_every_part_of_the_key_makes_another_coin() -> None:
    values = [
        Coins(seed, sequence)._uniform(stream, base, node)
        for seed in (0, 1, 1 << 32, 1 << 63)
        for sequence in (0, 1, 2**32 - 1)
        for stream in (DRAFT, ACCEPT, EMIT)
        for base in (0, 1, 2, 50_000)
        for node in (0, 1, 2, 1023)
    ]
    assert Counter(values).most_common(1)[0][1] == 1


def test_coins_are_in_the_half_open_interval() -> None:
    us = Coins(seed=11).accept(5, 200_000)
    assert 0 <= min(us) < 1e-4 and 1 - 1e-4 < max(us) < 1
    assert (((ONES >> 5) * 2.0**26 + (ONES >> 6)) * 2.0**-53) == 1 - 2.0**-53, "all bits set is still below one"


@pytest.mark.parametrize("stream", ["draft", "accept", "emit"])
def test_coins_are_uniform(stream: str) -> None:
    """Chi-square at 1e-9 in the top and in the low bits, and of neighbouring pairs."""
    coins, n = Coins(seed=5), 60_000
    us = {
        "draft": lambda: [coins.draft(i // 8, i % 8) for i in range(n)],
        "accept": lambda: [u for base in range(n // 100) for u in coins.accept(base, 100)],
        "emit": lambda: [coins.emit(i) for i in range(n)],
    }[stream]()
    low = [u * 2**45 % 1 for u in us]  # exact: the last eight bits
    for values in (us, low):
        assert stats.chisquare(np.histogram(values, bins=64, range=(0, 1))[0]).pvalue > 1e-9
    pairs = np.histogram2d(us[::2], us[1::2], bins=16, range=((0, 1), (0, 1)))[0]
    assert stats.chisquare(pairs.ravel()).pvalue > 1e-9


@pytest.mark.parametrize("seed, sequence", [(-1, 0), (2**64, 0), (0, -1), (0, 2**32)])
def test_a_key_out_of_range_is_refused(seed: int, sequence: int) -> None:
    with pytest.raises(InputError, match="choose one in that range"):
        Coins(seed, sequence)
