"""`specdecode train` from nothing to a head that `specdecode generate` uses; and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from specdecode_ref.models import zoo
from specdecode_ref.train import prompts, run, text
from tests.ref.test_bad_input import refused

CommandLine = Callable[..., tuple[int, str, str]]

SMALL = ("--words", "60", "--depths", "2", "--intermediate", "24", "--epochs", "1", "--rate", "0.01")
DRAFTERS = {"eagle": "eagle", "medusa": "medusa", "draft": "model"}


@pytest.fixture(autouse=True)
def portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards of 480 tokens with short questions, and nothing to read for their prompts."""
    monkeypatch.setattr(text, "Plan", partial(text.Plan, rows=6, steps=80))
    monkeypatch.setattr(text, "LONGEST_QUESTION", 8)
    monkeypatch.setattr(prompts, "installed", lambda: ([], ["A passage to summarise."]))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads by kind, and the text that they share."""
    return tmp_path_factory.mktemp("heads")


@pytest.fixture
def trained(specdecode: CommandLine, tiny: str, home: Path) -> Callable[[str], Path]:
    """The folder of a head of that kind, trained when it is first asked for."""

    def head(kind: str) -> Path:
        if not (home / kind / "config.json").exists():
            options = ("--model", tiny, "--out", str(home / kind), "--text", str(home / "text"), "--tokens", "500")
            code, out, err = specdecode("train", kind, *options, *SMALL)
            assert (code, err) == (0, "")
            assert f"--drafter {DRAFTERS[kind]} --head {home / kind}" in out
        return home / kind

    return head


@pytest.mark.parametrize("kind", run.KINDS)
def test_a_head_is_trained_reported_and_used(
    specdecode: CommandLine, tiny: str, trained: Callable[[str], Path], home: Path, kind: str
) -> None:
    folder = trained(kind)
    files = {"config.json", "model.safetensors", "README.md", "training.json", "loss.svg", "run"}
    assert {path.name for path in folder.iterdir()} == files
    assert {path.name for path in (folder / "run").iterdir()} == {"checkpoint.safetensors"}
    assert {path.name[:6] for path in (home / "text").iterdir()} == {"text.j", "text-0"}
    assert len(list((home / "text").glob("text-*"))) == 3  # 500 tokens are two shards of 480, and one is held out

    about = json.loads((folder / "training.json").read_text())
    assert about["kind"] == kind and about["target"]["name"] == "tiny"
    assert about["options"]["words"] == 60 and about["options"]["tokens"] == 500
    assert len(about["acceptance"]) == (1 if kind == "draft" else 2)
    assert all(0 <= share <= 1 for ranks in about["acceptance"] for share in ranks)
    assert about["text"]["tokens"] > about["text"]["held_out"] > 100
    assert about["history"]["losses"] and about["history"]["acceptance"] and about["parameters"] > 1000
    card = (folder / "README.md").read_text()
    assert card.startswith(f"# {kind} head for tiny\n") and "{" not in card
    assert f"specdecode train {kind} --model tiny --tokens 500 --epochs 1 --words 60 --depths 2" in card
    assert "| depth | best | two | four | eight |" in card and card.count("%") == 4 * len(about["acceptance"])
    assert "Training loss over" in (folder / "loss.svg").read_text()

    common = ("generate", "abcabcabc", "--model", tiny, "--max-new-tokens", "24", "--dtype", "float64", "--json")
    plain = json.loads(specdecode(*common, "--drafter", "none")[1])
    tree = ("--tree", "dynamic:2,2,3") if kind == "eagle" else ()  # hardly trained, it is too unsure for its own tree
    code, out, err = specdecode(*common, "--drafter", DRAFTERS[kind], "--head", str(folder), *tree)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["text"] == plain["text"] and found["metrics"]["drafted"] > 10
    assert found["config"]["drafting"]["head" if kind != "draft" else "draft_model"] == kind


def test_a_hybrid_uses_the_eagle_head(specdecode: CommandLine, tiny: str, trained: Callable[[str], Path]) -> None:
    folder = str(trained("eagle"))
    common = ("generate", "abcabcabc", "--model", tiny, "--max-new-tokens", "40", "--dtype", "float64", "--json")
    plain = json.loads(specdecode(*common, "--drafter", "none")[1])
    for drafter in ("hybrid", "auto", "ngram+eagle"):
        found = json.loads(specdecode(*common, "--drafter", drafter, "--head", folder)[1])
        assert found["text"] == plain["text"]
        assert found["config"]["drafter"] == ("hybrid" if drafter == "auto" else drafter)
    sampled = ("--temperature", "0.8", "--seed", "3")
    for drafter, verifier in (("hybrid", "auto"), ("eagle", "block"), ("auto", "chain")):
        code, out, err = specdecode(*common, *sampled, "--drafter", drafter, "--head", folder, "--verifier", verifier)
        assert (code, err) == (0, "") and len(json.loads(out)["tokens"]) == 40


def test_the_same_command_again_changes_nothing(
    specdecode: CommandLine, tiny: str, trained: Callable[[str], Path], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = trained("medusa")
    kept = ("model.safetensors", "config.json", "loss.svg", "run/checkpoint.safetensors")
    before = [(folder / name).read_bytes() for name in kept]
    monkeypatch.setattr(text, "write", lambda *_: pytest.fail("text was written again"))
    options = ("--model", tiny, "--out", str(folder), "--text", str(home / "text"), "--tokens", "500")
    assert specdecode("train", "medusa", *options, *SMALL)[0] == 0
    assert [(folder / name).read_bytes() for name in kept] == before


def test_an_interrupted_run_goes_on(
    specdecode: CommandLine, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a Ctrl-C while text is written, the shard that is whole is kept and the rest is written."""
    options = ("--model", tiny, "--out", str(tmp_path / "head"), "--tokens", "500", *SMALL)
    whole = text.write_shard

    def interrupted(*arguments: object) -> object:
        if arguments[3] == 1:
            raise KeyboardInterrupt
        return whole(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(text, "write_shard", interrupted)
        code, out, err = specdecode("train", "draft", *options)
    assert (code, out) == (130, "")
    assert err == "specdecode: note: interrupted; the same command goes on from the last shard or checkpoint\n"
    first = tmp_path / "head" / "text" / "text-0000.safetensors"
    assert {path.name for path in first.parent.iterdir()} == {"text.json", first.name}
    written = first.stat().st_mtime_ns
    assert specdecode("train", "draft", *options)[0] == 0
    assert first.stat().st_mtime_ns == written
    again = specdecode("train", "draft", *options, "--rate", "0.02")
    refused(again, "a checkpoint of this very run")


REFUSED = [
    pytest.param(["magic"], "one of draft, medusa, eagle to train; got 'magic'", id="kind"),
    pytest.param(["eagle", "--tokens", "0"], "tokens of 1 or more; got 0", id="tokens"),
    pytest.param(["eagle", "--epochs", "-1"], "epochs of 1 or more; got -1", id="epochs"),
    pytest.param(["eagle", "--words", "7"], "words of 8 or more; got 7", id="words"),
    pytest.param(["eagle", "--depths", "0"], "depths of 1 or more; got 0", id="depths"),
    pytest.param(["eagle", "--depths", "17"], "depths of at most 16; got 17", id="deep"),
    pytest.param(["eagle", "--layers", "0"], "layers of 1 or more; got 0", id="layers"),
    pytest.param(["eagle", "--intermediate", "0"], "intermediate of 1 or more; got 0", id="intermediate"),
    pytest.param(["eagle", "--rate", "nan"], "a learning rate between 0 and 1; got nan", id="rate"),
    pytest.param(["eagle", "--rate", "2"], "a learning rate between 0 and 1; got 2.0", id="high-rate"),
    pytest.param(["eagle", "--seed", "-1"], "a seed from 0 to 2^32 - 1; got -1", id="seed"),
    pytest.param(["eagle", "--tokens", "many"], "got 'many'; see `specdecode train --help`", id="no-number"),
    pytest.param(["eagle", "--dtype", "float8"], "dtype", id="dtype"),
    pytest.param(["eagle", "--model", "smolm2"], "a model", id="model"),
    pytest.param([], "Missing argument 'KIND'", id="no-kind"),
]


@pytest.fixture
def no_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    """All this must be refused before a model is loaded."""
    monkeypatch.setattr(zoo, "_load_gguf", lambda *_: pytest.fail("a model was loaded"))


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize(("arguments", "expected"), REFUSED)
def test_train_refuses(specdecode: CommandLine, tmp_path: Path, arguments: list[str], expected: str) -> None:
    refused(specdecode("train", *arguments, "--out", str(tmp_path / "new" / "head")), expected)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("no_loading")
@pytest.mark.parametrize("option", ["--out", "--text"])
@pytest.mark.parametrize(
    ("place", "reason"),
    [
        ("file", "Not a directory"),
        ("/proc/new", "No such file"),
        ("", "no name"),
        ("/proc/" + 90 * "a/", "No such file"),
    ],
)
def test_a_folder_that_cannot_be_written(
    specdecode: CommandLine, tmp_path: Path, option: str, place: str, reason: str
) -> None:
    (tmp_path / "file").write_text("")
    path = str(tmp_path / "file" / "below") if place == "file" else place
    others = [] if option == "--out" else ["--out", str(tmp_path / "out")]
    result = specdecode("train", "eagle", option, path, *others)
    refused(result, f"a writable folder for {option}; got '")
    assert f"{path[-100:]}' ({reason}" in result[2]
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_full_disk_is_one_line(
    specdecode: CommandLine, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    arguments = ("train", "draft", "--model", tiny, "--out", str(tmp_path / "head"), *SMALL)
    refused(specdecode(*arguments), "No space left on device; make room")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_text_of_another_model_is_refused(
    specdecode: CommandLine, tiny: str, trained: Callable[[str], Path], home: Path, tmp_path: Path
) -> None:
    trained("medusa")
    other = tmp_path / "other"
    shutil.copytree(tiny, other)
    options = ("--out", str(tmp_path / "head"), "--text", str(home / "text"), "--tokens", "500", *SMALL)
    refused(specdecode("train", "medusa", "--model", str(other), *options), "text by other in")
    refused(specdecode("train", "medusa", "--model", tiny, *options, "--seed", "1"), "that of another model or plan")


def test_a_target_without_a_chat_template(specdecode: CommandLine, tiny: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny, base)
    (base / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    arguments = ("train", "eagle", "--model", str(base), "--out", str(tmp_path / "head"), *SMALL)
    refused(specdecode(*arguments), "a target with a chat template")
    assert not (tmp_path / "head").exists()


class TestHeadsThatCannotBeUsed:
    """What is given to `--head`."""

    def test_none_where_there_is_none(self, specdecode: CommandLine, tiny: str, tmp_path: Path) -> None:
        refused(specdecode("generate", "x", "--model", tiny, "--drafter", "eagle"), "an EAGLE head for 'tiny'")
        nowhere = str(tmp_path / "nowhere")
        refused(specdecode("generate", "x", "--model", tiny, "--head", nowhere), "a folder with config.json")

    def test_of_another_kind(self, specdecode: CommandLine, tiny: str, trained: Callable[[str], Path]) -> None:
        arguments = ("generate", "x", "--model", tiny, "--drafter")
        medusa, eagle = str(trained("medusa")), str(trained("eagle"))
        refused(specdecode(*arguments, "hybrid", "--head", medusa), f"an EAGLE head in {medusa}; got Medusa heads")
        refused(specdecode(*arguments, "medusa", "--head", eagle), f"Medusa heads in {eagle}; got an EAGLE head")
        refused(specdecode(*arguments, "model", "--head", eagle), f"a draft model in {eagle}; got an EAGLE head")

    def test_of_another_target(
        self, specdecode: CommandLine, other_vocabulary: str, trained: Callable[[str], Path]
    ) -> None:
        for kind, drafter in DRAFTERS.items():
            arguments = ("--model", other_vocabulary, "--drafter", drafter, "--head", str(trained(kind)))
            refused(specdecode("generate", "x", *arguments), "a head for 'other'")

    def test_cut_or_pickled(
        self, specdecode: CommandLine, tiny: str, trained: Callable[[str], Path], tmp_path: Path
    ) -> None:
        for kind, drafter in DRAFTERS.items():
            folder = tmp_path / kind
            shutil.copytree(trained(kind), folder)
            weights = folder / "model.safetensors"
            weights.write_bytes(weights.read_bytes()[:-7])
            arguments = ("generate", "x", "--model", tiny, "--drafter", drafter, "--head", str(folder))
            refused(specdecode(*arguments), "a damaged file")
            weights.rename(folder / "pytorch_model.bin")
            refused(specdecode(*arguments), "a pickle, which could run code; convert it")

    def test_one_that_is_not_used_is_mentioned(self, specdecode: CommandLine, tiny: str, tmp_path: Path) -> None:
        options = ("--drafter", "ngram", "--head", str(tmp_path), "--max-new-tokens", "2")
        code, _, err = specdecode("generate", "x", "--model", tiny, *options)
        assert (code, err.count("\n")) == (0, 1) and "--head is not used by the drafter 'ngram'" in err
