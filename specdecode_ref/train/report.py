"""The report beside a trained head: a model card with the figures, the history as JSON, and a plot of the loss."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specdecode_ref.train.files import save_text
from specdecode_ref.train.fit import History

CARD = """# {kind} head for {target}

A draft for speculative decoding: it only guesses, and the target checks every guess, so it can make text faster or
slower but never different. Made by

    {command}

| | |
| --- | --- |
| target | {target}, revision {revision} |
| parameters | {parameters:,} trained; embeddings and LM head are the target's |
| text | {tokens:,} tokens in {conversations:,} conversations, by the target itself; {held_out:,} more held out |
| time | {text_minutes} min for the text in this run, {minutes} min of training, on {machine} |
| made with | specdecode-ref {version} |

What the target was asked: to go on from an empty user's turn or its first words, to complete functions of installed
Python packages, to summarise, answer about and translate passages from their documentation. No benchmark was read.

Measured on the held-out text, given the tokens before, at temperature 0 of the target: how often the draft's best
guess, and one of its best two, four and eight, is what the target chooses.

| depth | best | two | four | eight |
| --- | --- | --- | --- | --- |
{rows}

Licence: that of the target ({target}: see its own card), whose text it was made from. It knows what its target says and
shares its faults. It is of no use without its target.
"""


def write_report(folder: Path, about: Mapping[str, Any], history: History) -> None:
    """README.md, training.json and loss.svg in `folder`. Raises ModelError where they cannot be written."""
    save_text(folder / "README.md", card(about))
    save_text(folder / "training.json", json.dumps({**about, "history": asdict(history)}) + "\n")
    save_text(folder / "loss.svg", plot(history))


def card(about: Mapping[str, Any]) -> str:
    """The model card, in Markdown."""
    rows = []
    for depth, ranks in enumerate(about["acceptance"], 1):
        shares = (sum(ranks[:count]) for count in (1, 2, 4, 8))
        rows.append(f"| {depth} | " + " | ".join(f"{share:.1%}" for share in shares) + " |")
    kind, target = about["kind"], about["target"]
    given = " ".join(f"--{name} {value}" for name, value in about["options"].items())
    return CARD.format(
        kind=kind,
        target=target["name"],
        revision=target["revision"],
        command=f"specdecode train {kind} --model {target['name']} {given} --out FOLDER",
        parameters=about["parameters"],
        machine=about["machine"],
        version=about["version"],
        text_minutes=round(about["seconds"]["text"] / 60),
        minutes=round(about["seconds"]["training"] / 60),
        rows="\n".join(rows),
        **about["text"],
    )


def plot(history: History, width: int = 640, height: int = 240) -> str:
    """The loss over the steps as an SVG, on axes from zero."""
    steps = [step for step, _ in history.losses] or [1]
    most = max((loss for _, loss in history.losses), default=1.0)
    left, bottom = 48, 28

    def at(step: float, loss: float) -> str:
        x = left + (width - left - 12) * step / steps[-1]
        return f"{x:.1f},{height - bottom - (height - bottom - 12) * loss / most:.1f}"

    line = " ".join(at(step, loss) for step, loss in history.losses)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="11"><title>Training loss over {steps[-1]} steps</title>'
        f'<path d="M{at(0, most)} L{at(0, 0)} L{at(steps[-1], 0)}" fill="none" stroke="#888"/>'
        f'<polyline points="{line}" fill="none" stroke="#1f6fb2" stroke-width="1.5"/>'
        f'<text x="4" y="16">{most:.2f}</text><text x="{left - 14}" y="{height - bottom}">0</text>'
        f'<text x="{width - 90}" y="{height - 8}">step {steps[-1]}</text></svg>\n'
    )
