"""The ragged cache beside a model of it that is too simple to be wrong: a list of what each row remembers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
import torch

from specdecode_ref.cache import Cache, Placement
from specdecode_ref.tree import ancestors

HEADS, WIDTH = 2, 3


@dataclass
class Row:
    """What a row should hold: names of its committed tokens, and of its pending nodes with their parents."""

    committed: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)


def fresh(batch: int, capacity: int) -> Cache:
    """Two planes of different shape, the slots on different dimensions, poisoned where nothing was written."""
    keys = torch.full((batch, HEADS, capacity + 1, WIDTH), float("nan"))
    names = torch.full((batch, capacity + 1), -1)
    return Cache([keys, names], slot_dims=(2, 1))


def write(cache: Cache, where: Placement, names: list[list[int]]) -> None:
    """What a model does after `append`: each node writes itself, padding writes rubbish."""
    keys, ids = cache.planes
    for b, row in enumerate(where.slots.tolist()):
        for i, slot in enumerate(row):
            name = names[b][i] if i < len(names[b]) else 10_000_000
            ids[b, slot] = name
            keys[b, :, slot] = name
    assert len({(b, s) for b, row in enumerate(where.slots.tolist()) for s in row[: len(names[b])]}) == sum(
        map(len, names)
    ), "no two nodes share a slot"


def check_placement(cache: Cache, where: Placement, rows: list[Row], new: list[list[int]]) -> None:
    """A node sees its row's committed tokens, its ancestors and itself; its position is committed + depth."""
    for b, row in enumerate(rows):
        first = len(row.pending) - len(new[b])
        for i in range(len(new[b])):
            path = ancestors(row.parents, first + i)
            seen = cache.planes[1][b][: where.mask.shape[2]][where.mask[b, i]].tolist()
            assert sorted(seen) == sorted([*row.committed, *(row.pending[j] for j in path)])
            assert where.positions[b, i] == len(row.committed) + len(path) - 1
        for i in range(len(new[b]), where.slots.shape[1]):
            assert where.mask[b, i].any(), "the softmax of a padded query is defined"
            assert where.slots[b, i] == cache.capacity - 1


def check_committed(cache: Cache, rows: list[Row]) -> None:
    """The front of every row is what a fresh prefill would have written."""
    assert cache.lengths == [len(row.committed) for row in rows]
    for b, row in enumerate(rows):
        n = len(row.committed)
        assert cache.planes[1][b, :n].tolist() == row.committed
        assert torch.equal(
            cache.planes[0][b, :, :n], torch.tensor(row.committed).float()[None, :, None].expand(HEADS, n, WIDTH)
        )


@pytest.mark.parametrize("seed", range(30))
def test_any_sequence_of_operations(seed: int) -> None:
    rng = random.Random(seed)
    names = iter(range(1_000_000))
    rows = [Row() for _ in range(rng.randint(1, 4))]
    cache = fresh(len(rows), rng.choice([0, 1, 5, 64]))
    for _ in range(25):
        act = rng.choice(["append", "append", "append", "commit", "commit", "rollback", "select"])
        if act == "append":
            sizes = [rng.choice([0, 1, 1, 2, 5, 9]) for _ in rows]
            if not any(sizes):
                continue
            new: list[list[int]] = [[next(names) for _ in range(size)] for size in sizes]
            parents = [
                [rng.randint(-1, len(row.pending) + i - 1) for i in range(size)]
                for row, size in zip(rows, sizes, strict=True)
            ]
            where = cache.append(parents)
            write(cache, where, new)
            for row, more, above in zip(rows, new, parents, strict=True):
                row.pending += more
                row.parents += above
            check_placement(cache, where, rows, new)
        elif act == "commit":
            paths = [list(ancestors(row.parents, rng.randrange(-1, len(row.pending)))) for row in rows]
            cache.commit(paths)
            for row, path in zip(rows, paths, strict=True):
                row.committed += [row.pending[i] for i in path]
        elif act == "rollback":
            cache.rollback()
        elif len(rows) > 1:
            stay = sorted(rng.sample(range(len(rows)), rng.randint(1, len(rows))))
            cache.select(stay)
            rows = [rows[b] for b in stay]
        if act in ("commit", "rollback"):
            for row in rows:
                row.pending, row.parents = [], []
        check_committed(cache, rows)
        assert [len(pending) for pending in cache.pending] == [len(row.pending) for row in rows]


def test_growth_keeps_what_was_there_and_at_least_doubles() -> None:
    cache = fresh(1, 2)
    for name in range(40):
        before = cache.capacity
        write(cache, cache.append([[-1]]), [[name]])
        cache.commit([[0]])
        assert cache.capacity == before or cache.capacity >= 2 * before
    check_committed(cache, [Row(committed=list(range(40)))])


def test_a_path_is_moved_to_the_front() -> None:
    cache = fresh(1, 10)
    write(cache, cache.append([[-1, -1, 0, 1, 3]]), [[0, 1, 2, 3, 4]])
    cache.commit([[1, 3, 4]])
    check_committed(cache, [Row(committed=[1, 3, 4])])


def test_rows_of_different_lengths() -> None:
    cache = fresh(3, 4)
    write(cache, cache.append([[-1, 0, 1], [], [-1]]), [[0, 1, 2], [], [3]])
    cache.commit([[0, 1, 2], [], [0]])
    where = cache.append([[-1], [-1, 0], []])
    write(cache, where, [[4], [5, 6], []])
    assert where.positions.tolist() == [[3, 0], [0, 1], [0, 0]]
    cache.commit([[0], [0, 1], []])
    check_committed(cache, [Row([0, 1, 2, 4]), Row([5, 6]), Row([3])])


def test_padding_has_a_slot_of_its_own_where_a_row_is_full() -> None:
    cache = fresh(2, 3)
    write(cache, cache.append([[-1, 0, 1], []]), [[0, 1, 2], []])
    cache.commit([[0, 1, 2], []])
    write(cache, cache.append([[-1], [-1, 0, 1]]), [[3], [4, 5, 6]])
    cache.commit([[0], [0, 1, 2]])
    check_committed(cache, [Row([0, 1, 2, 3]), Row([4, 5, 6])])


def test_a_row_that_left_takes_nothing_with_it() -> None:
    cache = fresh(3, 4)
    write(cache, cache.append([[-1], [-1, 0], [-1]]), [[0], [1, 2], [3]])
    cache.commit([[0], [0, 1], [0]])
    write(cache, cache.append([[-1], [-1], [-1]]), [[4], [5], [6]])
    cache.select([1, 2])
    assert cache.pending == [(-1,), (-1,)]
    cache.commit([[0], [0]])
    check_committed(cache, [Row([1, 2, 5]), Row([3, 6])])
