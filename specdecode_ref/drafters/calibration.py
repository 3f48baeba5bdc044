"""What was measured of a drafter and its target on this device: what steps cost, and what would have been accepted.

`measuring` makes a calibration, `choice` turns it into the shape of a tree. It is kept in the user's cache folder, one
JSON file for every pair of models, device, dtype, version of torch and number of threads.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch

from specdecode_ref.drafters.base import Drafter
from specdecode_ref.drafters.optimal import Acceptance
from specdecode_ref.errors import InputError, ModelError, SpecDecodeError
from specdecode_ref.models.base import Model
from specdecode_ref.models.store import cache_folder
from specdecode_ref.tree import children
from specdecode_ref.whole_file import whole_file

VERSION = 1
"""Raised when another thing is measured than before; older files are then measured anew."""


@dataclass(frozen=True)
class Subject:
    """What a calibration holds for, and nothing else. `revision` and `head` tell weights of one name apart."""

    model: str
    revision: str
    drafter: str
    head: str
    device: str
    dtype: str
    torch: str
    threads: int

    @classmethod
    def of(cls, target: Model, revision: str, drafter: Drafter, head: str) -> Subject:
        """This pair, here and now. head: a fingerprint of the drafter's weights."""
        gpu = target.device.type == "cuda"
        return cls(
            model=target.name,
            revision=revision,
            drafter=drafter.name,
            head=head,
            device=torch.cuda.get_device_name(target.device) if gpu else target.device.type,
            dtype=str(target.dtype).removeprefix("torch."),
            torch=torch.__version__,
            threads=torch.get_num_threads(),
        )

    @property
    def file(self) -> str:
        """The name of its file: readable, and with a digest of all that it holds for."""
        names = re.sub(r"[^A-Za-z0-9.+-]+", "-", f"{self.model[-60:]}-{self.drafter[-40:]}").lstrip(".-")
        digest = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()
        return f"{names}-{digest[:12]}-v{VERSION}.json"


@dataclass(frozen=True)
class Draft:
    """A wide tree that the drafter grew at one place of a text, and how the text went on.

    parents: [N], as in `DraftTree`. scores: [N], the log probability of the path to each node, as the draft saw it.
    path:    the nodes that the target chose too, root first. Siblings stand in the order of their ranks.
    """

    parents: tuple[int, ...]
    scores: tuple[float, ...]
    path: tuple[int, ...]

    def __post_init__(self) -> None:
        nodes = range(1, len(self.parents))
        if self.parents[:1] != (-1,) or not all(0 <= self.parents[i] < i for i in nodes):
            raise InputError("parents before their children, the root first", self.parents, "measure it again")
        if len(self.scores) != len(self.parents) or self.scores[0] != 0:
            raise InputError("a score a node, 0 for the root", "others", "measure it again")
        if not all(-math.inf < self.scores[i] <= self.scores[self.parents[i]] for i in nodes):
            raise InputError("finite scores that fall along every path", "others", "measure it again")
        linked = all(node in nodes and self.parents[node] == before for before, node in pairwise(self.path))
        if self.path[:1] != (0,) or not linked:
            raise InputError("a path of its nodes, from the root down", self.path, "measure it again")

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """For every node, its children by rank."""
        return children(self.parents)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The path as ranks, as in `shapes.Static`."""
        return tuple(self.children[self.parents[node]].index(node) for node in self.path[1:])


@dataclass(frozen=True)
class Calibration:
    """What was measured. Times are seconds; texts are what the target wrote at temperature 0, a draft at every place.

    rows:  what a target step of so many rows takes.
    start: what the draft of the first level takes, reading what was decoded since the last round included.
    level: what each further level takes that opens so many nodes.
    """

    subject: Subject
    rows: Mapping[int, float]
    start: float
    level: Mapping[int, float]
    texts: tuple[tuple[Draft, ...], ...]

    def __post_init__(self) -> None:
        times = [*self.rows.values(), self.start, *self.level.values()]
        if not (self.rows and self.level and min(*self.rows, *self.level) >= 1):
            raise InputError("costs of 1 row and 1 node or more", [*self.rows, *self.level], "measure it again")
        if not all(0 < seconds < math.inf for seconds in times):
            raise InputError("times above 0", times, "measure it again")
        if not any(len(draft.parents) > 1 for text in self.texts for draft in text):
            raise InputError("a drafter that drafts here", "no draft at all", "use another one")

    @cached_property
    def acceptance(self) -> Acceptance:
        """How often the child of each rank was the accepted one, by depth, given that its parent was accepted.

        Parents that the wide trees did not open are left out.
        """
        right: Counter[tuple[int, int]] = Counter()
        opened: Counter[int] = Counter()
        widest: dict[int, int] = {}
        for draft in (draft for text in self.texts for draft in text):
            right.update(enumerate(draft.ranks))
            for depth, node in enumerate(draft.path):
                if width := len(draft.children[node]):
                    opened[depth] += 1
                    widest[depth] = max(widest.get(depth, 0), width)
        return [[right[d, rank] / opened[d] for rank in range(widest[d])] for d in range(len(opened))]

    def to_json(self) -> str:
        """One line of JSON; `from_json` reads it."""
        texts = [[[draft.parents, draft.scores, draft.path] for draft in text] for text in self.texts]
        costs = {"rows": [*self.rows.items()], "start": self.start, "level": [*self.level.items()]}
        return json.dumps({"subject": asdict(self.subject), **costs, "texts": texts})

    @classmethod
    def from_json(cls, text: str) -> Calibration:
        """The calibration that `to_json` wrote. Raises InputError for anything else."""
        try:
            found = json.loads(text)
            subject, rows, start, level, texts = (found.pop(f.name) for f in fields(cls))
            kinds = {f.name: int if f.name == "threads" else str for f in fields(Subject)}
            if found or {name: type(value) for name, value in subject.items()} != kinds:
                raise ValueError("other entries")
            return cls(
                Subject(**subject),
                {_whole(n): float(seconds) for n, seconds in rows},
                float(start),
                {_whole(n): float(seconds) for n, seconds in level},
                tuple(tuple(_draft(*draft) for draft in drafts) for drafts in texts),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            reason = error if isinstance(error, InputError) else type(error).__name__
            raise InputError(
                "a calibration as it was written", f"another text ({reason})", "measure it again"
            ) from None


def _draft(parents: Sequence[Any], scores: Sequence[Any], path: Sequence[Any]) -> Draft:
    return Draft(tuple(map(_whole, parents)), tuple(map(float, scores)), tuple(map(_whole, path)))


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError("a whole number")
    return value


def calibrated(subject: Subject, measure: Callable[[], Calibration]) -> tuple[Calibration, str | None]:
    """The calibration in the cache folder, or a new one, which is then kept there; and a line of warning, or None.

    A file that is damaged or of another subject is measured anew. That the folder cannot be written is no error.
    """
    try:
        path = cache_folder() / "calibrations" / subject.file
        kept = Calibration.from_json(path.read_text(encoding="utf-8"))
        if kept.subject == subject:
            return kept, None
    except (OSError, UnicodeDecodeError, SpecDecodeError):
        pass
    made = measure()
    return made, _keep(made)


def _keep(made: Calibration) -> str | None:
    """Write the file whole or not at all; why that failed, or None."""
    try:
        folder = cache_folder() / "calibrations"
        folder.mkdir(parents=True, exist_ok=True)
        with whole_file(folder / made.subject.file) as part:
            part.write_text(made.to_json(), encoding="utf-8")
    except (OSError, ModelError) as error:
        return f"the calibration is not kept ({error}); set SPECDECODE_CACHE to a folder that can be written"
    return None
