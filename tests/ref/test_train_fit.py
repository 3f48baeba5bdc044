"""Training: what is trained is what decodes, it learns, and an interrupted run goes on as if nothing had been."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specdecode_ref.coins import Coins
from specdecode_ref.drafters import layouts
from specdecode_ref.drafters.eagle import Eagle, EagleHead
from specdecode_ref.drafters.layouts import DraftModel
from specdecode_ref.drafters.medusa import MedusaHeads
from specdecode_ref.drafters.shapes import parse
from specdecode_ref.errors import InputError, ModelError
from specdecode_ref.models import zoo
from specdecode_ref.models.transformer import Transformer
from specdecode_ref.models.zoo import Loaded
from specdecode_ref.sampling import SamplingRule
from specdecode_ref.train.corpus import Batch, Corpus
from specdecode_ref.train.fit import History, Plan, _schedule, fit, validate
from specdecode_ref.train.labels import loss
from specdecode_ref.train.recipes import SHALLOW, DraftRecipe, EagleRecipe, Guess, MedusaRecipe, Recipe, Shared
from specdecode_ref.train.report import plot
from specdecode_ref.train.text import Plan as TextPlan
from specdecode_ref.train.text import write
from specdecode_ref.types import Context

LAYERS, LENGTH, DEPTHS = (0, 1, 2, 3), 14, 4
WORDS = torch.arange(1, 257, 5)
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def double(tiny: str) -> Loaded:
    return zoo.load(tiny, dtype="float64")


def shared(loaded: Loaded) -> Shared:
    """In the dtype of the target, so that only the networks are compared."""
    made = Shared.of(loaded.model, WORDS)
    return replace(made, table=made.table.to(loaded.model.dtype), head=made.head.to(loaded.model.dtype))


def stirred(recipe: Recipe) -> Recipe:
    """Weights in which everything matters, as float16 holds them: norms of all sizes, biases that are not zero."""
    torch.manual_seed(4)
    recipe.weights = {
        name: (w.double() + 0.3 * torch.randn(w.shape)).half().double() for name, w in recipe.weights.items()
    }
    return recipe


def batch(loaded: Loaded) -> Batch:
    """Two conversations with true features; the answers begin at different places."""
    torch.manual_seed(5)
    tokens = torch.randint(1, 250, (2, LENGTH))
    cache = loaded.model.new_cache(2, LENGTH)
    logits, features = loaded.model.forward(tokens, [range(-1, LENGTH - 1)] * 2, cache, LAYERS)
    answered = torch.arange(LENGTH)[None] >= torch.tensor([[5], [8]])
    top = logits.log_softmax(-1).topk(16)
    return Batch(tokens, answered, torch.stack(features, 2), top.indices, top.values)


def places(found: Batch, ahead: int, first: int = 0) -> list[list[int]]:
    """(row, place) of every guess of the token so far ahead, in the order in which a recipe gives them."""
    return [[b, i] for b, i in found.wanted(ahead).nonzero().tolist() if first <= i < LENGTH - 1]


def labelled(guess: Guess, found: Batch, where: list[list[int]], ahead: int) -> None:
    """The labels of a guess are the target's law of the token so far ahead, in the draft's words."""
    for (b, i), ids, mass in zip(where, guess.ids.tolist(), guess.mass, strict=True):
        law = dict(zip(found.top_ids[b, i + ahead - 1].tolist(), found.top_logs[b, i + ahead - 1].exp(), strict=True))
        told = {int(WORDS[j]): mass[rank] for rank, j in enumerate(ids) if j >= 0}
        assert told == {token: share for token, share in law.items() if token in WORDS.tolist()}


class TestWhatIsTrainedIsWhatDecodes:
    """The network of training against the saved and loaded head in the decoder's own code."""

    @pytest.mark.parametrize("hidden_layers", [1, 2])
    def test_eagle(self, double: Loaded, tmp_path: Path, hidden_layers: int) -> None:
        """At every place the head reads the true features up to there, then its own output for each deeper token."""
        recipe = stirred(EagleRecipe(shared(double), LAYERS, DEPTHS, 40, hidden_layers))
        recipe.save(tmp_path, {})
        head, found = layouts.load(tmp_path, double.model), batch(double)
        assert isinstance(head, EagleHead)
        guesses = list(recipe.guesses(found))
        assert [guess.depth for guess in guesses] == list(range(DEPTHS))
        for guess in guesses:
            where = places(found, 2 + guess.depth, first=3)  # before it, not even the first guess is of an answer
            assert len(where) == len(guess.logits) > 0
            labelled(guess, found, where, 2 + guess.depth)
            for (b, i), row in zip(where, guess.logits, strict=True):
                tokens = found.tokens[b].tolist()
                cache = head.new_cache(1, LENGTH)
                fused = head.fused([found.features[b, : i + 1, k] for k in range(len(LAYERS))])
                x = head.read(tokens[1 : i + 2], fused, range(-1, i), cache)[-1:]
                cache.commit([range(i + 1)])
                for depth in range(1, guess.depth + 1):
                    x = head.read([tokens[i + 1 + depth]], x, [depth - 2], cache)
                torch.testing.assert_close(row, head.logits(x)[0], **CLOSE)

    def test_eagle_drafts_what_it_was_trained_to_guess(self, double: Loaded, tmp_path: Path) -> None:
        """Through the real drafter: with its own guesses as the text, every one of them is the recipe's best."""
        recipe = stirred(EagleRecipe(shared(double), LAYERS, DEPTHS, 40, 2))
        recipe.save(tmp_path, {})
        head, found = layouts.load(tmp_path, double.model), batch(double)
        assert isinstance(head, EagleHead)
        for i in (5, 8):
            prompt = found.tokens[0, : i + 2].tolist()
            features = [found.features[0, : i + 1, k] for k in range(len(LAYERS))]
            drafter = Eagle(head, parse("static:0.00.000.0000"))  # type: ignore[arg-type]
            proposer = drafter.start(prompt, SamplingRule(), features)
            drafted = proposer.propose(Context(prompt, len(prompt), 9), Coins(0)).tokens[1:]
            assert len(drafted) == DEPTHS
            text = replace(found, tokens=torch.cat((found.tokens[0, : i + 2], torch.tensor(drafted)))[None])
            text = replace(text, features=found.features[:1, : i + 2 + DEPTHS])
            text = replace(text, answered=torch.arange(i + 2 + DEPTHS)[None] >= i + 2)
            best = [WORDS[guess.logits[0].argmax()].item() for guess in recipe.guesses(text)]
            assert tuple(best) == drafted

    def test_medusa(self, double: Loaded, tmp_path: Path) -> None:
        recipe = stirred(MedusaRecipe(shared(double), 3))
        recipe.save(tmp_path, {})
        heads, whole = layouts.load(tmp_path, double.model), batch(double)
        assert isinstance(heads, MedusaHeads)
        found = replace(whole, features=whole.features[:, :, -1:])
        for guess in recipe.guesses(found):
            where = places(found, 2 + guess.depth)
            labelled(guess, found, where, 2 + guess.depth)
            expected = [heads.logits(found.features[b, i, 0])[guess.depth] for b, i in where]
            torch.testing.assert_close(guess.logits, torch.stack(expected), **CLOSE)

    def test_draft(self, double: Loaded, tmp_path: Path) -> None:
        recipe = stirred(DraftRecipe(shared(double), 2, 40))
        recipe.save(tmp_path, {})
        draft, found = layouts.load(tmp_path, double.model), batch(double)
        assert isinstance(draft, DraftModel) and draft.words and torch.equal(draft.words.ids, WORDS)
        cache = draft.model.new_cache(2, LENGTH)
        logits = draft.model.forward(found.tokens, [range(-1, LENGTH - 1)] * 2, cache).logits
        (guess,) = recipe.guesses(found)
        labelled(guess, found, places(found, 1), 1)
        rows, columns = torch.tensor(places(found, 1)).T
        torch.testing.assert_close(guess.logits, logits[rows, columns], **CLOSE)

    def test_heads_begin_where_the_target_is(self, double: Loaded) -> None:
        """Before training, a Medusa head makes of a feature what the target does, but for x + SiLU(0) = x."""
        made, whole = Shared.of(double.model, WORDS), batch(double)
        found = replace(whole, features=whole.features[:, :, -1:].float())
        guess = next(MedusaRecipe(made, 1).guesses(found))
        cache = double.model.new_cache(2, LENGTH)
        logits = double.model.forward(found.tokens, [range(-1, LENGTH - 1)] * 2, cache).logits
        rows, columns = torch.tensor(places(found, 2)).T
        torch.testing.assert_close(guess.logits.double(), logits[rows, columns][:, WORDS], **CLOSE)
        torch.testing.assert_close(made.first_norm, 0.2 * double.model.norm.float())  # type: ignore[attr-defined]

    def test_a_draft_model_begins_as_the_first_layers_of_the_target(self, double: Loaded) -> None:
        """All of its layers, as wide as they are: the target itself, whose last norm alone is quieter."""
        target, found = double.model, batch(double)
        assert isinstance(target, Transformer)
        recipe = DraftRecipe(shared(double), target.config.layers, target.config.intermediate)
        recipe.weights = {name: w.double() for name, w in recipe.weights.items()}
        (guess,) = recipe.guesses(found)
        cache = target.new_cache(2, LENGTH)
        logits = target.forward(found.tokens, [range(-1, LENGTH - 1)] * 2, cache).logits
        rows, columns = torch.tensor(places(found, 1)).T
        torch.testing.assert_close(guess.logits, 0.2 * logits[rows, columns][:, WORDS], **CLOSE)

    def test_a_narrower_draft_model_keeps_the_strongest_neurons(self, double: Loaded) -> None:
        target = double.model
        assert isinstance(target, Transformer)
        width, c = target.config.intermediate - 8, target.config
        whole, some = (DraftRecipe(shared(double), 1, each).weights for each in (c.intermediate, width))
        names = [f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")]
        all_, kept = ([w[names[0]], w[names[1]], w[names[2]].T] for w in (whole, some))
        strength = torch.stack([each.norm(dim=1) for each in all_]).prod(0)
        best = strength.argsort(descending=True)[:width]
        for each, left in zip(all_, kept, strict=True):
            torch.testing.assert_close(left, each[best])

    def test_what_the_target_does_not_have_begins_at_random(self, double: Loaded) -> None:
        target = double.model
        assert isinstance(target, Transformer)
        c = target.config
        deep, wide = (
            DraftRecipe(shared(double), layers, width).weights
            for layers, width in ((c.layers + 1, c.intermediate), (1, c.intermediate + 8))
        )
        assert deep[f"model.layers.{c.layers}.mlp.up_proj.weight"].shape == (c.intermediate, c.hidden)
        assert wide["model.layers.0.mlp.up_proj.weight"].shape == (c.intermediate + 8, c.hidden)
        assert wide["model.layers.0.mlp.up_proj.weight"].std() == pytest.approx(0.02, rel=0.1)

    def test_a_target_of_transformers_can_be_drafted_for(self, tmp_path: Path) -> None:
        """Another family, with a layer norm in place of the root-mean-square one: only its sizes are taken over."""
        transformers = pytest.importorskip("transformers")
        from specdecode_ref.models.hf import HuggingFaceModel

        torch.manual_seed(0)
        sizes = {"vocab_size": 257, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
        config = transformers.GPTNeoXConfig(**sizes, num_attention_heads=2, max_position_embeddings=64)
        target = HuggingFaceModel(transformers.GPTNeoXForCausalLM(config).eval())
        made = Shared.of(target, WORDS)
        tokens = torch.randint(1, 250, (1, LENGTH))
        cache = target.new_cache(1, LENGTH)
        logits, features = target.forward(tokens, [range(-1, LENGTH - 1)], cache, (0, 1, 2))
        top = logits.float().log_softmax(-1).topk(16)
        answered = torch.arange(LENGTH)[None] >= 4
        found = Batch(tokens, answered, torch.stack(features, 2).float(), top.indices, top.values)
        last = replace(found, features=found.features[:, :, -1:])
        recipes: list[tuple[Recipe, Batch]] = [
            (EagleRecipe(made, (0, 1, 2), 2, 40), found),
            (MedusaRecipe(made, 2), last),
            (DraftRecipe(made, 1, 40), found),
        ]
        for i, (recipe, read) in enumerate(recipes):
            recipe.weights = {name: w.clone().requires_grad_() for name, w in recipe.weights.items()}
            total = torch.stack([loss(g.logits, g.ids, g.mass).mean() for g in recipe.guesses(read)]).sum()
            total.backward()
            assert all(w.grad is not None for w in recipe.weights.values())
            recipe.save(tmp_path / str(i), {})
            layouts.load(tmp_path / str(i), target)
        zero = next(MedusaRecipe(made, 1).guesses(last)).logits
        own = logits[0][[i for _, i in places(last, 2)]][:, WORDS]
        torch.testing.assert_close(zero, own, rtol=1e-3, atol=1e-3)


@pytest.fixture(scope="module")
def corpus(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Shared, Corpus]:
    """A tiny target, and a few conversations that it wrote."""
    loaded, folder = zoo.load(tiny, dtype="float32"), tmp_path_factory.mktemp("text")
    plan = TextPlan(rows=8, steps=130, longest=60, features=LAYERS)
    write(loaded.model, loaded.tokenizer, plan, [0], ([], ["A passage."]), folder, lambda *_: None)
    return Shared.of(loaded.model, WORDS), Corpus(sorted(folder.iterdir()), range(len(LAYERS)))


def eagle(made: Shared, seed: int = 0) -> EagleRecipe:
    torch.manual_seed(seed)
    return EagleRecipe(made, LAYERS, 2, 24)


PLAN = Plan(epochs=3, rate=1e-2, batch=2, minutes=0.0, check=2)


class Interrupted(Exception):
    """What stands for a Ctrl-C or a crash."""


def until(last: int) -> Callable[[int, int, float, History], None]:
    def progress(step: int, steps: int, late: float, history: History) -> None:
        if step == last:
            raise Interrupted

    return progress


class TestFit:
    """A run and its checkpoints."""

    @pytest.mark.parametrize("kind", ["eagle", "medusa", "draft"])
    def test_the_loss_falls(self, corpus: tuple[Shared, Corpus], tmp_path: Path, kind: str) -> None:
        made, whole = corpus
        torch.manual_seed(0)
        recipe: Recipe = eagle(made) if kind == "eagle" else DraftRecipe(made, 1, 24)
        if kind == "medusa":
            recipe, whole = MedusaRecipe(made, 2), Corpus([whole.places[0].shard], [len(LAYERS) - 1])

        def mean() -> float:
            guesses = [guess for each in whole.places for guess in recipe.guesses(whole.batch([each]))]
            return torch.cat([loss(guess.logits, guess.ids, guess.mass) for guess in guesses]).mean().item()

        before = mean()
        history = fit(recipe, whole, whole, replace(PLAN, epochs=12, minutes=99.0), tmp_path)
        steps = 12 * len(whole.epoch(2, 0))
        assert mean() < 0.97 * before
        assert [step for step, _ in history.losses] == [*range(25, steps, 25), *([steps] if steps % 25 else [])]
        assert [step for step, _ in history.acceptance] == [steps]
        assert not any(w.requires_grad for w in recipe.weights.values())
        polyline = plot(history)
        assert polyline.startswith("<svg") and polyline.count(",") >= len(history.losses)

    def test_an_interrupted_run_goes_on_as_if_nothing_had_been(
        self, corpus: tuple[Shared, Corpus], tmp_path: Path
    ) -> None:
        made, whole = corpus
        straight, resumed = eagle(made), eagle(made, seed=8)
        kept = fit(straight, whole, whole, PLAN, tmp_path / "straight")
        for last in (3, 7):
            with pytest.raises(Interrupted):
                fit(eagle(made, seed=0 if last == 3 else 9), whole, whole, PLAN, tmp_path / "broken", until(last))
        told: list[int] = []
        history = fit(resumed, whole, whole, PLAN, tmp_path / "broken", lambda step, *_: told.append(step))
        assert told == list(range(8, 1 + kept.acceptance[-1][0]))
        assert all(torch.equal(w, resumed.weights[name]) for name, w in straight.weights.items())
        assert [entry[1] for entry in history.acceptance] == [entry[1] for entry in kept.acceptance]
        fit(resumed, whole, whole, PLAN, tmp_path / "broken", lambda *_: pytest.fail("it was finished"))
        assert all(torch.equal(w, resumed.weights[name]) for name, w in straight.weights.items())

    def test_first_guesses_come_first(self, corpus: tuple[Shared, Corpus]) -> None:
        made, whole = corpus
        found = whole.batch(whole.places[:2])
        depths = [len(list(eagle(made).guesses(found, done))) for done in (0.0, SHALLOW - 0.01, SHALLOW, 1.0)]
        assert depths == [1, 1, 2, 2]

    def test_the_rate_rises_and_falls(self) -> None:
        rates = [_schedule(step, 400) for step in range(400)]
        assert rates[0] == pytest.approx(0.02) and rates.index(max(rates)) == 49
        assert rates[-1] == pytest.approx(0.05, abs=1e-3) and min(rates[50:]) >= 0.05

    @pytest.mark.parametrize(
        ("change", "kind", "why"),
        [
            ("plan", InputError, "a checkpoint of this very run in .*; got another plan or text; name another folder"),
            ("sizes", InputError, "got another plan or text"),
            ("cut", ModelError, "a checkpoint in .*; got a damaged one .*; delete it to begin anew"),
            ("other", ModelError, "got a damaged one"),
        ],
    )
    def test_a_checkpoint_that_is_not_of_this_run(
        self, corpus: tuple[Shared, Corpus], tmp_path: Path, change: str, kind: type[Exception], why: str
    ) -> None:
        made, whole = corpus
        with pytest.raises(Interrupted):
            fit(eagle(made), whole, whole, PLAN, tmp_path, until(2))
        path, recipe, plan = tmp_path / "checkpoint.safetensors", eagle(made), PLAN
        if change == "plan":
            plan = replace(PLAN, rate=1e-3)
        elif change == "sizes":
            recipe = EagleRecipe(made, LAYERS, 2, 25)
        elif change == "cut":
            path.write_bytes(path.read_bytes()[:-9])
        else:
            from safetensors import safe_open
            from safetensors.torch import save_file

            with safe_open(path, framework="pt") as file:
                about = file.metadata()
            save_file({"weight/other": torch.zeros(2)}, path, metadata=about)
        before = path.read_bytes()
        with pytest.raises(kind, match=why) as caught:
            fit(recipe, whole, whole, plan, tmp_path)
        assert "\n" not in str(caught.value) and path.read_bytes() == before

    def test_a_full_disk_leaves_the_checkpoint_before(
        self, corpus: tuple[Shared, Corpus], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        made, whole = corpus
        with pytest.raises(Interrupted):
            fit(eagle(made), whole, whole, PLAN, tmp_path, until(2))
        before = load_file(tmp_path / "checkpoint.safetensors")

        def full(tensors: dict[str, Tensor], path: Path, **_: object) -> None:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr("safetensors.torch.save_file", full)
            with pytest.raises(ModelError, match=r"room for .*; got No space left on device; make room .*goes on"):
                fit(eagle(made), whole, whole, PLAN, tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.safetensors"]
        after = load_file(tmp_path / "checkpoint.safetensors")
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())

    def test_a_loss_that_is_no_number_ends_the_run(self, corpus: tuple[Shared, Corpus], tmp_path: Path) -> None:
        made, whole = corpus
        recipe = eagle(made)
        recipe.weights["fc.weight"][0, 0] = float("nan")
        with pytest.raises(ModelError, match="a finite loss; got nan; lower the learning rate"):
            fit(recipe, whole, whole, PLAN, tmp_path)
        assert not list(tmp_path.iterdir())

    def test_validation_reads_as_many_conversations_as_told(self, corpus: tuple[Shared, Corpus]) -> None:
        made, whole = corpus
        all_of_it = validate(eagle(made), whole, 10**9)
        guesses = sum(len(guess.ids) for place in whole.places for guess in eagle(made).guesses(whole.batch([place])))
        assert sum(int(row[0]) for row in all_of_it.counts.values()) == guesses
        fewer = validate(eagle(made), whole, 2)
        assert fewer.counts[0][0] < all_of_it.counts[0][0]
        assert json.loads(json.dumps(all_of_it.acceptance())) == all_of_it.acceptance()
