"""Shapes of trees: their text form comes back as the same shape, and what is no shape is refused in one line."""

from __future__ import annotations

import random
from itertools import product

import pytest

from specdecode_ref.drafters.shapes import (
    DEEPEST,
    MOST_NODES,
    NAMED,
    Auto,
    Dynamic,
    Optimal,
    Sampled,
    Static,
    Wanted,
    chain,
    parse,
)
from specdecode_ref.errors import InputError, UnknownNameError
from specdecode_ref.types import Draw

DRAWS: tuple[Draw, ...] = ("with_replacement", "without_replacement")


def random_static(rng: random.Random, nodes: int, widest: int = 62) -> Static:
    """Grown place by place, so that parents and elder siblings come first; the order is otherwise free."""
    paths: list[tuple[int, ...]] = []
    while len(paths) < nodes:
        parent = rng.choice([(), *paths[-3:], rng.choice(paths or [()])])
        rank = sum(path[:-1] == parent for path in paths)
        if rank < widest and len(parent) < DEEPEST:
            paths.append((*parent, rank))
    return Static(tuple(paths))


SHAPES: list[Wanted] = [
    *(chain(length) for length in (1, 2, 4, DEEPEST)),
    *(Sampled(branching, draw) for branching in ((1,), (1, 1), (3, 2), (2, 1, 2), (1023,)) for draw in DRAWS),
    *(Static(paths) for paths in NAMED.values()),
    Static(tuple((0,) * depth for depth in range(1, DEEPEST + 1))),
    Static(tuple((rank,) for rank in range(62))),
    *(random_static(random.Random(seed), 1 + 5 * seed) for seed in range(12)),
    random_static(random.Random(99), MOST_NODES),
    *(
        Dynamic(*sizes, floor, reach)
        for sizes, floor, reach in product(((1, 1, 1), (5, 4, 12), (64, 9, 1023)), (0.0, 1 / 3, 1e-9), (0.0, 0.1))
    ),
    *(Optimal(nodes) for nodes in (1, 12, MOST_NODES)),
    Auto(),
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape)[:40])
def test_the_text_of_a_shape_means_that_shape(shape: Wanted) -> None:
    assert parse(str(shape)) == shape
    assert parse(f"  {shape}\n") == shape


@pytest.mark.parametrize(
    "text, shape",
    [
        ("chain:4", Sampled((1, 1, 1, 1))),
        ("3,2,1", Sampled((3, 2, 1))),
        ("7", Sampled((7,))),
        ("sampled:3,2", Sampled((3, 2), "without_replacement")),
        ("sampled:3, 2, with", Sampled((3, 2), "with_replacement")),
        ("sampled:3,2,without", Sampled((3, 2), "without_replacement")),
        ("static:0.00.1", Static(((0,), (0, 0), (1,)))),
        ("static:wide", Static(NAMED["wide"])),
        ("dynamic:5,4,12", Dynamic(5, 4, 12)),
        ("dynamic:5,4,12,5e-2", Dynamic(5, 4, 12, 0.05)),
        ("optimal:12", Optimal(12)),
        ("auto", Auto()),
    ],
)
def test_what_a_user_may_write(text: str, shape: Wanted) -> None:
    assert parse(text) == shape


@pytest.mark.parametrize("name, nodes", [("narrow", 5), ("middle", 10), ("wide", 20), ("medusa", 63)])
def test_named_trees_are_written_by_name(name: str, nodes: int) -> None:
    shape = parse(f"static:{name}")
    assert isinstance(shape, Static) and shape.nodes == nodes and str(shape) == f"static:{name}"


def test_a_longest_rank_is_one_character() -> None:
    assert str(Static(tuple((rank,) for rank in range(62)))).endswith("X.Y.Z")
    with pytest.raises(InputError, match="at most 62 children"):
        Static(tuple((rank,) for rank in range(63)))


def test_nodes_are_counted_without_the_root() -> None:
    assert (chain(4).nodes, Sampled((3, 2)).nodes, Sampled((2, 2, 2)).nodes) == (4, 9, 14)


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "nothing", "chain", "Chain:4", "tree:3,2", "4chain", "static:", "static:unknown", "static:9", "²"),
        *("chain:", "chain:0", "chain:-1", "chain:1.5", "chain:four", "chain:4:4", "chain:٤", "chain:1_0", "chain:65"),
        *("chain:99999999999", "chain:" + "9" * 5000, "sampled:", "sampled:0", "sampled:3,,2", "sampled:with", "3,2,x"),
        *("sampled:3,2,maybe", "sampled:32,32", "sampled:" + "1," * 64 + "1", "sampled:" + "9," * 3000 + "9"),
        *(
            "sampled:" + "9" * 4000 + "," + "9" * 4000,
            "static:0.0",
            "static:00",
            "static:0.2",
            "static:0.11",
            "static:0.",
        ),
        *(
            "static:0..1",
            "static:0.!",
            "static:0.-1",
            "static:0 .1",
            "static:" + ".".join("0" * d for d in range(1, 66)),
        ),
        *("dynamic:", "dynamic:5,4", "dynamic:0,4,12", "dynamic:5,0,12", "dynamic:5,4,0", "dynamic:5,4,12,1"),
        *("dynamic:5,4,12,-0.1", "dynamic:5,4,12,nan", "dynamic:5,4,12,inf", "dynamic:5,4,12,0_1", "dynamic:65,4,12"),
        *("dynamic:5,4,1024", "dynamic:5,1024,12", "dynamic:5,4,12,", "dynamic:5,4,12,0.٠"),
        *("dynamic:5,4,12,0.1,1", "dynamic:5,4,12,0.1,0.1,0", "dynamic:5,4,12,0.1,x"),
        *("dynamic:5,4,12,1-1", "optimal:", "optimal:0", "optimal:1024", "optimal:1,2", "auto:4", "x" * 10**6),
        *("static:0" + ".0" * 10**6, "chain:4\0", "\ud800", "'; rm -rf /"),
    ],
    ids=lambda text: ascii(text[:24]),
)
def test_what_is_no_shape_is_refused_in_one_line(text: str) -> None:
    with pytest.raises((InputError, UnknownNameError), match=r"^expected .*; got .*; ") as caught:
        parse(text)
    assert len(str(caught.value)) < 300 and "\n" not in str(caught.value)


def test_the_reason_is_the_shapes_own() -> None:
    for text, reason in (
        ("chain:65", "64 levels"),
        ("sampled:0", "one child or more"),
        ("static:00", "parents and lower ranks"),
        ("dynamic:5,4,12,1", "below 1"),
        ("static:broad", "narrow, middle, wide, medusa"),
        ("dynamic:5,4", "dynamic:5,4,12"),
    ):
        with pytest.raises((InputError, UnknownNameError), match=reason):
            parse(text)


@pytest.mark.parametrize(
    "paths", [(), ((),), ((1,),), ((0,), (0,)), ((0, 0), (0,)), ((0,), (2,)), ((0,), (-1,)), ((0,), (0, 1))], ids=str
)
def test_a_static_tree_without_order_is_refused(paths: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(InputError):
        Static(paths)


def test_limits_hold_at_their_edge() -> None:
    for make in (
        lambda: chain(DEEPEST + 1),
        lambda: Sampled((MOST_NODES + 1,)),
        lambda: Sampled((1023, 1)),
        lambda: Sampled((10**5000, 10**5000)),
        lambda: Static(tuple((0,) * depth for depth in range(1, DEEPEST + 2))),
        lambda: Dynamic(DEEPEST + 1, 1, 1),
        lambda: Optimal(MOST_NODES + 1),
        lambda: Sampled((2,), "deterministic"),
    ):
        with pytest.raises(InputError):
            make()
