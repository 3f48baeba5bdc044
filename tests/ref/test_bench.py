"""Measuring: which prompts, in which order, which figures; and that every peer runs on the same weights."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specdecode_ref import bench
from specdecode_ref.bench import Prompt, Run, Sample
from specdecode_ref.drafters import shipped
from specdecode_ref.drafters.ngram import NGram
from specdecode_ref.models import zoo
from specdecode_ref.models.table import TableModel
from specdecode_ref.sampling import SamplingRule
from specdecode_ref.train.recipes import DraftRecipe, Shared

CommandLine = Callable[..., tuple[int, str, str]]


def prompts_of(**sizes: int) -> list[Prompt]:
    return [Prompt(f"{category}-{i}", category, "text") for category, size in sizes.items() for i in range(size)]


@pytest.fixture
def prompts_file(tmp_path: Path) -> str:
    rows = [{"id": f"q{i}", "category": "ab"[i % 2], "turns": [f"abc{i}abc{i}abc", "second"]} for i in range(5)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return str(path)


@pytest.mark.parametrize(
    ("sizes", "limit", "expected"),
    [
        ({"a": 40, "b": 40, "c": 5}, 24, {"a": 10, "b": 9, "c": 5}),
        ({"a": 10, "b": 10}, 5, {"a": 3, "b": 2}),
        ({"a": 2, "b": 2, "c": 2}, 2, {"a": 1, "b": 1}),
        ({"a": 3}, 9, {"a": 3}),
        ({"a": 3, "b": 1}, None, {"a": 3, "b": 1}),
    ],
)
def test_prompts_are_spread_over_categories(sizes: dict[str, int], limit: int | None, expected: dict[str, int]) -> None:
    chosen = bench.spread(prompts_of(**sizes), limit)
    assert Counter(prompt.category for prompt in chosen) == expected
    assert chosen == bench.spread(prompts_of(**sizes), limit)
    assert len({prompt.id for prompt in chosen}) == len(chosen)


def test_prompts_of_a_category_are_evenly_spaced() -> None:
    assert [prompt.id for prompt in bench.spread(prompts_of(a=40), 4)] == ["a-0", "a-10", "a-20", "a-30"]


def test_the_shared_prompts_can_be_read(shared_data: Path) -> None:
    found = bench.read_prompts([str(path) for path in sorted(shared_data.glob("*.jsonl"))])
    assert len(found) == 322
    assert len({prompt.category for prompt in bench.spread(found, 24)}) == 14


def fake(log: list[str], name: str, tokens: Sequence[int]) -> bench.Method:
    def run(prompt: Sequence[int], max_new_tokens: int) -> Run:
        log.append(f"{name}{prompt[0]}" if max_new_tokens > bench.WARM_UP_TOKENS else f"warm {name}")
        return Run(tuple(tokens), 2)

    return run


def test_methods_take_turns_after_an_uncounted_warm_up() -> None:
    log: list[str] = []
    methods = {name: fake(log, name, (1, 2)) for name in "abc"}
    encoded = [(Prompt(str(i), "x", "t"), [i]) for i in range(2)]
    samples = list(bench.measure(methods, encoded, max_new_tokens=9, repeats=2))
    assert log[:3] == ["warm a", "warm b", "warm c"]
    assert log[3:] == ["a0", "b0", "c0", "b1", "c1", "a1", "b0", "c0", "a0", "c1", "a1", "b1"]
    assert [f"{s.method}{s.prompt}" for s in samples] == log[3:]
    assert all(s.seconds >= 0 for s in samples)


def sample(method: str, prompt: str, seconds: float, tokens: tuple[int, ...], repeat: int = 0) -> Sample:
    return Sample(method, prompt, "x" if prompt < "c" else "y", repeat, seconds, Run(tokens, 2))


def test_figures_by_hand() -> None:
    samples = [
        *(sample("none", "a", seconds, (1, 2, 3, 4), repeat) for repeat, seconds in enumerate((2.0, 9.0, 1.0))),
        *(sample("fast", "a", seconds, (1, 2, 3, 4), repeat) for repeat, seconds in enumerate((1.0, 0.5, 7.0))),
        sample("none", "b", 4.0, (5, 6)),
        sample("fast", "b", 4.0, (5, 7)),
        sample("none", "c", 1.0, (8,)),
        sample("fast", "c", 0.25, (8,)),
    ]
    found = bench.summarise(samples, "none")
    assert list(found) == ["none", "fast"]
    none, fast = found["none"]["overall"], found["fast"]["overall"]
    assert (none["tokens"], none["seconds"], none["tokens_per_second"], none["ratio"]) == (7, 7.0, 1.0, 1.0)
    assert (fast["tokens"], fast["seconds"]) == (7, 5.25)
    assert fast["ratio"] == pytest.approx(7 / 5.25)
    assert fast["median_ratio"] == 2.0
    assert fast["median_tokens_per_second"] == 4.0
    assert fast["same_output"] == 2
    assert fast["tau"] == pytest.approx(15 / 10)
    assert found["fast"]["categories"]["y"]["ratio"] == 4.0
    assert found["fast"]["categories"].keys() == {"x", "y"}


def test_our_own_method_counts_its_rounds() -> None:
    model = TableModel.random(4)
    run = bench.ours(model, NGram(gamma=3), SamplingRule(temperature=0), seed=0)([1, 2, 1, 2], 30)
    assert len(run.tokens) == 30
    assert run.trace is not None and run.trace.header.level == 2
    figures = bench.summarise([Sample("ngram", "a", "x", 0, 1.0, run)], "ngram")["ngram"]["overall"]
    assert figures["tau"] == pytest.approx(30 / run.rounds)
    shares = [figures[f"{part}_share"] for part in ("draft", "verify", "overhead")]
    assert min(shares) > 0 and sum(shares) == pytest.approx(1)
    drafts = [r for r in run.trace.rounds if len(r.nodes.parent) > 1]
    assert figures["first_rate"] == sum(len(r.path) > 1 for r in drafts) / len(drafts) > 0


def test_every_peer_writes_our_text(specdecode: CommandLine, tiny: str, prompts_file: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "bench.json"
    options = ("--model", tiny, "--dtype", "float64", "--prompts", prompts_file, "--limit", "4")
    more = ("--drafters", "none,ngram", "--peers", "hf,hf-pld", "--max-new-tokens", "20", "--json", str(file))
    code, out, err = specdecode("bench", *options, *more)
    assert (code, err) == (0, "")
    result = json.loads(file.read_text())
    assert list(result["summary"]) == ["none", "ngram", "hf", "hf-pld"]
    for method in result["summary"].values():
        assert method["overall"]["same_output"] == method["overall"]["prompts"] == 4
        assert method["overall"]["tau"] >= 1
    assert result["summary"]["hf"]["overall"]["tau"] == 1
    assert len(result["samples"]) == 16
    assert {len(s["tokens"]) for s in result["samples"]} == {20}
    assert result["config"]["threads"] >= 1 and result["config"]["cpu"]
    assert "float64" in out and "hf-pld" in out and "tau" in out and "/ rest" in out


def test_assisted_generation_uses_the_shipped_draft(
    specdecode: CommandLine, tiny: str, prompts_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(shipped, "HEADS", tmp_path / "heads")
    options = ("--model", tiny, "--prompts", prompts_file, "--limit", "1", "--max-new-tokens", "12")
    methods = ("--dtype", "float64", "--peers", "hf-assisted", "--drafters", "none")
    code, _, err = specdecode("bench", *options, *methods)
    assert code == 2 and "a draft model that is shipped for 'tiny'" in err and err.count("\n") == 1
    DraftRecipe(Shared.of(zoo.load(tiny).model, torch.arange(0, 256, 3)), 1, 24).save(tmp_path / "heads/tiny/draft", {})
    file = tmp_path / "bench.json"
    code, _, err = specdecode("bench", *options, *methods, "--json", str(file))
    assert (code, err) == (0, "")
    assisted = json.loads(file.read_text())["summary"]["hf-assisted"]["overall"]
    assert assisted["same_output"] == 1


def test_an_interrupt_keeps_the_prompts_that_every_method_ran(
    specdecode: CommandLine, tiny: str, prompts_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = bench.measure

    def interrupted(*arguments: Any) -> Iterator[Sample]:
        for number, found in enumerate(measure(*arguments)):
            if number == 5:
                raise KeyboardInterrupt
            yield found

    monkeypatch.setattr(bench, "measure", interrupted)
    file = tmp_path / "bench.json"
    options = ("--model", tiny, "--prompts", prompts_file, "--max-new-tokens", "9", "--json", str(file))
    code, out, err = specdecode("bench", *options)
    assert code == 130
    assert err == "specdecode: note: interrupted: the figures are those of 2 finished prompts\n"
    assert json.loads(file.read_text())["summary"]["auto"]["overall"]["prompts"] == 2
    assert "tau" in out


def test_sampling_ends_at_the_same_length_for_peers(specdecode: CommandLine, tiny: str, prompts_file: str) -> None:
    pytest.importorskip("transformers")
    options = ("--model", tiny, "--prompts", prompts_file, "--limit", "2", "--max-new-tokens", "9")
    code, out, _ = specdecode("bench", *options, "--temperature", "1", "--top-p", "0.9", "--peers", "hf")
    assert code == 0
    assert "temperature 1.0, top-p 0.9" in out
    assert "same tokens" not in out  # under sampling equal tokens would be chance, not a check


def test_a_chain_and_a_tree_side_by_side(specdecode: CommandLine, tiny: str, prompts_file: str) -> None:
    options = ("--model", tiny, "--prompts", prompts_file, "--limit", "1", "--max-new-tokens", "9", "--tree", "2,1")
    code, out, _ = specdecode("bench", *options, "--drafters", "none,ngram,early-exit,model", "--draft-model", tiny)
    assert code == 0
    assert "early-exit" in out
