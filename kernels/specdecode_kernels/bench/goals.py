"""The goals of the design, each beside what was found: met, missed or not measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

from specdecode_kernels.bench import attention, checks, loop, small, verify
from specdecode_kernels.bench.stand import Record

Verdict = Literal["met", "missed", "not measured"]

VERIFY_MICROSECONDS = {"H100": 48.0, "H200": 35.0}
"""B = 64, by a word of the card's name."""


class Goal(NamedTuple):
    """goal and found as text, unit included."""

    goal: str
    found: str
    verdict: Verdict


class Board:
    """The records of a run by section and name, and the bandwidth of a copy."""

    def __init__(self, records: Iterable[Record], card: str) -> None:
        self._found = {(r.section, r.name): r for r in records if r.status == "ok"}
        self.card = card
        self.copy = self.figure("bandwidth", "copy", "gigabytes_per_second")

    def figure(self, section: str, name: str, key: str) -> float | None:
        """A figure of a case that ran, else None."""
        record = self._found.get((section, name))
        value = record.figures.get(key) if record else None
        return float(value) if isinstance(value, int | float) else None

    def microseconds(self, section: str, name: str) -> float | None:
        """The time of a case."""
        return self.figure(section, name, "microseconds")

    def named(self, section: str) -> list[Record]:
        """The cases of a section that ran."""
        return [record for (found, _), record in self._found.items() if found == section]


def goals(records: Sequence[Record], card: str) -> list[Goal]:
    """All of them, in the order of the design."""
    board = Board(records, card)
    return [*_verify(board), *_attention(board), *_small(board), *_loop(board), *_elsewhere()]


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def _worst(values: Iterable[float | None], largest: bool) -> float | None:
    known = [value for value in values if value is not None]
    return (max if largest else min)(known) if known else None


def _at_most(goal: str, found: float | None, limit: float, unit: str = "") -> Goal:
    return _judged(goal, found, found is not None and found <= limit, unit)


def _at_least(goal: str, found: float | None, limit: float, unit: str = "") -> Goal:
    return _judged(goal, found, found is not None and found >= limit, unit)


def _judged(goal: str, found: float | None, holds: bool, unit: str) -> Goal:
    if found is None:
        return Goal(goal, "", "not measured")
    text = f"{100 * found:.1f}%" if unit == "%" else f"{found:.3g}{unit}"
    return Goal(goal, text, "met" if holds else "missed")


def _verify(board: Board) -> Iterator[Goal]:
    def time(name: str, batch: int = 64) -> float | None:
        return board.microseconds(verify.SECTION, f"{name} B={batch}")

    rate = board.figure(verify.SECTION, "verify_chain B=64", "gigabytes_per_second")
    yield _at_least("verify B=64: ≥ 80% of copy bandwidth", _ratio(rate, board.copy), 0.8, "%")
    card = next((card for card in VERIFY_MICROSECONDS if card in board.card), None)
    if card:
        limit = VERIFY_MICROSECONDS[card]
        yield _at_most(f"verify B=64 on {card}: ≤ {limit:.0f} µs", time("verify_chain"), limit, " µs")
    else:
        yield Goal("verify B=64: ≤ 48 µs on H100, ≤ 35 µs on H200", "", "not measured")
    yield _at_most("verify B=1: ≤ 10 µs", time("verify_chain", 1), 10, " µs")
    for peer, times in (
        ("torch.compile reference", 5),
        ("mrv2-style pipeline", 4),
        ("fused-temperature pipeline", 1.3),
    ):
        found = _ratio(time(peer), time("verify_chain"))
        yield _at_least(f"verify B=64: ≥ {times}x the {peer}", found, times, "x")
    tv = board.figure(checks.SECTION, "law is the reference's", "law_total_variation")
    yield _at_most("law: total variation ≤ 5e-6 (of `sampling.law`)", tv, checks.LAW_TV)


def _attention(board: Board) -> Iterator[Goal]:
    def time(name: str, *shape: int) -> float | None:
        return board.microseconds(attention.SECTION, f"{name} {attention.Shape(*shape)}")

    long = [context for context in attention.CONTEXTS if context >= 8192]
    for nodes, limit in ((16, 1.15), (64, 1.6)):
        ratios = (
            _ratio(time("tree_attention", b, nodes, c), time("tree_attention", b, 1, c))
            for b in attention.BATCHES
            for c in long
        )
        goal = f"tree attention: t({nodes}) / t(1) ≤ {limit} from 8k, the worst"
        yield _at_most(goal, _worst(ratios, largest=True), limit)
    shape = attention.Shape(8, 16, 16384)
    rate = board.figure(attention.SECTION, f"tree_attention {shape}", "cache_gigabytes_per_second")
    goal = "tree attention B=8, 16 nodes, 16k: keys and values at ≥ 80% of copy bandwidth"
    yield _at_least(goal, _ratio(rate, board.copy), 0.8, "%")
    for peer, times in (("dense-mask SDPA", 5), ("FlexAttention", 3)):
        ratios = (
            _ratio(time(peer, b, 16, c), time("tree_attention", b, 16, c)) for b in attention.BATCHES for c in long
        )
        goal = f"tree attention, 16 nodes from 8k: ≥ {times}x {peer}, the worst"
        yield _at_least(goal, _worst(ratios, largest=False), times, "x")


def _small(board: Board) -> Iterator[Goal]:
    for name, limit in (
        (f"commit {small.LAYERS} layers B=1", 6),
        ("tree N=64 B=1", 8),
        (f"ngram {small.TEXT} tokens B=1", 12),
    ):
        found = board.microseconds(small.SECTION, name)
        yield _at_most(f"{name}: ≤ {limit} µs, captured in a graph", found, limit, " µs")


def _loop(board: Board) -> Iterator[Goal]:
    figures = [record.figures for record in board.named(loop.SECTION)]
    captured = [f[side]["round_is_one_graph"] for f in figures for side in ("plain", "speculative")]
    goal = "whole loop: one graph launch a step"
    yield (
        _judged(goal, sum(captured), all(captured), f" of {len(captured)}")
        if captured
        else _judged(goal, None, False, "")
    )
    gap = _worst((f["speculative"]["host_gap_share"] for f in figures), largest=True)
    yield _at_most(f"whole loop: host gap ≤ 5%, the worst ({loop.LABEL})", gap, 0.05, "%")
    share = _worst((f["share_of_predicted"] for f in figures), largest=False)
    yield _at_least(f"whole loop: ≥ 85% of the predicted speed-up, the worst ({loop.LABEL})", share, 0.85, "%")


def _elsewhere() -> Iterator[Goal]:
    yield Goal("CPU: interpreter suite ≤ 120 s", "by `make test`", "not measured")
    yield Goal("CPU: default shapes compiled for sm_90 ≤ 60 s", "by `specdecode_kernels.aot`", "not measured")
