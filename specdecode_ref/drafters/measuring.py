"""Measuring a drafter beside its target, in about a minute: what steps cost here, and what would be accepted.

The target first writes on after some prompts, all at once, at temperature 0. Then the drafter grows a wide tree at
every place of those texts, as if each round had begun there, and the text itself says which nodes the target would have
accepted: no target step is spent on verifying. See `calibration` for what is kept, `choice` for what it is good for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Protocol

import torch
from torch import Tensor

from specdecode_ref.coins import Coins
from specdecode_ref.drafters.base import Drafter
from specdecode_ref.drafters.calibration import Calibration, Draft, Subject
from specdecode_ref.drafters.growth import Watched
from specdecode_ref.drafters.shapes import MOST_NODES, Dynamic, Shape
from specdecode_ref.errors import InputError
from specdecode_ref.models.base import Model
from specdecode_ref.sampling import SamplingRule
from specdecode_ref.tree import DraftTree
from specdecode_ref.types import Context, Verdict

PROMPTS = (
    "Write a Python function that returns the longest word of a sentence, and explain how it works.",
    "A baker makes 48 rolls and packs them in bags of six. She sells five bags. How many rolls are left? Think aloud.",
    "Summarise: The old ferry across the bay stopped running in spring. A new bridge carries cars and bicycles, but "
    "the people of the island miss the harbour café, where they used to wait, talk and watch the boats come in.",
    "Translate English to German: The train to the coast leaves at seven, and we should not be late again.",
    "What causes the tides, and why are there two of them a day?",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Write an e-mail to a neighbour to ask whether she could water the plants for a week.",
    'Complete the code:\n\ndef is_palindrome(text: str) -> bool:\n    """Whether text reads the same backwards."""',
)
"""What the target writes on from: code, sums, prose, translation, facts."""

ROWS, NODES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 64), (1, 2, 4, 8)
"""Sizes of a target step, and of a draft level, whose cost is measured."""

PLACES, AHEAD = 64, 8
"""How many places of a text are drafted at, and how many levels deep."""

WIDTH, RANKS = 4, 8
"""Nodes opened on a level, and children of each, in the wide trees."""

CONTEXT, LEVELS = 256, 4
"""Tokens in the cache, and levels of the trees, while costs are measured."""

GREEDY = SamplingRule(temperature=0)

Progress = Callable[[float, str], None]
"""(share of the work that is done, what comes next)."""


class Tokenizer(Protocol):
    """What measuring needs of a tokenizer; `models.tokenizer.Tokenizer` has it."""

    eos_ids: tuple[int, ...]
    chat_template: str | None

    def chat(self, messages: str) -> list[int]:
        """Token ids of a user's turn, up to where the assistant is to speak."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...


def calibrate(
    target: Model,
    make: Callable[[Shape], Drafter],
    tokenizer: Tokenizer,
    subject: Subject,
    seconds: float = 60.0,
    progress: Progress = lambda share, what: None,
) -> Calibration:
    """Measure. `make` gives the drafter with some shape.

    seconds: after so long it makes do with shorter texts and fewer repetitions, though never with none.

    Raises InputError where the target's context is too short for a text, or the drafter drafts nothing.
    """
    begin = time.monotonic()
    room = target.context_length - PLACES - AHEAD
    if room < 2:
        raise InputError(f"a context of {PLACES + AHEAD + 2} tokens or more", target.context_length, "name a tree")
    ask = tokenizer.chat if tokenizer.chat_template else tokenizer.encode
    prompts = [ask(prompt)[-room:] for prompt in PROMPTS]

    progress(0.0, "the target writes some text")
    texts = _written(target, prompts, begin + 0.25 * seconds)
    everything = [token for prompt, text in zip(prompts, texts, strict=True) for token in (*prompt, *text)]
    sample = everything[: min(CONTEXT, room) + 2 * AHEAD]

    progress(0.25, "what a target step costs")
    rows = _rows(target, make, sample[: -2 * AHEAD], begin + 0.45 * seconds)
    progress(0.45, "what a draft costs")
    start, level = _levels(target, make, sample, begin + 0.55 * seconds)

    drafts: list[tuple[Draft, ...]] = []
    for prompt, text in zip(prompts, texts, strict=True):
        progress(0.55 + 0.45 * len(drafts) / len(prompts), "what is accepted")
        share = max(0.0, begin + seconds - time.monotonic()) / (len(prompts) - len(drafts))
        drafts.append(_drafts(target, make, prompt, text, tokenizer.eos_ids, time.monotonic() + share))
    progress(1.0, "done")
    return Calibration(subject, rows, start, level, tuple(drafts))


def _written(target: Model, prompts: Sequence[Sequence[int]], until: float) -> list[list[int]]:
    """What the target writes after each prompt at temperature 0, one forward a token for all of them."""
    cache = target.new_cache(len(prompts), max(map(len, prompts)) + PLACES + AHEAD)
    target.prefill([prompt[:-1] for prompt in prompts], cache)
    last = torch.tensor([prompt[-1:] for prompt in prompts], device=target.device)
    texts: list[list[int]] = [[] for _ in prompts]
    for length in range(PLACES + AHEAD):
        if length >= 2 * AHEAD and time.monotonic() > until:
            break
        last = target.forward(last, [[-1]] * len(prompts), cache).logits.argmax(-1)
        cache.commit([[0]] * len(prompts))
        for text, token in zip(texts, last[:, 0].tolist(), strict=True):
            text.append(token)
    return texts


def _rows(target: Model, make: Callable[[Shape], Drafter], tokens: Sequence[int], until: float) -> dict[int, float]:
    """Seconds of a target step, by its rows."""
    features = make(Dynamic(1, 1, 1)).features
    cache = target.new_cache(1, len(tokens) + max(ROWS))
    target.prefill([tokens], cache)

    def step(rows: int) -> None:
        target.forward(
            torch.full((1, rows), tokens[-1], device=target.device), [[-1, *[0] * (rows - 1)]], cache, features
        )
        cache.rollback()

    return _medians({rows: partial(step, rows) for rows in ROWS}, until, target.device)


def _levels(
    target: Model, make: Callable[[Shape], Drafter], tokens: Sequence[int], until: float
) -> tuple[float, dict[int, float]]:
    """Seconds of a draft of one level, and of each further one by the nodes it opens."""
    prompt, text = tokens[: -2 * AHEAD], tokens[-2 * AHEAD :]
    shapes = {0: Dynamic(1, 1, 1)} | {width: Dynamic(LEVELS, width, MOST_NODES) for width in NODES}
    features = _features(target, make(shapes[0]), tokens)
    walks = {width: _proposals(make(shape), prompt, text, features) for width, shape in shapes.items()}
    took = _medians({width: partial(next, walk) for width, walk in walks.items()}, until, target.device)
    return took[0], {width: max(took[width] - took[0], 1e-6) / (LEVELS - 1) for width in NODES}


def _medians(actions: Mapping[int, Callable[[], object]], until: float, device: torch.device) -> dict[int, float]:
    """Median seconds of each action. They take turns, so that a slow moment strikes all alike; the first is to warm up.

    At least three turns count.
    """
    took: dict[int, list[float]] = {name: [] for name in actions}
    for turn in range(10):
        if turn > 3 and time.monotonic() > until:
            break
        for name, act in actions.items():
            begin = time.perf_counter()
            act()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            took[name].append(time.perf_counter() - begin)
    return {name: median(seconds[1:]) for name, seconds in took.items()}


def _drafts(
    target: Model,
    make: Callable[[Shape], Drafter],
    prompt: Sequence[int],
    text: Sequence[int],
    eos: Sequence[int],
    until: float,
) -> tuple[Draft, ...]:
    """A wide draft at every place of which the text knows how it goes on; only the first ones when the time is over."""
    end = next((i + 1 for i, token in enumerate(text) if token in eos), None)
    text = text[:end]
    places = text if end else text[:-AHEAD]
    told: list[list[float]] = []
    drafter = make(Watched(AHEAD, WIDTH, MOST_NODES, ranks=RANKS, tell=told.append))
    drafts = []
    features = _features(target, drafter, [*prompt, *text])
    for place, tree in enumerate(_proposals(drafter, prompt, places, features)):
        scores = told.pop() if told else [0.0] * len(tree)  # a lookup that took the round was sure of it all
        rounded = tuple(max(round(score, 4), -999.0) for score in scores)
        drafts.append(Draft(tree.parents, rounded, _followed(tree, text[place:])))
        if time.monotonic() > until:
            break
    return tuple(drafts)


def _features(target: Model, drafter: Drafter, tokens: Sequence[int]) -> Sequence[Tensor]:
    """What the drafter wants to see of the target, [N, hidden] a layer."""
    if not drafter.features:
        return ()
    return target.prefill([tokens], target.new_cache(1, len(tokens)), drafter.features)[0]


def _proposals(
    drafter: Drafter, prompt: Sequence[int], text: Sequence[int], features: Sequence[Tensor]
) -> Iterator[DraftTree]:
    """The drafter's tree at every place of the text, each as that of a round which starts there.

    features: [prompt + text, hidden], or more.
    """
    proposer = drafter.start(prompt, GREEDY, [feature[: len(prompt) - 1] for feature in features])
    tokens = list(prompt)
    for token in text:
        yield proposer.propose(Context(tokens, len(prompt), AHEAD), Coins(0))
        root = len(tokens) - 1
        verdict = Verdict((0,), token, "target", (), torch.empty(0))
        proposer.observe(verdict, [feature[root : root + 1] for feature in features])
        tokens.append(token)


def _followed(tree: DraftTree, text: Sequence[int]) -> tuple[int, ...]:
    """The path of the tree that the text takes, the root first."""
    path = [0]
    for token in text:
        chosen = [child for child in tree.children[path[-1]] if tree.tokens[child] == token]
        if not chosen:
            break
        path += chosen
    return tuple(path)
