"""A training run from nothing to a head that can be used: text, weights, and a report of what they cost and reached."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import specdecode_ref
from specdecode_ref.drafters.layouts.host import Host
from specdecode_ref.errors import InputError, UnknownNameError
from specdecode_ref.models.zoo import Loaded, read_json
from specdecode_ref.train import prompts, text
from specdecode_ref.train.corpus import Corpus
from specdecode_ref.train.files import save_text
from specdecode_ref.train.fit import History, Plan, fit, validate
from specdecode_ref.train.labels import RANKS
from specdecode_ref.train.recipes import DraftRecipe, EagleRecipe, MedusaRecipe, Recipe, Shared
from specdecode_ref.train.report import write_report

KINDS = ("draft", "medusa", "eagle")

LEAST = {"tokens": 1, "epochs": 1, "words": RANKS, "depths": 1, "layers": 1, "intermediate": 1}

DEEPEST = 16
"""The most guesses in a row: the shortest conversations have a few tokens more, so none is without a guess."""

Progress = Callable[[str, int, int, str], None]
"""(what is done, how far, of how much, in a few words) -> nothing."""


@dataclass(frozen=True)
class Order:
    """What is to be trained, and on how much.

    tokens: how much of the target's text is read; it writes what the folder `text` does not hold yet.
    words:  the draft vocabulary. depths: guesses a step in EAGLE's training-time test, or Medusa's heads.
    layers, intermediate: of the draft's transformer layers; of no meaning to Medusa.
    """

    kind: str
    out: Path
    text: Path
    tokens: int
    epochs: int
    words: int
    depths: int
    layers: int
    intermediate: int
    rate: float
    seed: int

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownNameError(f"one of {', '.join(KINDS)} to train", repr(self.kind), "choose one")
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise InputError(f"{name} of {least} or more", getattr(self, name), "choose a larger number")
        if self.depths > DEEPEST:
            raise InputError(f"depths of at most {DEEPEST}", self.depths, "choose about 4")
        if not 0 < self.rate < 1:
            raise InputError("a learning rate between 0 and 1", self.rate, "choose about 0.002")
        if not 0 <= self.seed < 2**32:
            raise InputError("a seed from 0 to 2^32 - 1", self.seed, "choose one in that range")


def run(order: Order, loaded: Loaded, progress: Progress) -> Path:
    """Train; the folder of the head, which `layouts.load` reads. What was begun before is gone on with."""
    began = time.monotonic()
    count = Host.of(loaded.model).layers
    layers = (count * 4 // 15, count * 8 // 15, count * 4 // 5, count)
    held_out, *train = write_text(order, loaded, layers, progress)
    wrote = time.monotonic() - began
    torch.manual_seed(order.seed)
    seen = {"eagle": list(range(len(layers))), "medusa": [len(layers) - 1], "draft": []}[order.kind]
    corpus, check = (Corpus(shards, seen, loaded.model.device) for shards in (train, [held_out]))
    vocabulary = min(order.words, loaded.model.vocab_size)
    shared = Shared.of(loaded.model, corpus.words(vocabulary, loaded.model.vocab_size))
    recipe = _recipe(order, shared, layers)
    plan = Plan(order.epochs, order.seed, order.rate)
    history = fit(recipe, corpus, check, plan, order.out / "run", _fitting(progress))
    tally = validate(recipe, check, 10**9)
    about = {
        "kind": order.kind,
        "target": {"name": loaded.name, "revision": loaded.revision},
        "options": {name: v for name, v in asdict(order).items() if name not in ("kind", "out", "text")},
        "parameters": sum(w.numel() for w in recipe.weights.values()),
        "text": {"tokens": corpus.tokens, "conversations": len(corpus.places), "held_out": check.tokens},
        "seconds": {"text": round(wrote), "training": round(history.seconds)},
        "acceptance": tally.acceptance(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "version": specdecode_ref.__version__,
    }
    recipe.save(order.out, {"target_revision": loaded.revision})
    write_report(order.out, about, history)
    return order.out


def write_text(order: Order, loaded: Loaded, layers: tuple[int, ...], progress: Progress) -> list[Path]:
    """The shards of the text, once the target has written what is missing: as many as hold the tokens that were asked
    for, after one more to validate with. Others that the folder may hold are left alone."""
    if loaded.tokenizer.chat_template is None:
        raise InputError("a target with a chat template to write text", f"{loaded.name} without one", "choose another")
    plan = text.Plan(longest=min(384, loaded.model.context_length), features=layers, seed=order.seed)
    count = -(-order.tokens // (plan.rows * plan.steps)) + 1
    note, about = order.text / "text.json", {"model": loaded.name, "revision": loaded.revision, **asdict(plan)}
    if note.exists() and read_json(note) != json.loads(json.dumps(about)):
        do = "name another folder with --text, or delete that one"
        raise InputError(f"text by {loaded.name} in {order.text}", "that of another model or plan", do)
    shards = [text.shard(order.text, number) for number in range(count)]
    missing = [number for number, shard in enumerate(shards) if not shard.exists()]
    if not missing:
        return shards
    progress("reading installed packages", 0, 1, "")
    sources = prompts.installed()

    def told(number: int, step: int) -> None:
        done = (missing.index(number) * plan.steps + step) * plan.rows
        progress("the target writes", done, len(missing) * plan.steps * plan.rows, "tokens")

    save_text(note, json.dumps(about, indent=1) + "\n")
    text.write(loaded.model, loaded.tokenizer, plan, missing, sources, order.text, told)
    return shards


def _recipe(order: Order, shared: Shared, layers: tuple[int, ...]) -> Recipe:
    if order.kind == "eagle":
        return EagleRecipe(shared, layers, order.depths, order.intermediate, order.layers)
    if order.kind == "medusa":
        return MedusaRecipe(shared, order.depths)
    return DraftRecipe(shared, order.layers, order.intermediate)


def _fitting(progress: Progress) -> Callable[[int, int, float, History], None]:
    def told(step: int, steps: int, late: float, history: History) -> None:
        first = [f"{ranks[0]:.0%}" for ranks in history.acceptance[-1][1]] if history.acceptance else []
        progress("training", step, steps, f"loss {late:.3f}" + (f", guesses right {' '.join(first)}" if first else ""))

    return told
