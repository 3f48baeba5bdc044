"""What the commands that decode have in common: from the options to a draft model, a drafter and token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specdecode_ref.cli import checks, screen
from specdecode_ref.errors import InputError
from specdecode_ref.trace import ModelInfo

if TYPE_CHECKING:
    from specdecode_ref.drafters.base import Drafter
    from specdecode_ref.drafters.calibration import Calibration
    from specdecode_ref.drafters.shapes import Shape, Wanted
    from specdecode_ref.models.zoo import Loaded


def draft_model(target: Loaded, name: str | None, drafters: Sequence[str], dtype: str, device: str) -> Loaded | None:
    """The model of that name where one of the drafters uses it. Raises InputError for one of another vocabulary."""
    from specdecode_ref.models import zoo

    if name is None or not any("model" in drafter.split("+") for drafter in drafters):
        return None
    draft = zoo.load(name, dtype=dtype, device=device)
    _same_vocabulary(target, draft)
    return draft


def drafter(
    name: str, loaded: Loaded, shape: Wanted | None, draft: Loaded | None, head: str | None, verifier: str = "auto"
) -> Drafter | None:
    """The drafter of that name, with a tree that the verifier takes where none was asked for."""
    from specdecode_ref import drafters

    return drafters.build(
        name,
        loaded.model,
        tree=shape,
        head=head,
        draft_model=(lambda: draft.model) if draft else None,
        draw=checks.draw_for(verifier),
        flat=checks.judges_chains_only(verifier),
        calibrate=_calibrator(loaded),
    )


def encode(loaded: Loaded, prompt: str, raw: bool) -> list[int]:
    """Token ids of the prompt, as one user's turn unless `raw`."""
    if raw:
        return loaded.tokenizer.encode(prompt)
    return loaded.tokenizer.chat([{"role": "user", "content": prompt}])


def model_info(loaded: Loaded) -> ModelInfo:
    """What a trace says about a model."""
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    return ModelInfo(loaded.name, loaded.revision, loaded.tokenizer.hash[:16], dtype)


def _calibrator(loaded: Loaded) -> Callable[[Callable[[Shape], Drafter], Path | None], Calibration]:
    """Measures a drafter beside this target, once; the next time its figures are found in the cache folder."""
    from specdecode_ref.drafters import calibration, measuring, shipped
    from specdecode_ref.drafters.shapes import chain

    def measure(make: Callable[[Shape], Drafter], head: Path | None) -> Calibration:
        drafter = make(chain(1))
        named = f"{drafter.settings.get('draft_model', '')} {shipped.fingerprint(head) if head else ''}".strip()
        subject = calibration.Subject.of(loaded.model, loaded.revision, drafter, named)
        with screen.progress("calibrating for a minute") as told:
            found, warning = calibration.calibrated(
                subject,
                lambda: measuring.calibrate(loaded.model, make, loaded.tokenizer, subject, progress=told),
            )
        if warning:
            screen.note(warning)
        return found

    return measure


def _same_vocabulary(target: Loaded, draft: Loaded) -> None:
    """Refuse a draft model whose token ids mean other text: the output would stay right, the drafts would be noise."""
    ours, theirs = target.tokenizer, draft.tokenizer
    if ours.hash != theirs.hash and ours.backend.get_vocab() != theirs.backend.get_vocab():
        raise InputError(
            f"a draft model with the vocabulary of {target.name}",
            f"another one in {draft.name}",
            "choose one of its family",
        )
