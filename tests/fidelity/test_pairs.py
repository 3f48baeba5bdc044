"""Mined pairs: they are what the miner finds, and they need as few samples as they say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from specdecode_ref.errors import UnknownNameError
from specdecode_ref.fidelity import mutants, pairs
from specdecode_ref.fidelity.laws import definition, drafts, emitted, sequences
from specdecode_ref.fidelity.statistics import samples_needed
from specdecode_ref.models.table import TableModel
from specdecode_ref.sampling import SamplingRule

STORED = pairs.stored()


@pytest.mark.parametrize("name", pairs.HUNTS)
def test_the_stored_samples_are_what_is_needed(name: str) -> None:
    pair, hunt = STORED[name], pairs.HUNTS[name]
    assert tuple(pair.needed) == hunt.mutants
    assert (pair.verifier, pair.draws, len(pair.p)) == (hunt.verifier, hunt.draws, hunt.vocab)
    assert pairs.needed_on(pair) == pair.needed


def test_a_pair_is_found_again_bit_for_bit() -> None:
    pair = STORED["sibling law"]
    assert pairs.mine("sibling law", pair.seed, [pair.restart]) == pair


def test_another_seed_finds_another_pair_and_more_steps_never_a_worse_one() -> None:
    short, longer = (pairs.mine("coin reused", 1, [0], steps) for steps in (1, 12))
    assert max(longer.needed.values()) <= max(short.needed.values())
    assert pairs.mine("coin reused", 2, [0], 1).p != short.p


def test_what_is_mined_is_worth_it() -> None:
    """On random tables the same bugs need many times as many samples."""
    needed = {name: STORED[hunt].needed[name] for hunt, name in HARD.items()}
    assert needed["M16"] < 700 and needed["M24"] <= 33 and needed["M25"] < 700
    model, draft = (TableModel.random(3, order=2, scale=1.0, seed=s) for s in (0, 1))
    p, q = (definition(m, (0, 1), SamplingRule()) for m in (model, draft))
    tree = (("with_replacement",),)
    with mutants.get("M16").plant() as package:
        wrong = emitted(package("verify").get("chain"), p, drafts(q, tree), search=True)
    assert samples_needed(sequences(p, 2), wrong) > 20 * needed["M16"]


HARD = {"coin reused": "M16", "sibling law": "M24", "first p": "M25"}


def test_an_unknown_hunt() -> None:
    with pytest.raises(UnknownNameError, match="coin reused"):
        pairs.mine("snark")


def test_what_is_stored_is_read_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "_FILE", tmp_path / "pairs.json")
    pairs.store([replace(STORED["single"], seed=5)])
    (entry,) = json.loads((tmp_path / "pairs.json").read_text())
    assert entry["seed"] == 5
    pairs.stored.cache_clear()
    try:
        assert pairs.stored() == {"single": replace(STORED["single"], seed=5)}
    finally:
        pairs.stored.cache_clear()
