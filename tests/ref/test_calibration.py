"""A calibration: what is kept comes back as it was or not at all, and for the pair it was made of alone."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specdecode_ref.drafters.calibration import Calibration, Draft, Subject, calibrated
from specdecode_ref.drafters.model import ModelDrafter
from specdecode_ref.errors import InputError
from specdecode_ref.fidelity.setups import transformer
from tests.ref.test_measuring import SUBJECT, measured


def invented(seed: int = 0, places: int = 40, sure: float = 0.6, **costs: Any) -> Calibration:
    """Wide drafts without a model: binary trees of depth 3 whose first child is right with probability `sure`."""
    rng = random.Random(seed)
    parents = (-1, 0, 0, 1, 1, 2, 2, 3, 3)
    texts = []
    for _ in range(3):
        drafts = []
        for _ in range(places):
            scores = [0.0]
            for node in range(1, len(parents)):
                scores.append(round(scores[parents[node]] + (-0.4 if node % 2 else -1.6) * rng.uniform(0.5, 1.5), 4))
            path = [0]
            while children := [node for node, parent in enumerate(parents) if parent == path[-1]]:
                u = rng.random()
                if u >= sure + 0.2:
                    break
                path.append(children[u >= sure])
            drafts.append(Draft(parents, tuple(scores), tuple(path)))
        texts.append(tuple(drafts))
    rows = costs.get("rows", {1: 1.0, 6: 1.0, 8: 1.3, 64: 6.0})
    return Calibration(SUBJECT, rows, costs.get("start", 0.1), costs.get("level", {1: 0.1, 4: 0.1}), tuple(texts))


def test_acceptance_is_counted_by_depth_and_rank() -> None:
    parents = (-1, 0, 0, 1, 1)
    scores = (0.0, -0.5, -1.0, -1.0, -2.0)
    texts = ((Draft(parents, scores, (0, 1, 4)), Draft(parents, scores, (0, 2)), Draft(parents, scores, (0,))),)
    found = dataclasses.replace(invented(), texts=texts)
    assert found.acceptance == [[1 / 3, 1 / 3], [0.0, 1.0]]
    assert [draft.ranks for draft in texts[0]] == [(0, 1), (1,), ()]


@pytest.mark.usefixtures("short_calibration")
def test_json_brings_back_what_was_written() -> None:
    found = invented()
    assert Calibration.from_json(found.to_json()) == found
    real = measured(seconds=0.0)
    assert Calibration.from_json(real.to_json()) == real


def damaged(whole: dict[str, Any]) -> Iterator[Any]:
    """Texts that were nearly calibrations."""
    for key in whole:
        yield {name: value for name, value in whole.items() if name != key}
        yield whole | {key: None}
        yield whole | {key: []}
        yield whole | {key: "text"}
    subject, text = whole["subject"], whole["texts"][0]
    yield from (
        whole | {"more": 1},
        whole | {"start": -1.0},
        whole | {"start": float("nan")},
        whole | {"rows": [[1, 0.0]]},
    )
    yield from (whole | {"rows": [[0, 1.0]]}, whole | {"rows": [[1.5, 1.0]]}, whole | {"rows": [["1", 1.0]]})
    yield from (whole | {"subject": subject | {"threads": "1"}}, whole | {"subject": subject | {"more": "x"}})
    drafts: tuple[Any, ...] = (
        *([[0], [0.0], [0]], [[-1, 1], [0.0, -1.0], [0]], [[-1, 0], [0.0], [0]], [[-1, 0], [0.0, 1.0], [0]]),
        *([[-1, 0], [0.0, -1.0], [1]], [[-1, 0], [0.0, -1.0], [0, 2]], [[-1, 0], [0.0, -1.0], []], [[], [], []]),
        *([[-1, 0.0], [0.0, -1.0], [0]], [[-1, 0], [0.0, -1.0], [0, True]], [[-1, 0], [0.0, float("nan")], [0]]),
        *([[-1, 0], [0.0, -float("inf")], [0]], [[-1, 0], [-1.0, -1.0], [0]], [[-1]], 7, [[-1, -1], [0.0, 0.0], [0]]),
        [[-1, 0, 1], [0.0, -1.0, -2.0], [0, 2]],
    )
    for draft in drafts:
        yield whole | {"texts": [[draft, *text]]}


def test_what_was_not_written_so_is_refused() -> None:
    whole = json.loads(invented(places=2).to_json())
    texts = ["", "{", "[]", "7", "null", "[" * 100_000, *map(json.dumps, damaged(whole))]
    assert Calibration.from_json(json.dumps(whole)) == invented(places=2)
    for text in texts:
        with pytest.raises(InputError, match=r"^expected .*; got .*; "):
            Calibration.from_json(text)


def never() -> Calibration:
    raise AssertionError("measured although it was kept")


def test_a_calibration_is_measured_once(cache_folder: Path) -> None:
    found = invented()
    assert calibrated(SUBJECT, lambda: found) == (found, None)
    assert calibrated(SUBJECT, never) == (found, None)
    assert [path.name for path in (cache_folder / "calibrations").iterdir()] == [SUBJECT.file]
    for name in (f.name for f in dataclasses.fields(Subject)):
        change: dict[str, Any] = {name: 2 if name == "threads" else "other"}
        other = dataclasses.replace(SUBJECT, **change)
        assert other.file != SUBJECT.file
        fresh = dataclasses.replace(found, subject=other, start=7.0)
        assert calibrated(other, lambda fresh=fresh: fresh) == (fresh, None)  # type: ignore[misc]
    assert calibrated(SUBJECT, never) == (found, None)


@pytest.mark.parametrize("text", ["", "{}", "\0\0", "\udcff"], ids=ascii)
def test_a_damaged_file_is_measured_again(cache_folder: Path, text: str) -> None:
    calibrated(SUBJECT, invented)
    file = cache_folder / "calibrations" / SUBJECT.file
    whole = file.read_bytes()
    file.write_bytes(text.encode(errors="surrogateescape"))
    assert calibrated(SUBJECT, invented) == (invented(), None)
    assert file.read_bytes() == whole
    file.write_bytes(whole[: len(whole) // 2])
    assert calibrated(SUBJECT, invented) == (invented(), None)


def test_the_file_of_another_subject_is_measured_again(cache_folder: Path) -> None:
    other = dataclasses.replace(invented(), subject=dataclasses.replace(SUBJECT, revision="def"))
    calibrated(SUBJECT, invented)
    (cache_folder / "calibrations" / SUBJECT.file).write_text(other.to_json())
    assert calibrated(SUBJECT, lambda: invented(1)) == (invented(1), None)


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SPECDECODE_CACHE", str(tmp_path / "file"))
    found, warning = calibrated(SUBJECT, invented)
    assert found == invented() and warning and "SPECDECODE_CACHE" in warning and "\n" not in warning


def test_a_crash_while_writing_leaves_nothing_half_written(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.write_text", full)
        _, warning = calibrated(SUBJECT, invented)
    assert warning and "No space left on device" in warning
    assert list((cache_folder / "calibrations").iterdir()) == []


def test_the_name_of_a_file_is_safe_and_tells_what_it_is_of() -> None:
    hostile = dataclasses.replace(SUBJECT, model="../../etc/passwd\0" + "x" * 500, drafter="../a+b c")
    assert "/" not in hostile.file and not hostile.file.startswith(".") and len(hostile.file) < 200
    assert SUBJECT.file.startswith("org-target-model-") and SUBJECT.file.endswith("-v1.json")
    assert "ngram+eagle" in dataclasses.replace(SUBJECT, drafter="ngram+eagle").file


def test_a_subject_is_of_this_pair_here_and_now() -> None:
    target = transformer(dtype=torch.float32)
    here = (torch.__version__, torch.get_num_threads())
    subject = Subject.of(target, "abc", ModelDrafter(target), "123")
    assert subject == Subject("transformer", "abc", "model", "123", "cpu", "float32", *here)
