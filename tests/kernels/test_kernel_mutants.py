"""Known bugs, planted into a private copy of the verification kernels one at a time: a check must see each.

The numbers are those of `specdecode_ref.fidelity.mutants`, of which these are the ones that a kernel can have. A check
is a round on which the kernel as it is decides like the reference.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import import_module, invalidate_caches
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import specdecode_kernels
import torch
from specdecode_kernels import verify as sound

from specdecode_ref.batched import verify as reference
from specdecode_ref.batched.records import DETERMINISTIC, WITH, WITHOUT, Drafts, Rules
from specdecode_ref.sampling import SamplingRule

ALMOST_ONE = 1 - 2.0**-53
PACKAGE = Path(specdecode_kernels.__file__).parent

Round = tuple[str, torch.Tensor, Drafts, Rules, torch.Tensor, torch.Tensor]
"""The verifier's name, then what it takes."""


def rounds(
    name: str, logits: torch.Tensor, drafts: Drafts, accept: object, emit: object, temperature: float = 1.0
) -> Round:
    accept, emit = (torch.as_tensor(x, dtype=torch.float64) for x in (accept, emit))
    return name, logits, drafts, Rules.of([SamplingRule(temperature=temperature)] * len(logits)), accept, emit


def a_chain() -> Round:
    """Drawn tokens, some accepted, some rejected, one draft whole; then certain ones."""
    generator = torch.Generator().manual_seed(4)
    logits, draft = 2 * torch.randn(2, 5, 3, 7, generator=generator)
    tokens = torch.zeros(5, 3, dtype=torch.int64)
    tokens[:, 1:] = draft[:, :2].softmax(-1).flatten(0, 1).multinomial(1, generator=generator).view(5, 2)
    drafts = Drafts.chains(tokens, draft)
    drafts.draws[4:] = DETERMINISTIC
    accept, emit = torch.rand(2, 5, 3, dtype=torch.float64, generator=generator)
    at = tokens[:, 1:2]
    p, q = (x[:, 0].double().softmax(-1).gather(1, at)[:, 0] for x in (logits, draft))
    accept[::2, 1] = (0.9 * p / q).clamp(max=ALMOST_ONE)[::2]  # just accepted, the others just not
    accept[1::2, 1] = (1.1 * p / q).clamp(max=ALMOST_ONE)[1::2]
    accept[0] = 0.0
    cdf = logits[:, 0].double().softmax(-1).cumsum(1)
    beyond, before = cdf.gather(1, at)[:, 0], cdf.gather(1, (at - 1).clamp(min=0))[:, 0] * (at[:, 0] > 0)
    emit[1::2, 0] = ((beyond + before) / 2)[1::2]  # where p, but no residual, would give the rejected token again
    return rounds("chain", logits, drafts, accept, emit)


def an_impossible_token() -> Round:
    """p(x) = 0 and a coin of 0."""
    logits = torch.tensor([[[-torch.inf, 0.0], [0.0, 0.0]]])
    return rounds("chain", logits, Drafts.chains(torch.tensor([[0, 0]])), [[0.0, 0.0]], [[0.5, 0.5]])


def no_law() -> Round:
    logits = torch.full((1, 1, 3), float("nan"))
    return rounds("chain", logits, Drafts.chains(torch.tensor([[0]])), [[0.5]], [[0.5]])


def ties() -> Round:
    """Two equal maxima, greedy."""
    logits = torch.tensor([[[0.0, 2.0, 2.0, 1.0]]])
    return rounds("chain", logits, Drafts.chains(torch.tensor([[0]])), [[0.5]], [[0.5]], temperature=0.0)


def a_placeholder() -> Round:
    """-1 behind one drafted token that is accepted."""
    logits = torch.tensor([[[0.0, 9.0], [0.0, 0.0], [0.0, 9.0]]])
    return rounds("chain", logits, Drafts.chains(torch.tensor([[0, 1, -1]])), [[0.0] * 3], [[0.2] * 3])


def siblings() -> Round:
    """Two or three children of the root: with replacement, without, and drawn beside certain."""
    law = torch.tensor([0.4, 0.3, 0.2, 0.1])
    logits = law.log().expand(3, 4, 4).contiguous()
    draft = torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(3, 4, 4).contiguous()
    tokens = torch.tensor([[0, 3, 2, 3], [0, 3, 2, 1], [0, 3, 2, 2]])
    draws = torch.tensor([[0, WITH, WITH, WITH], [0, WITHOUT, WITHOUT, WITHOUT], [0, WITH, DETERMINISTIC, WITH]])
    parents = torch.tensor([[-1, 0, 0, 0]]).expand(3, 4)
    # With replacement p_eff(2) = 0, as q(2) > p(2). In the other two p_eff(2) = 3/7: rejected, as q_eff(2) is 1/2 and
    # not 0.3, and as the test of a certain child has no q at all.
    logits[1:] = torch.tensor([0.1, 0.4, 0.45, 0.05]).log()
    accept = [[0.0, 0.9, 0.3, 0.9], [0.0, 0.9, 0.99, 0.9], [0.0, 0.9, 0.7, 0.9]]
    return rounds("tree", logits, Drafts(tokens, parents, draws, draft), accept, [[0.3] * 4] * 3)


CHECKS: dict[str, Callable[[], Round]] = {
    check.__name__: check for check in (a_chain, an_impossible_token, no_law, ties, a_placeholder, siblings)
}


class Mutant(NamedTuple):
    """`old` becomes `new` in the file, and the check sees it."""

    check: str
    file: str
    old: str
    new: str


ACCEPT = "accepted = (u * q < p)"
PICK = "chosen = pick_token(left.to(tl.float64), coin, data, pair_mass, WIDTH, BLOCK, PLAIN)"
ROW = "    row = first + stop\n"
EARLIER = "    stop = tl.where(rejected, stop, tl.maximum(stop - 1, 0))\n"
FIRST = "tl.min(tl.where(x == peak[:, None], index, NOWHERE), 1)"
LAST = "tl.max(tl.where(x == peak[:, None], index, -1), 1)"
FRESH = "fresh = weights(score_x, anchor, scale).to(tl.float64) / remains"
SEEN = "            p_seen = tl.where(node == child, r_x,"
CERTAIN = "q_now = tl.where(draw == DETERMINISTIC, "
MUTANTS: dict[str, Mutant] = {
    "M01 test inverted": Mutant("a_chain", "verify_chain", ACCEPT, "accepted = (u * p < q)"),
    "M02 residual is p": Mutant("a_chain", "emission", "return tl.maximum(p - q, 0.0)", "return p"),
    "M05 argmax on rejection": Mutant("a_chain", "verify_chain", PICK, "chosen = entry(best_p, stop)"),
    "M11 rows off by one": Mutant("a_chain", "verify_chain", "+ i.to(tl.int64) *", "+ (i + 1).to(tl.int64) *"),
    "M12 bonus from the row before": Mutant("a_chain", "verify_chain", ROW, EARLIER + ROW),
    "M16 accept coin emits": Mutant("a_chain", "verify_chain", "tl.load(emit + row)", "tl.load(accept + row + 1)"),
    "M18 <= for <": Mutant("an_impossible_token", "verify_chain", ACCEPT, "accepted = (u * q <= p)"),
    "M20 NaN gives token 0": Mutant("no_law", "verify_chain", "where(bad, -1, entry", "where(bad, 0, entry"),
    "M23 certain test, drawn residual": Mutant("a_chain", "verify_chain", ACCEPT, "accepted = (u < p)"),
    "M24 q not renormalised": Mutant(
        "siblings", "verify_tree", FRESH, FRESH.replace("anchor", "top_q").replace("remains", "total_q")
    ),
    "M25 siblings against the first p": Mutant("siblings", "verify_tree", SEEN, "            r_x = p_x\n" + SEEN),
    "M28 certain child as drawn": Mutant("siblings", "verify_tree", CERTAIN + "1.0", CERTAIN + "q_x"),
    "M41 last of equals": Mutant("ties", "row_stats", FIRST, LAST),
    "M45 -1 is a token": Mutant("a_placeholder", "verify_chain", "other=-1) < 0)", "other=-1) < -1)"),
}


def sees(check: str, module: ModuleType) -> bool:
    """True where the module's kernel decides otherwise than the reference, or tests with other probabilities."""
    name, *arguments = CHECKS[check]()
    out = getattr(module, f"verify_{name}")(*arguments)
    owed = getattr(reference, f"verify_{name}")(*arguments)
    same = all(torch.equal(getattr(out, c), getattr(owed, c)) for c in ("path", "token", "kind", "status"))
    return not same or not torch.allclose(out.p_eff, owed.p_eff, rtol=1e-4, equal_nan=True)


@pytest.fixture
def plant(tmp_path: Path) -> Iterator[Callable[[Mutant, str], ModuleType]]:
    """Makes a private copy of the package with one change and gives its `verify`."""
    before = set(sys.modules)

    def planted(mutant: Mutant, name: str) -> ModuleType:
        folder = tmp_path / name
        shutil.copytree(PACKAGE, folder, ignore=shutil.ignore_patterns("__pycache__", "bench"))
        for file in folder.glob("*.py"):
            text = file.read_text(encoding="utf-8")
            if file.stem == mutant.file:
                assert mutant.old in text, "the patch no longer applies"
                text = text.replace(mutant.old, mutant.new)
            file.write_text(text.replace("specdecode_kernels", name), encoding="utf-8")
        sys.path.insert(0, str(tmp_path))
        invalidate_caches()
        return import_module(f"{name}.verify")

    yield planted
    if str(tmp_path) in sys.path:
        sys.path.remove(str(tmp_path))
    for module in set(sys.modules) - before:
        if module.startswith("planted_"):
            del sys.modules[module]


@pytest.mark.parametrize("check", CHECKS)
def test_the_kernel_as_it_is_passes(check: str) -> None:
    assert not sees(check, sound)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_seen(name: str, plant: Callable[[Mutant, str], ModuleType]) -> None:
    module = plant(MUTANTS[name], "planted_" + name.split()[0].lower())
    assert module.__file__ != sound.__file__
    assert sees(MUTANTS[name].check, module)
