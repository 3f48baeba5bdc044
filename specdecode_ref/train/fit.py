"""Fit a recipe to a corpus: AdamW, a warm-up and a cosine, checkpoints that resume, and what became of it by depth.

A run is a function of its plan: the same text, seed and epochs give the same weights up to rounding, whether it was
interrupted or not.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from specdecode_ref.errors import InputError, ModelError
from specdecode_ref.train.corpus import Corpus, Place
from specdecode_ref.train.files import save_tensors
from specdecode_ref.train.labels import Tally, loss
from specdecode_ref.train.recipes import Guess, Recipe

DEEPER = 0.8
"""A guess one level deeper counts so much less: it is reached less often."""

WARM_UP = 50
"""Steps until the full learning rate."""


MOMENTS = ("exp_avg", "exp_avg_sq")
"""What AdamW remembers of every weight."""


@dataclass(frozen=True)
class Plan:
    """epochs: passes over the corpus. rate: the highest learning rate. batch: conversations a step.

    minutes: between checkpoints. check: conversations that the validation at a checkpoint reads.
    """

    epochs: int = 3
    seed: int = 0
    rate: float = 2e-3
    batch: int = 3
    minutes: float = 5.0
    check: int = 64


@dataclass
class History:
    """What a run has seen: (step, loss) now and then, and by validation the acceptance of each depth and rank."""

    losses: list[tuple[int, float]] = field(default_factory=list)
    acceptance: list[tuple[int, list[list[float]]]] = field(default_factory=list)
    seconds: float = 0.0


def fit(
    recipe: Recipe,
    corpus: Corpus,
    held_out: Corpus,
    plan: Plan,
    folder: Path,
    progress: Callable[[int, int, float, History], None] = lambda *_: None,
) -> History:
    """Train `recipe.weights` in place. Checkpoints go to `folder`, and a run that finds one there goes on from it.

    progress: is told the step, the number of steps, the mean loss of late and the history.

    Raises InputError where the checkpoint is that of another plan; ModelError where it cannot be read or written, or
    the loss is no longer a number.
    """
    weights = {name: w.to(corpus.device, copy=True).requires_grad_() for name, w in recipe.weights.items()}
    recipe.weights = weights
    optimizer = _optimizer(weights)
    batches = [corpus.epoch(plan.batch, plan.seed * 1009 + epoch) for epoch in range(plan.epochs)]
    steps = sum(map(len, batches))
    state = _State(folder, plan, steps, {name: list(w.shape) for name, w in weights.items()})
    step, history = state.load(weights, optimizer)
    begin, saved = time.monotonic() - history.seconds, time.monotonic()
    late = history.losses[-1][1] if history.losses else 0.0
    for places in [p for epoch in batches for p in epoch][step:]:
        for group in optimizer.param_groups:
            group["lr"] = plan.rate * _schedule(step, steps)
        guesses = _guesses(recipe, corpus, places, step / steps)
        total = torch.stack([DEEPER**g.depth * loss(g.logits, g.ids, g.mass).mean() for g in guesses]).sum()
        now = total.item()
        if not math.isfinite(now):
            raise ModelError("a finite loss", now, "lower the learning rate and start again")
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        step += 1
        late = now if late == 0.0 else 0.98 * late + 0.02 * now
        if step % 25 == 0 or step == steps:
            history.losses.append((step, late))
        history.seconds = time.monotonic() - begin
        if step == steps or time.monotonic() - saved > 60 * plan.minutes:
            history.acceptance.append((step, validate(recipe, held_out, plan.check, plan.batch).acceptance()))
            state.save(step, weights, optimizer, history)
            saved = time.monotonic()
        progress(step, steps, late, history)
    for weight in weights.values():
        weight.requires_grad_(False)
    return history


@torch.no_grad()
def validate(recipe: Recipe, corpus: Corpus, conversations: int, batch: int = 3) -> Tally:
    """How a recipe guesses text that it was not trained on, given the tokens before: acceptance by depth and rank."""
    tally = Tally()
    places = corpus.places[:: max(1, len(corpus.places) // conversations)]
    for i in range(0, len(places), batch):
        for guess in _guesses(recipe, corpus, places[i : i + batch], 1.0):
            tally.add(guess.depth, guess.logits, guess.ids)
    return tally


def _guesses(recipe: Recipe, corpus: Corpus, places: Sequence[Place], done: float) -> Iterator[Guess]:
    return (guess for guess in recipe.guesses(corpus.batch(places), done) if len(guess.ids))


def _optimizer(weights: dict[str, Tensor]) -> torch.optim.AdamW:
    matrices = [w for w in weights.values() if w.dim() > 1]
    vectors = [w for w in weights.values() if w.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98))


def _schedule(step: int, steps: int) -> float:
    """The share of the learning rate: up in a straight line, then down along a cosine to a twentieth."""
    return min(1.0, (step + 1) / WARM_UP) * (0.05 + 0.95 * (0.5 + 0.5 * math.cos(math.pi * step / steps)))


class _State:
    """The checkpoint of a run: weights and both moments in one file, which appears whole or not at all."""

    def __init__(self, folder: Path, plan: Plan, steps: int, shapes: dict[str, list[int]]) -> None:
        self.path = folder / "checkpoint.safetensors"
        self.identity = json.dumps([asdict(plan) | {"minutes": 0, "check": 0}, steps, shapes], sort_keys=True)

    def load(self, weights: dict[str, Tensor], optimizer: torch.optim.AdamW) -> tuple[int, History]:
        from safetensors import SafetensorError, safe_open

        if not self.path.exists():
            return 0, History()
        try:
            with safe_open(self.path, framework="pt") as file:
                about = file.metadata() or {}
                if about.get("identity") != self.identity:
                    do = "name another folder, or delete the checkpoint to begin anew"
                    raise InputError(f"a checkpoint of this very run in {self.path}", "another plan or text", do)
                step, history = int(about["step"]), History(**json.loads(about["history"]))
                for name, weight in weights.items():
                    moments = {kind: file.get_tensor(f"{kind}/{name}").to(weight.device) for kind in MOMENTS}
                    optimizer.state[weight] = {"step": torch.tensor(float(step)), **moments}
                    weight.data.copy_(file.get_tensor(f"weight/{name}"))
        except InputError:  # a ValueError too, and no damage
            raise
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            came = f"a damaged one ({error})"
            raise ModelError(f"a checkpoint in {self.path}", came, "delete it to begin anew") from None
        return step, history

    def save(self, step: int, weights: dict[str, Tensor], optimizer: torch.optim.AdamW, history: History) -> None:
        tensors = {f"weight/{name}": weight.detach() for name, weight in weights.items()}
        for kind in MOMENTS:
            tensors |= {f"{kind}/{name}": optimizer.state[weight][kind] for name, weight in weights.items()}
        about = {"identity": self.identity, "step": str(step), "history": json.dumps(asdict(history))}
        save_tensors(self.path, tensors, about)
