"""The shape of a draft tree: how many nodes, where they hang, and whether chance or rank chooses their tokens.

    chain:4                 four tokens, one after another, drawn from the draft's law
    sampled:3,2             three draws after the root, two after each of them; `sampled:3,2,with`: with replacement
    static:wide             always the same places, filled by rank, by the name of the tree or written out:
    static:0.00.1           the best child, its best child, and the second best child of the root
    dynamic:5,4,12          EAGLE-2: five levels, four nodes opened on each, the twelve most probable nodes kept
    dynamic:5,4,12,0.1      the same, and no node whose path is less probable than that
    dynamic:5,4,12,0.1,0.4  the same, and no level that is less likely to be reached than that
    optimal:12              the best static tree of twelve nodes, by the acceptance measured on this device
    auto                    the fastest of all, from a calibration

A shape is fixed before anything is drawn. What is chosen by rank is deterministic, so a verifier may be shown as much
or as little of it as we like; what is drawn is never sorted, dropped or merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from specdecode_ref.errors import InputError, UnknownNameError
from specdecode_ref.types import Draw

MOST_NODES, DEEPEST = 1023, 64
"""A draft may have so many nodes and levels; a trace holds 1024 nodes a round, the root included."""

LONGEST_TEXT = MOST_NODES * (DEEPEST + 1)
"""Characters of the longest tree written out."""

_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""A rank is one character, so that a path is a word."""

Paths = tuple[tuple[int, ...], ...]


def _paths(text: str) -> Paths:
    """Words of ranks, joined by dots, as paths; raises ValueError for any other character."""
    return tuple(tuple(map(_DIGITS.index, word)) for word in text.split("."))


NAMED: Mapping[str, Paths] = {
    "narrow": _paths("0.1.00.01.000"),
    "middle": _paths("0.1.2.3.00.01.02.10.000.0000"),
    "wide": _paths("0.1.2.3.4.5.00.01.02.03.10.11.20.30.000.001.002.010.100.0000"),
    "medusa": _paths(
        "0.1.2.3.4.5.6.7.8.9.00.01.02.03.04.05.06.07.08.10.11.12.13.20.21.22.30.31.40.50.60.70.80.000.001.002."
        "003.004.005.010.011.012.020.021.030.040.050.100.101.102.110.200.300.400.0000.0001.0002.0010.0020.0100."
        "0200.1000.2000"
    ),
}
"""Static trees with a name, of 5, 10, 20 and 63 nodes (64 rows with the root, as many as Medusa's own sparse tree has).

Each is the best of its size (see `optimal.py`) for four heads like Medusa's: the best child at depth 1, 2, 3 and 4 is
right in 60, 50, 42 and 35 of 100 cases, and the child of rank r (from 0) 1 / (r + 1)^2 times as often.
"""


@dataclass(frozen=True)
class Sampled:
    """Children drawn from the draft's law, `branching[d]` of them at depth d; (1, 1, 1, 1) is a chain of four."""

    branching: tuple[int, ...]
    draw: Draw = "without_replacement"

    def __post_init__(self) -> None:
        if not self.branching or min(self.branching) < 1:
            raise InputError("one child or more at every depth of the draft", list(self.branching), "use 1 and up")
        if self.draw not in get_args(Draw) or self.draw == "deterministic":
            raise InputError("a random draw", self.draw, "use with_replacement or without_replacement")
        _bounded(self.nodes, len(self.branching))

    @property
    def nodes(self) -> int:
        """The most nodes it can have, the root left out."""
        total, level = 0, 1
        for width in self.branching:
            level *= width
            total += level
        return total

    def __str__(self) -> str:
        replaced = self.draw == "with_replacement"
        if max(self.branching) == 1 and not replaced:
            return f"chain:{len(self.branching)}"
        return f"sampled:{','.join(map(str, self.branching))}{',with' if replaced else ''}"


@dataclass(frozen=True)
class Static:
    """Fixed places filled by rank, as in Medusa (section 2.3.1): (0, 1) is the second best child of the best child.

    paths: every node as its ranks from the root down, parents before children and lower ranks before higher ones.
    """

    paths: Paths

    def __post_init__(self) -> None:
        if not self.paths:
            raise InputError("at least one node", "none", "use the drafter 'none' to draft nothing")
        seen: set[tuple[int, ...]] = {()}
        for path in self.paths:
            *parent, rank = path or (-1,)
            before = (*parent, rank - 1) if rank else ()
            if path in seen or tuple(parent) not in seen or before not in seen:
                raise InputError("parents and lower ranks before each node of a static tree", path, "reorder it")
            if rank >= len(_DIGITS):
                raise InputError(f"at most {len(_DIGITS)} children a node", rank + 1, "make the tree narrower")
            seen.add(path)
        _bounded(len(self.paths), max(map(len, self.paths)))

    @property
    def nodes(self) -> int:
        """How many nodes it has, the root left out."""
        return len(self.paths)

    def __str__(self) -> str:
        named = [name for name, paths in NAMED.items() if paths == self.paths]
        return "static:" + (named[0] if named else ".".join("".join(_DIGITS[rank] for rank in p) for p in self.paths))


@dataclass(frozen=True)
class Dynamic:
    """EAGLE-2 (arXiv 2406.16858, section 4): open the most probable nodes, then keep the most probable of all.

    depth: levels; width: nodes opened on a level, and children of each; nodes: how many are kept, the root left out.
    floor: a node is kept only if its path's probability, as the draft sees it, is at least this. With 0 the tree always
           has its full size; above 0 it is small where the draft is unsure, and an unsure draft is not worth its rows.
    reach: a further level is drafted only if the nodes opened on it, together, are reached with at least this
           probability: a level costs a pass of the draft, whatever comes of it.
    """

    depth: int
    width: int
    nodes: int
    floor: float = 0.0
    reach: float = 0.0

    def __post_init__(self) -> None:
        if min(self.depth, self.width, self.nodes) < 1:
            raise InputError("depth, width and nodes of 1 or more", str(self), "choose larger ones")
        if not 0 <= self.floor < 1:
            raise InputError("a floor of 0 or more and below 1", self.floor, "use 0 to keep the full size")
        if not 0 <= self.reach < 1:
            raise InputError("a reach of 0 or more and below 1", self.reach, "use 0 to draft every level")
        _bounded(self.nodes, self.depth)
        _bounded(self.width, 1)

    def __str__(self) -> str:
        parts: list[float] = [self.depth, self.width, self.nodes]
        if self.floor or self.reach:
            parts.append(self.floor)
        if self.reach:
            parts.append(self.reach)
        return f"dynamic:{','.join(map(str, parts))}"


@dataclass(frozen=True)
class Optimal:
    """The static tree of so many nodes that accepts most, not known before acceptance is measured."""

    nodes: int

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise InputError("an optimal tree of 1 node or more", self.nodes, "choose a larger number")
        _bounded(self.nodes, 1)

    def __str__(self) -> str:
        return f"optimal:{self.nodes}"


@dataclass(frozen=True)
class Auto:
    """The shape that decodes fastest here, not known before costs and acceptance are measured."""

    def __str__(self) -> str:
        return "auto"


Shape = Sampled | Static | Dynamic
Wanted = Shape | Optimal | Auto
"""What a user may ask for; `Optimal` and `Auto` become a `Shape` by a calibration."""


def chain(length: int) -> Sampled:
    """gamma tokens, one after another."""
    _bounded(length, length)
    return Sampled((1,) * length)


def parse(text: str) -> Wanted:
    """The shape that a text like those at the top of this file means; `parse(str(shape))` is the shape again.

    A list alone, "3,2,1", means sampled. Raises InputError, or UnknownNameError for a kind or a name that is not known.
    """
    if len(text) > LONGEST_TEXT:
        raise InputError(f"a tree of at most {LONGEST_TEXT} characters", len(text), "make it smaller")
    kind, _, rest = text.strip().partition(":")
    if not rest and kind[:1].isdecimal():
        kind, rest = "sampled", kind
    if kind not in _KINDS:
        known = f"a tree like {', '.join(_KINDS.values())}"
        raise UnknownNameError(known, repr(text[:80]), "choose one of these kinds")
    try:
        return _parse(kind, rest)
    except InputError:  # a ValueError too, and it says more
        raise
    except ValueError:
        raise InputError(f"a tree like {_KINDS[kind]}", repr(text[:80]), "write it like that") from None


_KINDS = {
    "chain": "chain:4",
    "sampled": "sampled:3,2,1",
    "static": "static:wide",
    "dynamic": "dynamic:5,4,12",
    "optimal": "optimal:12",
    "auto": "auto",
}


def _parse(kind: str, rest: str) -> Wanted:
    """Raises ValueError where the rest of the text is not of the kind's form."""
    parts = [part.strip() for part in rest.split(",")]
    if kind == "chain":
        return chain(_number(rest))
    if kind == "sampled":
        replaced = parts[-1] in ("with", "without")
        draw: Draw = "with_replacement" if parts[-1] == "with" else "without_replacement"
        return Sampled(tuple(map(_number, parts[:-1] if replaced else parts)), draw)
    if kind == "static":
        if rest not in NAMED and not rest.startswith("0"):  # where every tree that is written out begins
            known = f"a static tree named {', '.join(NAMED)}, or written out like 0.00.1"
            raise UnknownNameError(known, repr(rest[:80]), "choose one")
        return Static(NAMED.get(rest) or _paths(rest))
    if kind == "dynamic":
        depth, width, nodes, *limits = parts
        floor, reach = limits if len(limits) > 2 else [*limits, "0", "0"][:2]
        return Dynamic(_number(depth), _number(width), _number(nodes), _share(floor), _share(reach))
    if kind == "optimal":
        return Optimal(_number(rest))
    if rest:
        raise ValueError("auto takes nothing")
    return Auto()


def _number(text: str) -> int:
    """A whole number in plain digits: `int` alone would take signs, underscores and other alphabets."""
    if not (text.strip().isascii() and text.strip().isdecimal()):
        raise ValueError(text)
    return int(text)


def _share(text: str) -> float:
    """A share of 1, like 0.05 or 5e-2, for the same reason."""
    if set(text) - set("0123456789.e-"):
        raise ValueError(text)
    return float(text)


def _bounded(nodes: int, depth: int) -> None:
    if nodes > MOST_NODES or depth > DEEPEST:
        most = f"a draft of at most {MOST_NODES} nodes and {DEEPEST} levels"
        raise InputError(most, "a larger one", "make it smaller")
