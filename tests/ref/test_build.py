"""From a name, a head and a tree to a drafter: in Python, at `specdecode generate` and at `specdecode bench`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specdecode_ref import drafters
from specdecode_ref.drafters import SMALL, build, measuring, shipped
from specdecode_ref.drafters.calibration import Calibration, Draft, Subject
from specdecode_ref.drafters.eagle import Eagle
from specdecode_ref.drafters.first import First
from specdecode_ref.drafters.hybrid import Hybrid
from specdecode_ref.drafters.medusa import Medusa
from specdecode_ref.drafters.model import ModelDrafter
from specdecode_ref.drafters.ngram import NGram
from specdecode_ref.drafters.shapes import NAMED, Dynamic, Sampled, Static, chain, parse
from specdecode_ref.errors import InputError
from specdecode_ref.models import zoo
from specdecode_ref.models.transformer import Transformer
from specdecode_ref.train.recipes import DraftRecipe, EagleRecipe, MedusaRecipe, Recipe, Shared

CommandLine = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def target(tiny: str) -> Transformer:
    model = zoo.load(tiny, dtype="float32").model
    assert isinstance(model, Transformer)
    return model


@pytest.fixture(scope="module")
def heads(target: Transformer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What could be shipped for `tiny`: untrained heads of each kind."""
    torch.manual_seed(0)
    made = Shared.of(target, torch.arange(0, 256, 3))
    recipes: dict[str, Recipe] = {
        "eagle": EagleRecipe(made, (1, 2, 3), 2, 24),
        "medusa": MedusaRecipe(made, 3),
        "draft": DraftRecipe(made, 1, 24),
    }
    folder = tmp_path_factory.mktemp("shipped")
    for kind, recipe in recipes.items():
        recipe.save(folder / "tiny" / kind, {})
    return folder


@pytest.fixture
def with_heads(heads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "HEADS", heads)


@pytest.fixture
def without_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "HEADS", tmp_path)


def made(name: str, target: Any, **settings: Any) -> Any:
    return build(name, target, **settings)


@pytest.mark.usefixtures("with_heads")
class TestWithHeads:
    """A target for which heads are shipped."""

    def test_every_name_makes_its_drafter(self, target: Transformer) -> None:
        kinds = {
            "auto": Hybrid,
            "none": type(None),
            "ngram": NGram,
            "model": ModelDrafter,
            "early-exit": ModelDrafter,
            "medusa": Medusa,
            "eagle": Eagle,
            "hybrid": Hybrid,
        }
        assert tuple(kinds) == drafters.NAMES
        for name, kind in kinds.items():
            assert type(made(name, target)) is kind
        assert made("model", target).settings == {"tree": "chain:4", "draft_model": "draft-tiny"}
        assert made("eagle", target).settings == {"tree": str(SMALL), "head": "eagle-tiny"}
        assert made("medusa", target).settings == {"tree": "static:narrow", "head": "medusa-tiny"}
        assert made("hybrid", target).shape == SMALL

    def test_auto_takes_any_tree(self, target: Transformer) -> None:
        """A hybrid where it can grow one, the lookup before the head elsewhere."""
        deep = made("auto", target, tree="dynamic:3,2,4")
        assert isinstance(deep, Hybrid) and deep.shape == Dynamic(3, 2, 4)
        for settings, shape, gamma in (
            ({"gamma": 3}, chain(3), 3),
            ({"tree": "chain:3"}, chain(3), 3),
            ({"tree": "static:narrow"}, Static(NAMED["narrow"]), 6),
            ({"tree": "2,1"}, Sampled((2, 1)), 6),
            ({"flat": True}, chain(4), 6),
        ):
            both = made("auto", target, **settings)
            assert isinstance(both, First) and both.name == "ngram+eagle"
            lookup, eagle = both.drafters
            assert lookup == NGram(gamma) and isinstance(eagle, Eagle) and eagle.shape == shape

    def test_flat_drafts_a_chain(self, target: Transformer) -> None:
        for name in ("eagle", "medusa", "model", "early-exit"):
            assert made(name, target, flat=True).shape == chain(4)
            assert made(name, target, flat=True, gamma=2).shape == chain(2)
        with pytest.raises(InputError, match=r"a verifier of trees for 'hybrid'.*use the drafter ngram\+eagle"):
            build("hybrid", target, flat=True)

    @pytest.mark.parametrize("tree", ["chain:3", "2,1", "static:wide", "optimal:4"])
    def test_a_hybrid_needs_a_dynamic_tree(self, target: Transformer, tree: str) -> None:
        with pytest.raises(InputError, match="a dynamic tree for 'hybrid'"):
            build("hybrid", target, tree=tree)

    def test_how_siblings_are_drawn(self, target: Transformer) -> None:
        """As the tree says, or as the verifier needs it."""
        for tree, draw, expected in (
            ("2,1", "without_replacement", "without_replacement"),
            ("2,1,with", "without_replacement", "with_replacement"),
            ("2,1", "with_replacement", "with_replacement"),
            ((2, 1), "with_replacement", "with_replacement"),
        ):
            assert made("early-exit", target, tree=tree, draw=draw).shape.draw == expected

    @pytest.mark.parametrize("settings", [{"gamma": 3}, {"tree": "chain:3"}, {"tree": chain(3)}, {"tree": (1, 1, 1)}])
    def test_a_chain_is_everyone_s_in_a_row_of_drafters(self, target: Transformer, settings: dict[str, Any]) -> None:
        lookup, model = made("ngram+model", target, **settings).drafters
        assert lookup == NGram(3) and model.shape == chain(3)
        lookup, model = made("ngram+model", target, tree="2,1").drafters
        assert lookup == NGram() and model.shape == Sampled((2, 1))

    def test_a_named_head_comes_before_the_shipped_one(self, target: Transformer, heads: Path) -> None:
        head = heads / "tiny" / "eagle"
        assert made("eagle", target, head=str(head)).head.name == "eagle"
        with pytest.raises(InputError, match=r"Medusa heads in .*eagle; got an EAGLE head"):
            build("medusa", target, head=head)

    def test_a_tree_from_a_calibration(self, target: Transformer, heads: Path) -> None:
        """`calibrate` is given the maker of the drafter and its head; a hybrid is measured by its head."""
        asked: list[tuple[type, Path | None]] = []

        def calibrate(make: Any, head: Path | None) -> Calibration:
            asked.append((type(make(chain(1))), head))
            make(Dynamic(2, 2, 3))
            draft = Draft((-1, 0, 0, 1), (0.0, -0.2, -1.8, -0.5), (0, 1, 3))
            subject = Subject("tiny", "", "eagle", "", "cpu", "float32", torch.__version__, 1)
            return Calibration(subject, {1: 1.0, 8: 1.2}, 0.01, {1: 0.01, 4: 0.01}, ((draft,) * 8,))

        settings: dict[str, Any] = {"calibrate": calibrate}
        assert isinstance(made("hybrid", target, tree="auto", **settings).shape, Dynamic)
        assert isinstance(made("auto", target, tree="auto", **settings), Hybrid)
        assert isinstance(made("medusa", target, tree="optimal:2", **settings).shape, Static)
        assert made("early-exit", target, tree="auto", **settings).shape is not None
        assert made("model", target, tree="auto", **settings).shape is not None
        place = heads / "tiny"
        assert asked == [
            (Eagle, place / "eagle"),
            (Eagle, place / "eagle"),
            (Medusa, place / "medusa"),
            (ModelDrafter, None),
            (ModelDrafter, place / "draft"),
        ]
        with pytest.raises(InputError, match="a calibration for this tree"):
            build("eagle", target, tree="auto")


@pytest.mark.usefixtures("without_heads")
def test_without_heads(target: Transformer) -> None:
    assert made("auto", target) == NGram() and made("auto", target, gamma=2) == NGram(2)
    assert made("auto", target, flat=True) == NGram()
    with pytest.raises(InputError, match="a chain for 'ngram'"):
        build("auto", target, tree="2,1")
    wanted = {"eagle": "an EAGLE head", "hybrid": "an EAGLE head", "medusa": "Medusa heads", "model": "a draft model"}
    for name, what in wanted.items():
        with pytest.raises(InputError, match=f"{what} for 'tiny'; got none shipped; name its folder with --head"):
            build(name, target)


def test_shipped_heads_are_found_by_the_target_s_name(heads: Path, with_heads: None, target: Transformer) -> None:
    assert shipped.folder("eagle", target) == heads / "tiny" / "eagle"
    assert shipped.folder("other", target) is None
    one, other = (shipped.fingerprint(heads / "tiny" / kind) for kind in ("eagle", "medusa"))
    assert one != other and len(one) == 12 and one == shipped.fingerprint(heads / "tiny" / "eagle")


@pytest.mark.usefixtures("with_heads")
class TestCommandLine:
    """`--tree`, and `name@tree`."""

    @pytest.mark.parametrize(
        ("drafter", "tree", "used"),
        [
            ("model", "chain:3", "chain:3"),
            ("eagle", "sampled:2,1", "sampled:2,1"),
            ("eagle", "sampled:2,1,with", "sampled:2,1,with"),
            ("medusa", "static:wide", "static:wide"),
            ("medusa", "0.1.00", None),
            ("medusa", "static:0.1.00", "static:0.1.00"),
            ("hybrid", "dynamic:3,2,4", "dynamic:3,2,4"),
            ("auto", "dynamic:3,2,4,0.1", "dynamic:3,2,4,0.1"),
            ("auto", "chain:3", "chain:3"),
        ],
    )
    def test_trees(self, specdecode: CommandLine, tiny: str, drafter: str, tree: str, used: str | None) -> None:
        common = ("generate", "abcabcabc", "--model", tiny, "--max-new-tokens", "16", "--dtype", "float64", "--json")
        code, out, err = specdecode(*common, "--drafter", drafter, "--tree", tree)
        if used is None:
            assert code == 2 and "a tree like" in err
            return
        assert (code, err) == (0, "")
        found = json.loads(out)
        assert found["text"] == json.loads(specdecode(*common, "--drafter", "none")[1])["text"]
        drafting = found["config"]["drafting"]
        assert drafting.get("tree", drafting.get("eagle", {}).get("tree")) == used

    @pytest.mark.parametrize(("drafter", "tree"), [("eagle", "optimal:4"), ("medusa", "auto"), ("hybrid", "auto")])
    def test_a_calibration_is_made_once_and_kept(
        self,
        specdecode: CommandLine,
        tiny: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        heads: Path,
        drafter: str,
        tree: str,
    ) -> None:
        monkeypatch.setenv("SPECDECODE_CACHE", str(tmp_path))
        calibrate = measuring.calibrate
        monkeypatch.setattr(measuring, "PROMPTS", measuring.PROMPTS[4:6])
        monkeypatch.setattr(measuring, "calibrate", lambda *a, **k: calibrate(*a, **k | {"seconds": 0.5}))
        arguments = ("generate", "abcabcabc", "--model", tiny, "--max-new-tokens", "9", "--json", "--tree", tree)
        code, out, err = specdecode(*arguments, "--drafter", drafter)
        assert (code, err) == (0, "")
        (kept,) = (tmp_path / "calibrations").iterdir()
        subject = json.loads(kept.read_text())["subject"]
        head = "medusa" if drafter == "medusa" else "eagle"
        assert subject["drafter"] == head and subject["head"] == shipped.fingerprint(heads / "tiny" / head)
        monkeypatch.setattr(measuring, "calibrate", lambda *a, **k: pytest.fail("it was measured again"))
        again = json.loads(specdecode(*arguments, "--drafter", drafter)[1])
        assert again["config"]["drafting"] == json.loads(out)["config"]["drafting"]
        shape = again["config"]["drafting"]
        assert "optimal" not in str(shape) and "auto" not in str(shape)

    def test_methods_with_trees_of_their_own(self, specdecode: CommandLine, tiny: str, tmp_path: Path) -> None:
        prompts, file = tmp_path / "prompts.jsonl", tmp_path / "bench.json"
        prompts.write_text('{"id": "a", "category": "b", "turns": ["abcabcabc"]}\n')
        names = [
            "none",
            "auto",
            "eagle@sampled:2,1,with",
            "eagle",
            "hybrid@dynamic:3,2,4,0.1",
            "ngram",
            "ngram@chain:2",
        ]
        options = ("--model", tiny, "--prompts", str(prompts), "--max-new-tokens", "9", "--dtype", "float64")
        code, _, err = specdecode("bench", *options, "--drafters", ", ".join(names), "--json", str(file))
        assert (code, err) == (0, "")
        result = json.loads(file.read_text())
        assert list(result["summary"]) == names
        assert {method["overall"]["same_output"] for method in result["summary"].values()} == {1}


def test_every_tree_that_is_written_in_the_help_can_be_read() -> None:
    from specdecode_ref.cli import commands

    words = commands.Tree.__metadata__[0].help.partition(" (")[0].replace(" or ", ", ").rstrip(".").split(", ")  # type: ignore[attr-defined]
    assert [str(parse(word)) for word in words] == words
