"""The decode loop on the device: the rounds of `specdecode_ref.decode`, for a whole batch, from kernels.

    drafts -> topology -> one target forward -> coins -> verdicts -> commit -> the text grows

Nothing inside a round is read by the host, and every shape is fixed, so on a CUDA device a round is one CUDA graph;
what it drafted and emitted is read once, when it is over. The same seed gives the same tokens as the loop in PyTorch,
except where rounding decides: there a coin lies within some 1e-6 of a boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from specdecode_kernels import coins, drafting, picking, static_model, tree, verify
from specdecode_kernels.launch import interpreted
from specdecode_kernels.round import MOST_IN_A_TREE, chain_limit
from specdecode_kernels.row_stats import BLOCKS
from specdecode_ref.backends import Job, Played
from specdecode_ref.batched.records import DRAWS, Drafts, Rules, Verdicts
from specdecode_ref.coins import Coins
from specdecode_ref.drafters.medusa import Medusa
from specdecode_ref.errors import NotApplicableError
from specdecode_ref.models.transformer import Transformer
from specdecode_ref.trace import Nodes
from specdecode_ref.types import Test, Verdict

VERIFIERS = {"chain": verify.verify_chain, "block": verify.verify_block, "tree": verify.verify_tree}
"""The rules there are kernels for."""

DEEPEST_LEVEL = 2
"""Of a trace: the next one records whole laws, and none leaves the device."""

SHARED = 160 * 1024
"""Bytes of shared memory in a multiprocessor, as A100s and H100s have: a program of attention takes 112 kB and more."""


class Record(NamedTuple):
    """What one round leaves for the host to read."""

    drafts: Drafts
    accept_coins: Tensor
    verdicts: Verdicts


class TritonBackend:
    """Fulfils `specdecode_ref.backends.Backend`."""

    name = "triton"

    def objection(self, job: Job) -> str | None:
        """See `Backend.objection`."""
        if complaint := _objection_to(job.model.device):
            return complaint
        if job.level > DEEPEST_LEVEL:
            return f"a trace of level {job.level} records whole laws, and none leaves the device"
        if job.verifier not in ("auto", *VERIFIERS):
            return f"there is no kernel for the verifier '{job.verifier}'"
        if job.verifier in ("chain", "block") and isinstance(job.drafter, Medusa):
            return f"Medusa's heads draft trees, and '{job.verifier}' judges chains only"
        try:
            Rules.of([job.rule])
        except NotApplicableError as error:
            return f"the sampling rule has {error.came}"
        return (
            static_model.objection(job.model) or drafting.objection_to(job.drafter, job.model.device) or _too_large(job)
        )

    def start(
        self, job: Job, prompts: Sequence[Sequence[int]], limits: Sequence[int], keys: Sequence[Coins]
    ) -> DeviceRounds:
        """See `Backend.start`."""
        return DeviceRounds(job, prompts, limits, keys)


BACKEND = TritonBackend()
"""What the entry point names."""


class DeviceRounds:
    """Fulfils `specdecode_ref.backends.Rounds`."""

    def __init__(
        self, job: Job, prompts: Sequence[Sequence[int]], limits: Sequence[int], keys: Sequence[Coins]
    ) -> None:
        assert isinstance(job.model, Transformer)
        device, batch, longest = job.model.device, len(prompts), max(limits)
        self._level, self._device = job.level, device
        self._proposer = drafting.proposer(job.drafter, job.model, batch, longest)
        self._rule = job.verifier if job.verifier != "auto" else "chain" if self._proposer.chain else "tree"
        self._target = static_model.StaticModel(job.model, batch, longest + self._proposer.nodes)
        seen = self._target.prefill([p[:-1] for p in prompts], self._proposer.layers)
        self._proposer.start(prompts, seen)
        width = longest + self._proposer.nodes
        self._text = drafting.Text(
            tokens=torch.tensor([[*p, *[0] * (width - len(p))] for p in prompts], device=device),
            total=torch.tensor([len(p) for p in prompts], device=device),
            limits=torch.tensor(limits, device=device),
            sequences=torch.tensor([key.sequence for key in keys], device=device),
            seed=keys[0].seed,
            rules=Rules.of([job.rule] * batch, device),
        )
        self._forget()

    def play(self) -> list[Played]:
        """See `Rounds.play`."""
        with torch.cuda.device(self._device.index if self._device.type == "cuda" else -1):  # where Triton launches
            record = self._replayed()
        return _read(record, self._level, self._rule)

    def select(self, rows: Sequence[int]) -> None:
        """See `Rounds.select`. Other shapes are another graph."""
        for part in (self._target, self._proposer, self._text):
            part.select(rows)
        self._forget()

    def _forget(self) -> None:
        self._warm = False
        self._captured: tuple[torch.cuda.CUDAGraph, Record] | None = None

    def _replayed(self) -> Record:
        """One round: the first after a change of shapes as it is written, the second captured, the others replayed."""
        if self._device.type != "cuda" or not self._warm:
            self._warm = True
            return self._round()
        if self._captured is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._captured = graph, self._round()
        graph, record = self._captured
        graph.replay()
        return record

    def _round(self) -> Record:
        text, count = self._text, self._proposer.nodes
        drafts = self._proposer.propose(text)
        topology = tree.topology(drafts.parents.masked_fill(drafts.tokens < 0, -1))
        logits, features = self._target.forward(drafts.tokens, topology, self._proposer.layers)
        accept = coins.accept(text.seed, text.sequences, text.total, count)
        emits = coins.emits(text.seed, text.sequences, text.total, count)
        verdicts = VERIFIERS[self._rule](logits, drafts, text.rules, accept, emits)
        self._target.commit(verdicts.path, verdicts.length)
        self._proposer.observe(verdicts, features)
        _append(text, drafts, verdicts)
        return Record(drafts, accept, verdicts)


def _objection_to(device: torch.device) -> str | None:
    """Why kernels cannot run there, or None."""
    gpu = device.type == "cuda"
    if gpu and interpreted(picking.first_above):
        return "TRITON_INTERPRET is set, so no kernel would run on the GPU; unset it"
    if not gpu and not interpreted(picking.first_above):
        return f"the model is on '{device}'; kernels run on CUDA, or slowly with TRITON_INTERPRET=1"
    if gpu and (memory := torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor) < SHARED:
        return f"this GPU has {memory // 1024} kB of shared memory in a multiprocessor, not {SHARED // 1024}"
    return None


def _too_large(job: Job) -> str | None:
    """Why the verification kernels would refuse these drafts or this vocabulary, or None."""
    vocab, nodes = job.model.vocab_size, drafting.longest_chain(job.drafter)
    if vocab > BLOCKS[-1][0]:
        return f"a vocabulary of {vocab} tokens is above {BLOCKS[-1][0]}"
    most = MOST_IN_A_TREE if job.verifier == "tree" else chain_limit(vocab)
    return None if nodes <= most else f"a chain of {nodes - 1} drafted tokens is longer than {most - 1}"


def _append(text: drafting.Text, drafts: Drafts, verdicts: Verdicts) -> None:
    """The emitted tokens behind the committed ones: those of the path, then the last."""
    column = torch.arange(1, drafts.tokens.shape[1] + 1, device=text.tokens.device)
    following = torch.cat((verdicts.path[:, 1:], verdicts.path.new_full((len(verdicts.path), 1), -1)), 1)
    emitted = drafts.tokens.gather(1, following.clamp(min=0))
    emitted = torch.where(column == verdicts.length[:, None], verdicts.token[:, None], emitted)
    text.tokens.scatter_(1, text.total[:, None] + column - 1, emitted)
    text.total += verdicts.length


def _read(record: Record, level: int, rule: str) -> list[Played]:
    """A round as the host's records: what there was no node for is left out."""
    drafts, accept, verdicts = record
    columns = drafts.tokens.tolist(), drafts.parents.tolist(), drafts.draws.tolist()
    judged = verdicts.verdicts(accept, upwards=rule == "block")
    played = [_played(*row, rule) for row in zip(*columns, judged, strict=True)]
    return played if level >= 2 else [Played(replace(nodes, q=(), p=()), verdict) for nodes, verdict in played]


def _played(tokens: list[int], parents: list[int], draws: list[int], verdict: Verdict, rule: str) -> Played:
    place = {0: 0}
    for node in range(1, len(tokens)):
        if tokens[node] >= 0 and parents[node] in place:
            place[node] = len(place)
    kept = list(place)
    above = (-1, *(place[parents[node]] for node in kept[1:]))
    tests = tuple(replace(test, node=place[test.node]) for test in verdict.tests)
    nodes = Nodes(
        parent=above,
        draw=(None, *(DRAWS[draws[node]] for node in kept[1:])),
        token=tuple(tokens[node] for node in kept),
        **_columns(above, tests, rule),
    )
    return Played(nodes, replace(verdict, path=tuple(place[node] for node in verdict.path), tests=tests))


def _columns(parents: tuple[int, ...], tests: tuple[Test, ...], rule: str) -> dict[str, tuple[float | None, ...]]:
    """p and q of the nodes: those of a first sibling are its test's, of the others none has been kept."""
    known = {} if rule == "block" else {t.node: t for t in tests if t.node == parents.index(parents[t.node])}
    found = [known.get(node) for node in range(len(parents))]
    return {"q": tuple(t.q_eff if t else None for t in found), "p": tuple(t.p_eff if t else None for t in found)}
