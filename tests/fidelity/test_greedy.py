"""R5: at temperature 0 the tokens are those of `transformers.generate`, and of equal maxima the first one wins."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from specdecode_ref.decode import autoregressive, speculative
from specdecode_ref.drafters import build
from specdecode_ref.drafters.first import First
from specdecode_ref.drafters.model import ModelDrafter
from specdecode_ref.drafters.ngram import NGram
from specdecode_ref.models.table import TableModel
from specdecode_ref.sampling import SamplingRule

GREEDY = SamplingRule(temperature=0)


def tied(vocab: int = 7, seed: int = 0) -> TableModel:
    """Logits of 0 and 1 only: nearly every step is a tie of several maxima, exact in floating point."""
    table = torch.randint(2, (vocab + 1, vocab + 1, vocab), generator=torch.Generator().manual_seed(seed))
    return TableModel(table.double())


def first_maxima(model: TableModel, prompt: tuple[int, ...], length: int) -> tuple[int, ...]:
    """Greedy decoding as it is defined."""
    tokens = list(prompt)
    for _ in range(length):
        logits = model.logits_after(tokens).tolist()
        tokens.append(logits.index(max(logits)))
    return tuple(tokens[len(prompt) :])


@pytest.mark.parametrize("verifier", ["auto", "tree", "match"])
@pytest.mark.parametrize("seed", range(4))
def test_of_equal_maxima_the_first_wins(verifier: str, seed: int) -> None:
    model = tied(seed=seed)
    wanted = first_maxima(model, (1, 2, 1), 24)
    assert autoregressive(model, (1, 2, 1), rule=GREEDY, max_new_tokens=24).tokens == wanted
    tree = ModelDrafter(tied(seed=seed), (2, 2))
    for drafter in (NGram(4, 3, 1), ModelDrafter(tied(seed=seed), (1, 1, 1)), tree, First([NGram(4, 3, 2), tree])):
        out = speculative(model, drafter, (1, 2, 1), rule=GREEDY, verifier=verifier, max_new_tokens=24)
        assert out.tokens == wanted


def test_the_same_tied_model_as_draft_is_always_right() -> None:
    """Ties are broken alike on both sides, so nothing is ever rejected."""
    out = speculative(tied(), ModelDrafter(tied(), (1, 1, 1)), (1, 2, 1), rule=GREEDY, max_new_tokens=24)
    assert [r.kept for r in out.trace.rounds] == [4] * 6


PROMPTS = 20


@lru_cache(1)
def models(dtype: str, folder: Path) -> tuple[Any, Any, Any]:
    """The embedded default as this package runs it and as `transformers` does, from the same files; its tokenizer."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from specdecode_ref.models import zoo

    logging.disable_progress_bar()
    loaded = zoo.load(str(folder), dtype, "cpu")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=zoo.DTYPES[dtype])
    return loaded.model, theirs, loaded.tokenizer


@pytest.fixture(scope="session")
def folder(embedded: Path) -> Path:
    """The embedded default, converted."""
    from specdecode_ref.models.gguf import convert
    from specdecode_ref.models.store import converted

    return converted(embedded, embedded.stem, convert)[0]


def prompt(shared_data: Path, number: int) -> str:
    """Every 16th of the prompts: all of their categories."""
    files = [shared_data / name for name in ("spec_bench_dev.jsonl", "humaneval_dev.jsonl")]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    text: str = json.loads(lines[16 * number])["turns"][0]
    return text


def compare(folder: Path, dtype: str, text: str, length: int) -> None:
    """Greedy tokens of `transformers`, and of ours with two drafters."""
    ours, theirs, tokenizer = models(dtype, folder)
    ids = tokenizer.chat(text)
    eos = tokenizer.eos_ids
    rows = torch.tensor([ids])
    whole = theirs.generate(
        rows,
        attention_mask=torch.ones_like(rows),
        max_new_tokens=length,
        do_sample=False,
        eos_token_id=list(eos),
        pad_token_id=eos[0],
    )
    wanted = tuple(whole[0, len(ids) :].tolist())
    for name in ("ngram", "early-exit"):
        rule = SamplingRule(temperature=0, eos=eos)
        drafter = build(name, ours)
        assert drafter is not None
        found = speculative(ours, drafter, ids, rule=rule, max_new_tokens=length, level=1).tokens
        assert found == wanted, name


@pytest.mark.parametrize(("dtype", "number", "length"), [("float32", 4, 16), ("float64", 17, 8)])
def test_some_tokens_are_those_of_transformers(
    folder: Path, shared_data: Path, dtype: str, number: int, length: int
) -> None:
    compare(folder, dtype, prompt(shared_data, number), length)


@pytest.mark.long
@pytest.mark.parametrize("number", range(PROMPTS))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_tokens_are_those_of_transformers(folder: Path, shared_data: Path, dtype: str, number: int) -> None:
    compare(folder, dtype, prompt(shared_data, number), 64)
