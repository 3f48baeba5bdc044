"""The text that a target writes for its own draft: what it is asked, what is kept of it, and how it is read back."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdecode_ref.errors import InputError, ModelError
from specdecode_ref.models import zoo
from specdecode_ref.models.zoo import Loaded
from specdecode_ref.train import prompts, run, text
from specdecode_ref.train.corpus import SHORTEST, Corpus, Place
from specdecode_ref.train.labels import RANKS, Labels, Tally, loss
from specdecode_ref.train.prompts import Asker
from specdecode_ref.train.text import ANSWERED, ASKED, FORCED, TOP, Plan, write, write_shard

FUNCTIONS = ['def add(a, b):\n    """Adds {a} and {b}.\n    """', "def noise():"]
PASSAGES = ["The {old} ferry stopped in spring, and nobody missed it. A new bridge carries the cars over the bay now."]
PLAN = Plan(rows=5, steps=90, longest=56, seed=3, features=(1, 3))
KEPT = {"tokens", "authors", "starts", "top_ids", "top_logits", "lse", "features"}


@pytest.fixture(scope="module")
def loaded(tiny: str) -> Loaded:
    return zoo.load(tiny, dtype="float32")


def asker(seed: int = 0) -> Asker:
    return Asker(FUNCTIONS, PASSAGES, seed)


def made(loaded: Loaded, number: int = 0) -> dict[str, Tensor]:
    return write_shard(loaded.model, loaded.tokenizer, PLAN, number, asker(number), lambda step: None)


def conversations(shard: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    for start, end in pairwise(shard["starts"].tolist()):
        yield {name: column[start:end] for name, column in shard.items() if name != "starts"}


class TestPrompts:
    """What the target is asked."""

    def test_packages_are_read_and_never_imported(self, tmp_path: Path) -> None:
        prose = " ".join(["Water runs down to the sea and nobody knows why it does."] * 6)
        code = "raise SystemExit('imported')\n"
        (tmp_path / "inner").mkdir()
        (tmp_path / "inner" / "good.py").write_text(
            f'"""{prose}"""\n{code}def area(width: int, height: int = 2) -> int:\n'
            '    """The area of a rectangle of that width and height."""\n'
        )
        (tmp_path / "table.py").write_text(f'"""{"a | 1 | 2 -> " * 40}"""\n')
        (tmp_path / "broken.py").write_text("def (:\n")
        (tmp_path / "latin.py").write_bytes(b'"""\xff\xfe"""\n')
        (tmp_path / "nul.py").write_bytes(b"x = 1\x00\n")
        (tmp_path / "deep.py").write_text("x = " + "(" * 3000 + ")" * 3000)
        (tmp_path / "gone.py").symlink_to(tmp_path / "nowhere.py")
        before = set(sys.modules)
        functions, passages = prompts.installed(folder=tmp_path)
        signature = "def area(width: int, height: int=2):"
        assert functions == [f'{signature}\n    """The area of a rectangle of that width and height.\n    """']
        assert passages == [prose]
        assert not {"good", "table", "broken"} & (set(sys.modules) - before)
        assert prompts.installed(folder=tmp_path / "inner") == (functions, passages)

    def test_the_seed_decides_and_all_kinds_come(self) -> None:
        one, same, other = asker(1), asker(1), asker(2)
        for each in (one, same, other):
            each.german.append("Das ist {ein} Satz.")
        drawn = [one.next() for _ in range(300)]
        assert drawn == [same.next() for _ in range(300)] != [other.next() for _ in range(300)]
        kinds = {request.kind for request in drawn}
        assert kinds == {"own", "code", "summary", "reading", "to-german", "from-german"}
        assert all(request.open == (request.kind == "own") for request in drawn)

    def test_braces_in_sources_are_kept(self) -> None:
        each = asker()
        each.german.append("Das ist {ein} Satz.")
        drawn = [each.next() for _ in range(300)]
        inside = {"code": "{a} and {b}", "summary": "{old}", "reading": "{old}", "from-german": "{ein}"}
        for kind, words in inside.items():
            assert any(words in request.text for request in drawn if request.kind == kind), kind
        assert not any("{}" in request.text for request in drawn)

    def test_without_sources_the_model_asks_itself(self) -> None:
        alone = Asker([], [], 0)
        assert {alone.next().kind for _ in range(100)} == {"own"}


class TestText:
    """What the target wrote and what was kept of it."""

    def test_columns_are_as_said(self, loaded: Loaded) -> None:
        shard, size = made(loaded), PLAN.rows * PLAN.steps
        assert shard.keys() == KEPT
        assert {name: (column.dtype, tuple(column.shape)) for name, column in shard.items() if name != "starts"} == {
            "tokens": (torch.int32, (size,)),
            "authors": (torch.uint8, (size,)),
            "top_ids": (torch.int32, (size, TOP)),
            "top_logits": (torch.float16, (size, TOP)),
            "lse": (torch.float32, (size,)),
            "features": (torch.float16, (size, 2, 32)),
        }
        assert shard["starts"][0] == 0 and shard["starts"][-1] == size and bool((shard["starts"].diff() > 0).all())

    def test_a_shard_depends_on_its_number_alone(self, loaded: Loaded) -> None:
        one, again, other = made(loaded), made(loaded), made(loaded, 1)
        assert all(torch.equal(one[name], again[name]) for name in one)
        assert not torch.equal(one["tokens"], other["tokens"])

    def test_what_is_kept_is_what_a_fresh_prefill_gives(self, loaded: Loaded) -> None:
        """Rows begin new conversations at different times, so every row's cache must have been started anew."""
        found = list(conversations(made(loaded)))
        assert len(found) > PLAN.rows
        for talk in found:
            tokens, size = talk["tokens"][None].long(), len(talk["tokens"])
            cache = loaded.model.new_cache(1, size)
            logits, features = loaded.model.forward(tokens, [range(-1, size - 1)], cache, PLAN.features)
            close: dict[str, Any] = {"rtol": 2e-3, "atol": 2e-3}
            for i, feature in enumerate(features):
                torch.testing.assert_close(talk["features"][:, i].float(), feature[0], **close)
            best = logits[0].gather(1, talk["top_ids"].long())
            torch.testing.assert_close(talk["top_logits"].float(), best, **close)
            torch.testing.assert_close(best, logits[0].topk(TOP).values, **close)
            torch.testing.assert_close(talk["lse"], logits[0].logsumexp(-1), **close)

    @pytest.mark.parametrize("heat", [0.0, 1.0])
    def test_greedy_answers_are_the_best_tokens(
        self, loaded: Loaded, monkeypatch: pytest.MonkeyPatch, heat: float
    ) -> None:
        monkeypatch.setattr(text, "TEMPERATURES", ((heat, 1.0),))
        best = total = 0
        for talk in conversations(made(loaded)):
            answered = (talk["authors"] == ANSWERED).nonzero()[:, 0]
            hits = talk["tokens"][answered] == talk["top_ids"][answered - 1, 0]
            best, total = best + int(hits.sum()), total + len(hits)
        assert total > 50
        assert best == total if heat == 0 else best < 0.95 * total

    def test_who_wrote_what(self, loaded: Loaded) -> None:
        kinds = set()
        for talk in conversations(made(loaded)):
            authors, written = "".join(map(str, talk["authors"].tolist())), talk["tokens"].tolist()
            form = re.fullmatch(r"(0+)(1*)(0*)(2*)", authors)
            assert form, authors
            assert loaded.tokenizer.decode(written[:6]) == "<user>"
            kinds |= set(authors)
            if form[4]:
                assert loaded.tokenizer.decode(written[: -len(form[4])]).endswith("<assistant>")
                assert not form[2] or len(form[3]) == len("<assistant>")
        assert kinds == {str(FORCED), str(ASKED), str(ANSWERED)}

    def test_conversations_end_with_the_answer_or_at_the_longest(self, loaded: Loaded) -> None:
        tokenizer = copy.copy(loaded.tokenizer)
        tokenizer.eos_ids = tuple(range(100, 170))
        found = list(conversations(made(replace(loaded, tokenizer=tokenizer))))
        whole, ended = found[: -PLAN.rows], False
        for talk in found:
            answer = talk["tokens"][talk["authors"] == ANSWERED].tolist()
            assert not set(answer[:-1]) & set(tokenizer.eos_ids)
            assert not set(talk["tokens"][talk["authors"] == ASKED].tolist()) & set(tokenizer.eos_ids)
            assert len(talk["tokens"]) <= PLAN.longest
        for talk in whole:
            last = int(talk["tokens"][-1]) in tokenizer.eos_ids and int(talk["authors"][-1]) == ANSWERED
            ended |= last
            assert last or len(talk["tokens"]) == PLAN.longest
        assert ended > 0

    def test_shards_are_written_whole(self, loaded: Loaded, tmp_path: Path) -> None:
        told: list[tuple[int, int]] = []
        sources, plan = (FUNCTIONS, PASSAGES), Plan(rows=2, steps=30, longest=56)
        folder = tmp_path / "new"
        write(loaded.model, loaded.tokenizer, plan, [0, 7], sources, folder, lambda *at: told.append(at))
        assert [path.name for path in sorted(folder.iterdir())] == ["text-0000.safetensors", "text-0007.safetensors"]
        assert load_file(folder / "text-0007.safetensors").keys() == KEPT - {"features"}
        assert told == [(number, step) for number in (0, 7) for step in range(1, 31)]

    @pytest.mark.parametrize("library", [True, False])
    def test_a_full_disk_leaves_nothing_half_written(
        self, loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: bool
    ) -> None:
        import safetensors

        def full(tensors: dict[str, Tensor], path: Path, **_: object) -> None:
            path.write_bytes(b"half")
            if library:
                raise safetensors.SafetensorError("I/O error: No space left on device (os error 28)")
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("safetensors.torch.save_file", full)
        plan = Plan(rows=2, steps=3, longest=56)
        with pytest.raises(ModelError, match=r"No space left on device.*; make room"):
            write(loaded.model, loaded.tokenizer, plan, [0], (FUNCTIONS, PASSAGES), tmp_path, lambda *_: None)
        assert not list(tmp_path.iterdir())


def stored(path: Path, lengths: list[int], answers: list[int], seed: int = 0) -> dict[str, Tensor]:
    """A shard of random columns: conversations of such lengths, of which so many tokens at the end are answers."""
    torch.manual_seed(seed)
    size = sum(lengths)
    logits = torch.randn(size, TOP).sort(descending=True).values
    columns = {
        "tokens": torch.randint(1, 90, (size,), dtype=torch.int32),
        "authors": torch.cat([torch.tensor([0] * (n - k) + [2] * k) for n, k in zip(lengths, answers, strict=True)]),
        "starts": torch.tensor([0, *lengths]).cumsum(0).int(),
        "top_ids": torch.stack([torch.randperm(90)[:TOP] for _ in range(size)]).int(),
        "top_logits": logits.half(),
        "lse": logits.logsumexp(-1) + 0.5,
        "features": torch.randn(size, 3, 4).half(),
    }
    columns["authors"] = columns["authors"].to(torch.uint8)
    save_file(columns, path)
    return columns


class TestCorpus:
    """The text read back."""

    def test_conversations_worth_a_row(self, tmp_path: Path) -> None:
        path = tmp_path / "text-0000.safetensors"
        stored(path, [30, SHORTEST - 1, 40, SHORTEST], [5, 9, 0, 1])
        corpus = Corpus([path])
        assert corpus.places == [Place(path, 0, 30), Place(path, 30 + SHORTEST - 1 + 40, 93 + SHORTEST)]
        assert corpus.tokens == 30 + SHORTEST
        with pytest.raises(InputError, match="text with answers"):
            stored(path, [40], [0])
            Corpus([path])

    def test_a_batch_is_padded_at_the_end(self, tmp_path: Path) -> None:
        path = tmp_path / "text-0000.safetensors"
        columns = stored(path, [30, 26], [10, 4])
        batch = Corpus([path], (2, 0)).batch([Place(path, 30, 56), Place(path, 0, 30)])
        assert batch.tokens.shape == (2, 30) and batch.features.shape == (2, 30, 2, 4)
        assert batch.tokens[0].tolist() == columns["tokens"][30:].tolist() + [0] * 4
        assert batch.tokens[1].tolist() == columns["tokens"][:30].tolist()
        assert batch.answered[0].nonzero()[:, 0].tolist() == [22, 23, 24, 25]
        assert torch.equal(batch.features[0, :26], columns["features"][30:, [2, 0]].float())
        assert torch.equal(batch.top_ids[1], columns["top_ids"][:30].long())
        logs = columns["top_logits"][:30].float() - columns["lse"][:30, None]
        torch.testing.assert_close(batch.top_logs[1], logs)
        assert Corpus([path]).batch([Place(path, 0, 30)]).features.numel() == 0

    def test_wanted_is_where_the_token_ahead_is_an_answer(self, tmp_path: Path) -> None:
        path = tmp_path / "text-0000.safetensors"
        stored(path, [30, 26], [10, 4])
        batch = Corpus([path]).batch([Place(path, 30, 56), Place(path, 0, 30)])
        for ahead in (1, 2, 5, 99):
            for row, answers in enumerate((range(22, 26), range(20, 30))):
                places = [i for i in range(30) if i + ahead in answers]
                assert batch.wanted(ahead)[row].nonzero()[:, 0].tolist() == places

    def test_an_epoch_is_everything_once_in_an_order_by_seed(self, tmp_path: Path) -> None:
        path = tmp_path / "text-0000.safetensors"
        stored(path, [24 + 7 * i % 60 for i in range(41)], [3] * 41)
        corpus = Corpus([path])
        epoch = corpus.epoch(4, 1)
        assert sorted(p.start for places in epoch for p in places) == [p.start for p in corpus.places]
        assert sorted(map(len, epoch)) == [1] + [4] * 10
        assert epoch == corpus.epoch(4, 1) != corpus.epoch(4, 2)
        padded = sum(len(ps) * max(p.end - p.start for p in ps) for ps in epoch)
        assert padded < 1.4 * corpus.tokens

    def test_words_are_those_that_the_target_wants(self, tmp_path: Path) -> None:
        paths = [tmp_path / f"text-{n:04d}.safetensors" for n in range(2)]
        mass = torch.zeros(90)
        for n, path in enumerate(paths):
            columns = stored(path, [30, 26], [10, 4], n)
            for i in (columns["authors"] == ANSWERED).nonzero()[:, 0].tolist():
                mass[columns["top_ids"][i, 0]] += 1
                for token, logit in zip(columns["top_ids"][i].tolist(), columns["top_logits"][i].float(), strict=True):
                    mass[token] += (logit - columns["lse"][i]).exp()
        words = Corpus(paths).words(12, 90)
        assert words.tolist() == sorted(mass.argsort(descending=True)[:12].tolist())
        with pytest.raises(InputError, match="at most the target's 90"):
            Corpus(paths).words(91, 90)

    @pytest.mark.parametrize("how", ["cut", "empty", "columns", "lengths", "gone", "folder"])
    def test_a_damaged_shard_is_one_line(self, tmp_path: Path, how: str) -> None:
        path = tmp_path / "text-0000.safetensors"
        columns = stored(path, [30], [10])
        damages: dict[str, Callable[[], Any]] = {
            "cut": lambda: path.write_bytes(path.read_bytes()[:-5]),
            "empty": lambda: path.write_bytes(b""),
            "columns": lambda: save_file({"tokens": columns["tokens"], "starts": columns["starts"]}, path),
            "lengths": lambda: save_file(columns | {"lse": columns["lse"][:-1].clone()}, path),
            "gone": path.unlink,
            "folder": lambda: path.rename(tmp_path / "old") and path.mkdir(),  # type: ignore[func-returns-value]
        }
        damages[how]()
        with pytest.raises(
            ModelError, match=r"expected a shard of text in .*; got a damaged file .*; delete it"
        ) as caught:
            Corpus([path])
        assert "\n" not in str(caught.value)

    def test_as_many_shards_as_were_asked_for_and_no_more(self, tmp_path: Path, loaded: Loaded) -> None:
        for number in (2, 0, 1, 3):
            (tmp_path / f"text-{number:04d}.safetensors").touch()
        (tmp_path / ".text-0004.safetensors.17").touch()
        sizes = {"epochs": 1, "words": 20, "depths": 1, "layers": 1, "intermediate": 8, "rate": 0.01, "seed": 0}
        order = run.Order("draft", tmp_path, tmp_path, tokens=Plan.rows * Plan.steps + 1, **sizes)
        shards = run.write_text(order, loaded, (1,), lambda *_: None)
        assert [path.name[5:9] for path in shards] == [
            "0000",
            "0001",
            "0002",
        ]  # one to validate with, two to learn from


class TestLabels:
    """What a guess is compared with."""

    def test_laws_in_a_draft_vocabulary(self, tmp_path: Path) -> None:
        path = tmp_path / "text-0000.safetensors"
        columns = stored(path, [30], [10])
        batch = Corpus([path]).batch([Place(path, 0, 30)])
        words = torch.arange(0, 90, 2)
        ids, mass = Labels(words, 90).at(batch, torch.tensor([0, 0]), torch.tensor([21, 29]))
        for row, column in enumerate((21, 29)):
            law = (columns["top_logits"][column].float() - columns["lse"][column]).exp()
            for rank, token in enumerate(columns["top_ids"][column].tolist()):
                assert ids[row, rank] == (token // 2 if token % 2 == 0 else -1)
                assert mass[row, rank] == (pytest.approx(law[rank].item()) if token % 2 == 0 else 0)

    def test_loss_is_cross_entropy(self) -> None:
        logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(0))
        ids, mass = torch.tensor([[4, -1, 0], [2, 1, -1]]), torch.tensor([[0.5, 0.0, 0.2], [0.7, 0.1, 0.0]])
        log = (logits.exp() / logits.exp().sum(-1, keepdim=True)).log()
        by_hand = [-(0.5 * log[0, 4] + 0.2 * log[0, 0]), -(0.7 * log[1, 2] + 0.1 * log[1, 1])]
        torch.testing.assert_close(loss(logits, ids, mass), torch.stack(by_hand))

    def test_a_tally_counts_ranks_by_depth(self) -> None:
        tally, falling = Tally(), torch.arange(10, 0, -1.0).expand(4, 10)
        tally.add(1, falling, torch.tensor([[0], [0], [0], [2]]))
        tally.add(0, falling[:2], torch.tensor([[1], [-1]]))
        tally.add(0, falling[:2], torch.tensor([[0], [9]]))
        first, second = tally.acceptance()
        assert first == [0.25, 0.25] + [0.0] * (RANKS - 2) and second == [0.75, 0.0, 0.25] + [0.0] * (RANKS - 3)
        assert tally.first == [0.25, 0.75]
        assert tally.chain_tau() == pytest.approx(1 + 0.25 + 0.25 * 0.75)
