"""The suite's own power: every known bug is caught by its rung, every lossless change passes, copies stay private."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from specdecode_ref.errors import FidelityError, InputError, UnknownNameError
from specdecode_ref.fidelity import mutants
from specdecode_ref.fidelity.private import Package, planted
from specdecode_ref.fidelity.setups import EXACT
from specdecode_ref.fidelity.suite import LAWS, OF_THE_LAW, RUNGS, total_variation

CATALOGUE = mutants.catalogue()
BUGS = [name for name, mutant in CATALOGUE.items() if not mutant.lossless]
LOSSLESS = [name for name, mutant in CATALOGUE.items() if mutant.lossless]


@pytest.mark.parametrize("rung", RUNGS)
def test_the_original_passes(rung: str) -> None:
    RUNGS[rung](Package())


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_is_caught_by_its_rung_and_its_distance_is_known(name: str) -> None:
    """The exact distance, by search: a bug that only trips a probe would not be worth a lesson."""
    mutant = CATALOGUE[name]
    assert mutant.rung is not None
    with mutant.plant() as package:
        if mutant.law:
            assert total_variation(package, mutant.law) == pytest.approx(mutant.tv, rel=1e-6)
        with pytest.raises(FidelityError):
            RUNGS[mutant.rung](package)


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_lossless_change_passes_every_check_of_the_law(name: str) -> None:
    mutant = CATALOGUE[name]
    assert mutant.law is not None
    with mutant.plant() as package:
        if mutant.file.startswith("verify/"):
            RUNGS["verifiers"](package)
            RUNGS["coins"](package)
            # No other file than these can matter to the two: that is why the other changes need not go through them.
            loaded = {name.removeprefix(f"{package.name}.") for name in sys.modules if name.startswith(package.name)}
            assert mutant.file[:-3].replace("/", ".") in loaded and not {"decode", "sequence", "drafters"} & loaded
        RUNGS["generations"](package)
        assert total_variation(package, mutant.law) < EXACT


@pytest.mark.parametrize(("name", "rung"), [("E01", "acceptance"), ("E02", "acceptance"), ("E05", "drafters")])
def test_a_lossless_change_is_still_a_change(name: str, rung: str) -> None:
    """The other oracles see them: how much is accepted, and which law the draft model stands for."""
    with CATALOGUE[name].plant() as package, pytest.raises(FidelityError):
        RUNGS[rung](package)


def test_the_catalogue_is_whole() -> None:
    assert OF_THE_LAW == ("verifiers", "coins", "generations")
    for name, mutant in CATALOGUE.items():
        assert name == mutant.id and mutant.old != mutant.new
        assert mutant.lossless == (mutant.rung is None) == name.startswith("E")
        assert mutant.rung is None or mutant.rung in RUNGS
        assert mutant.law is None or mutant.law in LAWS
        assert (mutant.tv is not None and 1e-4 < mutant.tv < 1) == (mutant.law is not None and not mutant.lossless)
        assert mutant.title and mutant.seen_in and mutant.story.count(". ") >= 1 and mutant.story.endswith(".")


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_diff_is_one_hunk_of_the_real_source(name: str) -> None:
    mutant = CATALOGUE[name]
    head, *changes = mutant.diff().splitlines()
    assert head == f"--- a/{mutant.file}" and changes[0] == f"+++ b/{mutant.file}"
    assert sum(line.startswith("@@") for line in changes) == 1
    source = (Path(mutants.__file__).parents[1] / mutant.file).read_text(encoding="utf-8")
    assert source.count(mutant.old) == 1
    assert all(line[1:] in source.splitlines() for line in changes[1:] if line[0] in " -")


def test_the_catalogue_can_be_read_without_torch() -> None:
    """The app shows stories and diffs; that must not cost the import of torch."""
    script = "import sys; from specdecode_ref.fidelity import mutants; mutants.get('M01').diff()"
    script += "; print('torch' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout == "False\n"


def test_an_unknown_mutant() -> None:
    with pytest.raises(UnknownNameError, match="M01"):
        mutants.get("M00")


@pytest.mark.parametrize("old", ["no such text", "self"])
def test_a_patch_that_does_not_apply_once(old: str) -> None:
    with pytest.raises(InputError, match="renew the patch"), planted("cache.py", old, ""):
        pass


def test_a_copy_is_private() -> None:
    from specdecode_ref.verify import chain

    with CATALOGUE["M01"].plant() as package:
        copy = package("verify.chain")
        assert copy is not chain and copy.verify.__code__.co_code != chain.verify.__code__.co_code
        assert copy.residual.__module__ == f"{package.name}.sampling"
        assert package("verify").VERIFIERS["chain"].rule is copy.verify
        assert package("decode").verify is package("verify")
        assert Package()("verify.chain") is chain
    assert not [name for name in sys.modules if name.startswith(package.name)]
    with pytest.raises(ImportError):
        package("verify.chain")


def test_a_copy_without_a_change_passes() -> None:
    with planted("verify/chain.py", "u * q_x < p_x", "(u * q_x < p_x)") as package:
        RUNGS["boundaries"](package)
