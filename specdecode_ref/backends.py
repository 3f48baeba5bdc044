"""Who plays the rounds: the loop of `decode` in PyTorch, or a backend that another package has registered.

A backend keeps a whole batch on its device, from the first round to the last, and tells after each round what was
drafted and what became of it. It registers under the entry points `specdecode_ref.backends`; this package imports none
until a decode asks for one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import NamedTuple, Protocol

from specdecode_ref.coins import Coins
from specdecode_ref.drafters.base import Drafter
from specdecode_ref.errors import InputError, NotApplicableError, UnknownNameError
from specdecode_ref.models.base import Model
from specdecode_ref.sampling import SamplingRule
from specdecode_ref.trace import Nodes
from specdecode_ref.types import Verdict

GROUP = "specdecode_ref.backends"

TORCH, AUTO = "torch", "auto"


@dataclass(frozen=True)
class Job:
    """What is to be decoded. verifier: a name, or "auto"; level: of the trace."""

    model: Model
    drafter: Drafter | None
    verifier: str
    rule: SamplingRule
    level: int


class Played(NamedTuple):
    """One sequence's round: the draft in columns, its probabilities where the level asks for them, and the verdict."""

    nodes: Nodes
    verdict: Verdict


class Rounds(Protocol):
    """A batch on a backend's device, from its prefill on."""

    def play(self) -> list[Played]:
        """One round of every row: draft, verify, commit. Raises NumericalError for logits that make no law."""
        ...

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows: the others have finished."""
        ...


class Backend(Protocol):
    """Makes `Rounds`."""

    name: str

    def objection(self, job: Job) -> str | None:
        """Why this backend cannot do the job, or None."""
        ...

    def start(self, job: Job, prompts: Sequence[Sequence[int]], limits: Sequence[int], keys: Sequence[Coins]) -> Rounds:
        """Prefill. limits: the most tokens, prompt included, of each sequence. keys: of their coins, with one seed."""
        ...


def known(name: str) -> str:
    """`name`, where it is one of a backend. Raises UnknownNameError for another."""
    names = dict.fromkeys((AUTO, TORCH, *(entry.name for entry in entry_points(group=GROUP))))
    if name not in names:
        raise UnknownNameError(f"a backend out of {', '.join(names)}", repr(name), "choose one, or install its package")
    return name


def loaded(name: str) -> Backend | None:
    """The backend of that name, ready to be asked; None for "torch" and "auto".

    Raises UnknownNameError for a name that is not registered, InputError where the import fails.
    """
    if known(name) in (TORCH, AUTO):
        return None
    entry = next(iter(entry_points(group=GROUP, name=name)))
    try:
        return _load(entry)
    except ImportError as error:
        do = f"install it (pip install 'specdecode-ref[kernels]'), or use the backend {TORCH}"
        raise InputError(f"what the backend '{name}' needs", str(error), do) from error


def resolve(name: str, job: Job) -> Backend | None:
    """The backend of that name; None for the loop of `decode`.

    "auto" is the first one registered that can do the job where the model is on a CUDA device, and "torch" elsewhere.
    Raises as `loaded` does, and NotApplicableError where the backend cannot do the job.
    """
    if name == AUTO and job.model.device.type == "cuda":
        return next((found for found in _loadable() if not found.objection(job)), None)
    backend = loaded(name)
    if backend and (objection := backend.objection(job)):
        raise NotApplicableError(f"a job for the backend '{name}'", objection, f"use the backend {TORCH}")
    return backend


def _loadable() -> Iterator[Backend]:
    """The registered backends; a warning for each that cannot be loaded."""
    for entry in entry_points(group=GROUP):
        try:
            backend = _load(entry)
        except ImportError as error:
            warnings.warn(f"the backend '{entry.name}' cannot be loaded ({error}); decoding in PyTorch", stacklevel=5)
        else:
            yield backend


def _load(entry: EntryPoint) -> Backend:
    """What an entry point names. Raises ImportError, whatever else its import may raise: it is another package's."""
    try:
        backend: Backend = entry.load()
    except ImportError:
        raise
    except Exception as error:
        raise ImportError(f"{type(error).__name__}: {error}") from error
    return backend
