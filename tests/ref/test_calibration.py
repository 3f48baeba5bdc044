"""Calibration: what is measured is what decoding would do, and what is kept comes back as it was or not at all."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from specdecode_ref.decode import Session
from specdecode_ref.drafters import choice, measuring
from specdecode_ref.drafters.calibration import Calibration, Draft, Subject, calibrated
from specdecode_ref.drafters.choice import candidates, forecast, resolve
from specdecode_ref.drafters.eagle import Eagle, EagleHead, Fusion
from specdecode_ref.drafters.hybrid import Hybrid
from specdecode_ref.drafters.measuring import calibrate
from specdecode_ref.drafters.model import ModelDrafter
from specdecode_ref.drafters.ngram import NGram
from specdecode_ref.drafters.optimal import optimal
from specdecode_ref.drafters.shapes import Auto, Dynamic, Optimal, Sampled, Shape, Static, chain, parse
from specdecode_ref.errors import InputError
from specdecode_ref.fidelity.setups import transformer
from specdecode_ref.models.base import Model
from specdecode_ref.models.layers import Layer, Weights
from specdecode_ref.models.linear import pack
from specdecode_ref.models.table import TableModel
from specdecode_ref.sampling import SamplingRule

SUBJECT = Subject("org/target", "abc", "model", "123", "cpu", "float32", "2.0", 1)
V = 11


class Letters:
    """A tokenizer of a few tokens: a text is spelled by its letters, modulo the vocabulary."""

    def __init__(self, eos_ids: tuple[int, ...] = (), chat_template: str | None = None) -> None:
        self.eos_ids, self.chat_template = eos_ids, chat_template

    def encode(self, text: str) -> list[int]:
        return [ord(c) % V for c in text]

    def chat(self, messages: str) -> list[int]:
        return [V - 1, *self.encode(messages)]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two short prompts and few sizes: a table reads its context slot by slot."""
    monkeypatch.setattr(measuring, "PROMPTS", ("one fine day", "def f(x): "))
    monkeypatch.setattr(measuring, "ROWS", (1, 4))
    monkeypatch.setattr(measuring, "NODES", (1, 2))
    monkeypatch.setattr(measuring, "CONTEXT", 16)
    monkeypatch.setattr(measuring, "PLACES", 40)


TARGET = TableModel.random(V, order=2, period=5, seed=0)


def rough(seed: int = 1, noise: float = 1.0) -> TableModel:
    """A draft model that often agrees with the target."""
    other = TableModel.random(V, order=2, period=5, seed=seed)
    return TableModel(TARGET.table + noise * other.table, TARGET.tilt)


DRAFT = rough()


def measured(make: Callable[[Shape], Any] = lambda shape: ModelDrafter(DRAFT, shape), **settings: Any) -> Calibration:
    target: Model = settings.pop("target", TARGET)
    return calibrate(target, make, settings.pop("tokenizer", Letters()), SUBJECT, **settings)


@cache
def standard() -> Calibration:
    """One that many tests read."""
    return measured()


def written() -> list[int]:
    """What the target writes after the first prompt."""
    prompt = Letters().encode(measuring.PROMPTS[0])
    return list(Session(TARGET, [prompt], rule=SamplingRule(temperature=0), max_new_tokens=40).run()[0].tokens)


def rounds(shape: Shape, lengths: list[int], target: Model = TARGET, make: Any = None) -> tuple[int, int]:
    """Rounds and tokens of the real loop at temperature 0, up to the round that reaches each text's length."""
    drafter = make(shape) if make else ModelDrafter(DRAFT, shape)
    total = tokens = 0
    for prompt, length in zip(measuring.PROMPTS, lengths, strict=True):
        session = Session(
            target, [Letters().encode(prompt)], drafter, rule=SamplingRule(temperature=0), max_new_tokens=length + 20
        )
        done = 0
        for step in session:
            total += 1
            done += step.round.kept
            if done >= length:
                break
        tokens += done
    return total, tokens


REPLAYED = (
    *("chain:1", "chain:4", "chain:8", "static:0", "static:narrow", "static:0.1.2.3.00.01.10.000.0000"),
    *("dynamic:3,4,6", "dynamic:6,4,16", "dynamic:4,4,9,0.05", "dynamic:5,4,16,0.2", "dynamic:2,4,4,0.4"),
)


def test_a_forecast_is_what_decoding_does() -> None:
    """Rounds and tokens at temperature 0, for chains, static trees and dynamic ones as wide as the wide drafts."""
    found = standard()
    lengths = [len(text) for text in found.texts]
    assert lengths == [measuring.PLACES] * 2
    taus = set()
    for text in REPLAYED:
        shape = cast(Shape, parse(text))
        total, tokens = rounds(shape, lengths)
        assert forecast(shape, found).tau == tokens / total, text
        taus.add(tokens / total)
    assert len(taus) > 5, "the shapes must differ, or nothing was compared"


def test_a_narrow_dynamic_tree_is_replayed_nearly() -> None:
    found = standard()
    for shape in (Dynamic(4, 2, 6), Dynamic(5, 3, 9, 0.1), Dynamic(4, 1, 4)):
        total, tokens = rounds(shape, [measuring.PLACES] * 2)
        assert forecast(shape, found).tau == pytest.approx(tokens / total, rel=0.05)


def test_the_rows_and_levels_that_are_paid_are_those_of_the_real_trees() -> None:
    """A dynamic tree with a floor varies in size, and so does what a round costs."""
    found, opened = standard(), []

    class Counting(TableModel):
        def forward(self, tokens: Any, parents: Any, cache: Any, features: Any = ()) -> Any:
            opened.append(tokens.shape[1])
            return super().forward(tokens, parents, cache, features)

    prompt, draft = Letters().encode(measuring.PROMPTS[0]), Counting(DRAFT.table, DRAFT.tilt)
    for shape in (
        Dynamic(4, 4, 9, 0.05),
        Dynamic(6, 4, 12, 0.2),
        Dynamic(3, 4, 12),
        Static(((0,), (1,), (0, 0), (1, 0))),
    ):
        sizes = set()
        for place, tree in enumerate(measuring._proposals(ModelDrafter(draft, shape), prompt, written(), ())):
            wide = found.texts[0][place]
            if isinstance(shape, Dynamic):
                grown = choice._Grown.of(wide, shape.depth, shape.width)
                played = choice._cut(shape.nodes, shape.floor)(grown)
            else:
                played = choice._fixed(shape)(wide)
            assert played.rows == len(tree)
            assert opened[-len(played.opened) :] == list(played.opened), "the first of them reads the root"
            assert place == 0 or len(opened) == len(played.opened)
            sizes.add((played.rows, played.opened))
            opened.clear()
        assert len(sizes) > 3 if isinstance(shape, Dynamic) and shape.floor else len(sizes) == 1


def test_a_text_ends_where_the_target_ends_it() -> None:
    plain = standard()
    eos = written()[5]
    ended = measured(tokenizer=Letters(eos_ids=(eos,)))
    assert len(ended.texts[0]) <= 6 < len(plain.texts[0])
    assert max(len(draft.path) - 1 + place for place, draft in enumerate(ended.texts[0])) <= len(ended.texts[0])


def test_a_chat_template_is_used_where_there_is_one() -> None:
    seen: list[tuple[int, ...]] = []

    class Watching(TableModel):
        def prefill(self, prompts: Any, cache: Any, features: Any = ()) -> Any:
            seen.extend(map(tuple, prompts))
            return super().prefill(prompts, cache, features)

    measured(target=Watching(TARGET.table, TARGET.tilt), tokenizer=Letters(chat_template="x"), seconds=0.0)
    assert seen[0] == (V - 1, *Letters().encode(measuring.PROMPTS[0]))[:-1]


def test_without_time_a_little_is_measured_all_the_same() -> None:
    heard: list[tuple[float, str]] = []
    found = measured(seconds=0.0, progress=lambda share, what: heard.append((share, what)))
    assert [len(text) for text in found.texts] == [1, 1]
    assert set(found.rows) == {1, 4} and set(found.level) == {1, 2}
    assert (
        heard[0][0] == 0 and heard[-1][0] == 1 and [share for share, _ in heard] == sorted(share for share, _ in heard)
    )


def test_a_context_too_short_is_refused_before_anything_runs() -> None:
    short = TableModel(TARGET.table, TARGET.tilt)
    short.context_length = 49
    with pytest.raises(InputError, match="a context of 50 tokens or more"):
        measured(target=short)
    short.context_length = 55
    assert len(measured(target=short, seconds=0.0).texts) == 2


def test_a_drafter_that_never_drafts_cannot_be_calibrated() -> None:
    nowhere = rough()
    nowhere.context_length = 1
    with pytest.raises(InputError, match="a drafter that drafts"):
        measured(lambda shape: ModelDrafter(nowhere, shape), seconds=0.0)


def test_a_hybrid_can_be_calibrated() -> None:
    """Where its lookup took a round alone, no head was asked how sure it was."""

    def make(shape: Shape) -> Hybrid:
        return Hybrid(NGram(3, 3, 1), ModelDrafter(DRAFT, shape))

    found = measured(make)
    assert any(len(draft.scores) > 1 and not any(draft.scores) for text in found.texts for draft in text)
    best = resolve(Auto(), found, (Dynamic,))
    assert isinstance(best, Dynamic)
    total, tokens = rounds(Dynamic(4, 4, 9), [len(text) for text in found.texts], TARGET, make)
    assert forecast(Dynamic(4, 4, 9), found).tau == pytest.approx(tokens / total, rel=0.15)


def eagle_head(hidden: int, vocab: int, layers: tuple[int, ...]) -> EagleHead:
    """One random layer over the fused features of a tiny target."""
    config = dataclasses.replace(transformer(dtype=torch.float32).truncated(1).config, vocab_size=vocab)
    generator = torch.Generator().manual_seed(5)

    def random_linear(rows: int, columns: int) -> Any:
        weight = torch.randn(rows, columns, generator=generator) * columns**-0.5
        return pack(weight, None, torch.float32, torch.device("cpu"))

    wide = (config.heads + 2 * config.kv_heads) * config.head_dim
    layer = Layer(
        attention_norm=torch.ones(hidden),
        qkv=random_linear(wide, 2 * hidden),
        q_norm=None,
        k_norm=None,
        output=random_linear(hidden, hidden),
        mlp_norm=torch.ones(hidden),
        gate_up=random_linear(2 * config.intermediate, hidden),
        down=random_linear(hidden, config.intermediate),
    )
    table = torch.randn(vocab, hidden, generator=generator)
    weights = Weights(table, [layer], torch.ones(hidden), random_linear(vocab, hidden))
    fusion = Fusion(layers, random_linear(hidden, len(layers) * hidden), torch.ones(hidden))
    return EagleHead(config, weights, fusion, "eagle", None)


def test_a_head_is_measured_on_the_features_it_decodes_with() -> None:
    """At every place where a real round began, its draft there was the very tree that is measured there."""
    target, head = transformer(dtype=torch.float32), eagle_head(16, V, (1, 2, 3))
    shape, proposed = Dynamic(4, 4, 12), {}

    class Noting(Eagle):
        def start(self, prompt: Any, rule: Any, features: Any = ()) -> Any:
            proposer = super().start(prompt, rule, features)
            propose = proposer.propose

            def noted(context: Any, coins: Any) -> Any:
                proposed[context.base] = propose(context, coins)
                return proposed[context.base]

            proposer.propose = noted  # type: ignore[method-assign, assignment]
            return proposer

    prompt, rule = Letters().encode(measuring.PROMPTS[0]), SamplingRule(temperature=0)
    session = Session(target, [prompt], Noting(head, shape), rule=rule, max_new_tokens=40)
    text = session.run()[0].tokens
    features = measuring._features(target, Eagle(head), [*prompt, *text])
    trees = list(measuring._proposals(Eagle(head, shape), prompt, text, features))
    begun = [base for base in proposed if base < len(prompt) + 40 - measuring.AHEAD]
    assert len(begun) > 8
    for base in begun:
        assert trees[base - len(prompt)].tokens == proposed[base].tokens


def test_a_calibrated_head_foretells_its_own_decoding() -> None:
    target, head = transformer(dtype=torch.float32), eagle_head(16, V, (1, 2, 3))
    found = measured(lambda shape: Eagle(head, shape), target=target)
    total, tokens = rounds(Dynamic(3, 4, 12), [len(t) for t in found.texts], target, lambda shape: Eagle(head, shape))
    assert forecast(Dynamic(3, 4, 12), found).tau == pytest.approx(tokens / total, rel=0.02)
    assert sum(map(sum, found.acceptance)) > 0


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


def test_optimal_is_the_best_tree_for_the_measured_acceptance() -> None:
    found = invented()
    assert resolve(Optimal(4), found) == optimal(found.acceptance, 4)
    for shape in (chain(3), Static(((0,),)), Dynamic(2, 2, 3)):
        assert resolve(shape, found) is shape


def test_auto_is_the_fastest_of_all_it_tries() -> None:
    found = invented(places=15)
    tried = dict(candidates(found))
    best = resolve(Auto(), found)
    assert tried[best].speed == max(f.speed for f in tried.values())
    assert {type(shape) for shape in tried} == {Sampled, Static, Dynamic} and len(tried) > 500
    narrower = resolve(Auto(), found, (Dynamic,))
    assert tried[narrower].speed == max(f.speed for shape, f in tried.items() if isinstance(shape, Dynamic))
    for shape in random.Random(0).sample(list(tried), 40):
        assert forecast(shape, found) == tried[shape]


def test_auto_follows_the_costs() -> None:
    """Free rows make large trees, dear rows small ones, dear levels shallow ones; a floor pays where rows are dear."""

    def nodes(**costs: Any) -> tuple[int, int, float]:
        """Nodes, levels and floor."""
        shape = resolve(Auto(), invented(places=15, **costs))
        if isinstance(shape, Dynamic):
            return shape.nodes, shape.depth, shape.floor
        return shape.nodes, len(shape.branching) if isinstance(shape, Sampled) else max(map(len, shape.paths)), 0.0

    flat = {"rows": {1: 1.0, 64: 1.0}, "start": 1e-6, "level": {1: 1e-6}}
    assert nodes(**flat)[0] >= 6
    assert nodes(**flat | {"rows": {1: 1.0, 2: 10.0}})[0] == 1
    assert nodes(**flat | {"level": {1: 50.0}})[1] == 1
    steep = nodes(**flat | {"rows": {1: 1.0, 2: 1.4, 3: 1.8, 64: 26.0}})
    assert steep[0] < nodes(**flat)[0] or steep[2] > 0


def test_a_forecast_by_hand() -> None:
    parents, scores = (-1, 0, 0, 1), (0.0, -0.5, -1.5, -2.5)
    accepted = [(0, 1, 3), (0,), (0,), (0, 2), (0, 1), (0,)]
    texts = (tuple(Draft(parents, scores, path) for path in accepted),)
    found = Calibration(SUBJECT, {1: 1.0, 2: 2.0, 4: 6.0}, 0.5, {1: 0.25, 2: 0.35}, texts)
    # chain:2 starts rounds at places 0 (accepts 2), 3 (0) and 4 (1); three rows cost 4, one further level 0.25
    assert forecast(chain(2), found) == (6 / 3, 6 / (3 * (4.0 + 0.5 + 0.25)))
    # static:0.1 at places 0 (1), 2 (0), 3 (1), 5 (0), no further level
    assert forecast(Static(((0,), (1,))), found) == (6 / 4, 6 / (4 * 4.5))
    # all three nodes: places 0 (2), 3 (1), 5 (0); the second level opens two nodes
    assert forecast(Dynamic(2, 2, 3), found) == pytest.approx((6 / 3, 6 / (3 * (6.0 + 0.5 + 0.35))))
    # a floor of e^-1 keeps node 1 alone: places 0 (1), 2 (0), 3 (0), 4 (1); only node 1 is opened
    assert forecast(Dynamic(2, 2, 3, 0.36), found) == pytest.approx((6 / 4, 6 / (4 * (2.0 + 0.5 + 0.25))))


def test_larger_sizes_than_measured_cost_in_proportion() -> None:
    found = Calibration(SUBJECT, {1: 1.0, 4: 2.0}, 0.1, {1: 0.1, 2: 0.4}, invented().texts)
    prices = choice._Prices.of(found)
    assert [prices.rows[n] for n in (1, 2, 4, 8)] == pytest.approx([1.0, 4 / 3, 2.0, 4.0])
    assert [prices.level[n] for n in (1, 2, 3)] == pytest.approx([0.1, 0.4, 0.6])


def test_a_sampled_tree_has_no_forecast() -> None:
    with pytest.raises(InputError, match="filled by rank"):
        forecast(Sampled((2, 2)), invented())


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


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECDECODE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def never() -> Calibration:
    raise AssertionError("measured although it was kept")


def test_a_calibration_is_measured_once(folder: Path) -> None:
    found = invented()
    assert calibrated(SUBJECT, lambda: found) == (found, None)
    assert calibrated(SUBJECT, never) == (found, None)
    assert [path.name for path in (folder / "calibrations").iterdir()] == [SUBJECT.file]
    for name in (f.name for f in dataclasses.fields(Subject)):
        change: dict[str, Any] = {name: 2 if name == "threads" else "other"}
        other = dataclasses.replace(SUBJECT, **change)
        assert other.file != SUBJECT.file
        fresh = dataclasses.replace(found, subject=other, start=7.0)
        assert calibrated(other, lambda fresh=fresh: fresh) == (fresh, None)  # type: ignore[misc]
    assert calibrated(SUBJECT, never) == (found, None)


@pytest.mark.parametrize("text", ["", "{}", "\0\0", "\udcff"], ids=ascii)
def test_a_damaged_file_is_measured_again(folder: Path, text: str) -> None:
    calibrated(SUBJECT, invented)
    file = folder / "calibrations" / SUBJECT.file
    whole = file.read_bytes()
    file.write_bytes(text.encode(errors="surrogateescape"))
    assert calibrated(SUBJECT, invented) == (invented(), None)
    assert file.read_bytes() == whole
    file.write_bytes(whole[: len(whole) // 2])
    assert calibrated(SUBJECT, invented) == (invented(), None)


def test_the_file_of_another_subject_is_measured_again(folder: Path) -> None:
    other = dataclasses.replace(invented(), subject=dataclasses.replace(SUBJECT, revision="def"))
    calibrated(SUBJECT, invented)
    (folder / "calibrations" / SUBJECT.file).write_text(other.to_json())
    assert calibrated(SUBJECT, lambda: invented(1)) == (invented(1), None)


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SPECDECODE_CACHE", str(tmp_path / "file"))
    found, warning = calibrated(SUBJECT, invented)
    assert found == invented() and warning and "SPECDECODE_CACHE" in warning and "\n" not in warning


def test_a_crash_while_writing_leaves_nothing_half_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.write_text", full)
        _, warning = calibrated(SUBJECT, invented)
    assert warning and "No space left on device" in warning
    assert list((folder / "calibrations").iterdir()) == []


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
