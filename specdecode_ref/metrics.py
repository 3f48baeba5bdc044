"""What a generation cost and gained, counted from its trace; each figure is named once, here.

Engines use the same words for different things: with or without the last token of a round, per draft or per round, up
to the end of the text or beyond it. `FIGURES` defines each in a line and says what vLLM, SGLang and llama.cpp call it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from specdecode_ref.trace import Round, Trace, counts


@dataclass(frozen=True)
class Figure:
    """One figure: what it is, and its name in other engines; "" where an engine has none."""

    definition: str
    vllm: str = ""
    sglang: str = ""
    llama_cpp: str = ""


FIGURES: dict[str, Figure] = {
    "rounds": Figure(
        "target forwards after the prompt's: one a round, rounds without a draft too",
        sglang="spec_verify_ct",
    ),
    "drafts": Figure(
        "rounds in which at least one token was drafted",
        vllm="num_drafts",
        llama_cpp="n_draft_verif_steps",
    ),
    "drafted": Figure(
        "drafted tokens, tree nodes and tokens beyond the end of the text included",
        vllm="num_draft_tokens",
        sglang="spec_num_proposed_drafts",
        llama_cpp="draft_n",
    ),
    "accepted": Figure(
        "drafted tokens that became output: none beyond an EOS, a stop string or the length limit",
        vllm="num_accepted_tokens (counts beyond the end)",
        sglang="spec_num_correct_drafts",
        llama_cpp="draft_n_accepted",
    ),
    "emitted": Figure(
        "output tokens: the accepted ones and one more a round, unless the text ended before it",
        sglang="completion_tokens",
        llama_cpp="predicted_n",
    ),
    "acceptance_rate": Figure(
        "accepted / drafted: what share of the drafting was of use (falls as drafts get longer)",
        vllm="Avg Draft acceptance rate",
        sglang="spec_accept_rate",
        llama_cpp="draft acceptance",
    ),
    "tau": Figure(
        "emitted / rounds: tokens a target forward, the last one of the round included",
        sglang="spec_accept_length (the token of the prefill counts too)",
    ),
    "tau_without_bonus": Figure("accepted / rounds: the same without the token that every round emits anyway"),
    "mean_acceptance_length": Figure(
        "1 + accepted / drafts: tau over the rounds that had a draft, as if no text ever ended",
        vllm="Mean acceptance length (counts beyond the end)",
        llama_cpp="mean len",
    ),
    "accepted_per_position": Figure(
        "how often a draft's first, second, ... token was accepted; in a tree, of the depth",
        vllm="num_accepted_tokens_per_pos",
        sglang="spec_correct_drafts_histogram (how often exactly k were)",
    ),
    "unconditional_rates": Figure(
        "accepted_per_position / drafts: sums to mean_acceptance_length - 1",
        vllm="Per-position acceptance rate",
        llama_cpp="acc per pos",
    ),
    "conditional_rates": Figure(
        "accepted / tested at each position: the chance to go on from there; alpha, where it is constant",
    ),
    "tokens_per_second": Figure("emitted / seconds after the prefill", llama_cpp="predicted_per_second"),
    "cost_ratio": Figure("seconds of drafting / seconds of target forwards: gamma times Leviathan's c"),
    "draft_share": Figure("share of the rounds' seconds that was drafting"),
    "verify_share": Figure("share of the rounds' seconds that was target forwards"),
    "overhead_share": Figure("share of the rounds' seconds that was neither drafting nor a target forward"),
}
"""Read in vllm/v1/spec_decode/metrics.py (its log line and counters; the scheduler skips rounds without a draft; tokens
beyond an EOS: vLLM issue 56101), sglang/srt/managers/tokenizer_manager.py (`_calculate_spec_decoding_metrics`, in
`meta_info`; older names: spec_proposed_drafts, spec_accepted_drafts) and llama.cpp/tools/server/server-context.cpp
(`print_timings`, and `timings` of a response), as of autumn 2026."""


@dataclass(frozen=True)
class Seconds:
    """Wall-clock time: of the prompt, the drafts, the target forwards, the verdicts, and all in all."""

    prefill: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    sample: float = 0.0
    total: float = 0.0


@dataclass(frozen=True)
class Metrics:
    """The figures of one or several generations; see `FIGURES`. A ratio with nothing below the line is None.

    tested_per_position: how often the text got so far with a draft for the position; `conditional_rates` divide by it.
    """

    rounds: int
    drafts: int
    drafted: int
    accepted: int
    emitted: int
    accepted_per_position: tuple[int, ...]
    tested_per_position: tuple[int, ...]
    seconds: Seconds = field(default_factory=Seconds)

    @classmethod
    def of(cls, *traces: Trace) -> Metrics:
        """Count traces of level 0 and up; several are summed, so that every ratio is weighted by its rounds."""
        rounds = [r for trace in traces for r in trace.rounds]
        found: dict[str, Any] = counts(rounds)
        return cls(
            rounds=len(rounds),
            drafts=sum(len(r.nodes.parent) > 1 for r in rounds),
            drafted=found["num_draft_tokens"],
            accepted=found["num_accepted_tokens"],
            emitted=found["num_emitted_tokens"],
            accepted_per_position=tuple(found["num_accepted_tokens_per_pos"]),
            tested_per_position=_at_least(map(_tested, rounds)),
            seconds=_seconds(traces, rounds),
        )

    @property
    def acceptance_rate(self) -> float | None:
        """See `FIGURES`."""
        return _ratio(self.accepted, self.drafted)

    @property
    def tau(self) -> float | None:
        """See `FIGURES`."""
        return _ratio(self.emitted, self.rounds)

    @property
    def tau_without_bonus(self) -> float | None:
        """See `FIGURES`."""
        return _ratio(self.accepted, self.rounds)

    @property
    def mean_acceptance_length(self) -> float | None:
        """See `FIGURES`."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def unconditional_rates(self) -> tuple[float, ...]:
        """See `FIGURES`."""
        return tuple(accepted / self.drafts for accepted in self.accepted_per_position)

    @property
    def conditional_rates(self) -> tuple[float, ...]:
        """See `FIGURES`; as many as there were positions tested."""
        padded = (*self.accepted_per_position, *[0] * len(self.tested_per_position))
        return tuple(accepted / tested for accepted, tested in zip(padded, self.tested_per_position, strict=False))

    @property
    def tokens_per_second(self) -> float | None:
        """See `FIGURES`."""
        return _ratio(self.emitted, self._inside)

    @property
    def cost_ratio(self) -> float | None:
        """See `FIGURES`."""
        return _ratio(self.seconds.draft, self.seconds.verify)

    @property
    def overhead_share(self) -> float | None:
        """See `FIGURES`."""
        return _ratio(self._inside - self.seconds.draft - self.seconds.verify, self._inside)

    @property
    def draft_share(self) -> float | None:
        """See `FIGURES`."""
        return _ratio(self.seconds.draft, self._inside)

    @property
    def verify_share(self) -> float | None:
        """See `FIGURES`."""
        return _ratio(self.seconds.verify, self._inside)

    @property
    def _inside(self) -> float:
        """Seconds of the rounds, the prompt's left out."""
        return self.seconds.total - self.seconds.prefill

    def as_dict(self) -> dict[str, Any]:
        """Every figure by its name in `FIGURES`, and the seconds; ready for JSON."""
        figures = {name: getattr(self, name) for name in FIGURES}
        seconds = {name: round(value, 6) for name, value in vars(self.seconds).items()}
        return {**{k: list(v) if isinstance(v, tuple) else v for k, v in figures.items()}, "seconds": seconds}


def _ratio(above: float, below: float) -> float | None:
    return above / below if below > 0 else None


def _tested(r: Round) -> int:
    """How many positions of the round's draft decided something: the accepted ones, and the one that was rejected.

    Where the text ended at an accepted token, whatever the verifier tested beyond it decided nothing.
    """
    accepted = min(len(r.path) - 1, r.kept)
    ended = r.cut is not None and r.kept <= len(r.path) - 1
    deeper = not ended and r.path[-1] in r.nodes.parent
    return accepted + deeper


def _at_least(values: Iterable[int]) -> tuple[int, ...]:
    """How many of the values are at least 1, 2, ..., up to the largest."""
    values = list(values)
    return tuple(sum(v > i for v in values) for i in range(max(values, default=0)))


def _seconds(traces: Iterable[Trace], rounds: Iterable[Round]) -> Seconds:
    parts: dict[str, int] = dict.fromkeys(("prefill", "draft", "verify", "sample", "total"), 0)
    clocks: list[Mapping[Any, int]] = [*(trace.footer.ns for trace in traces), *(r.ns for r in rounds)]
    for clock in clocks:
        for name, value in clock.items():
            parts[name] += value
    return Seconds(**{name: value / 1e9 for name, value in parts.items()})
