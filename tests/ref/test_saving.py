"""Saved heads and draft models are read back as they were; a folder that does not fit is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specdecode_ref.drafters import layouts
from specdecode_ref.drafters.eagle import EagleHead
from specdecode_ref.drafters.growth import Words
from specdecode_ref.drafters.layouts import DraftModel, saving
from specdecode_ref.drafters.medusa import MedusaHeads
from specdecode_ref.errors import ModelError
from specdecode_ref.models.table import TableModel
from tests.ref.test_layouts_draft import plain
from tests.ref.test_layouts_eagle import (
    CLOSE,
    HEADS,
    IDS,
    SIZES,
    TOKENS,
    H,
    Tensors,
    V,
    check,
    d2t,
    eagle3,
    eagle3_tensors,
    llama,
    rms,
    some,
    speculators,
    streams,
    target,
    write,
)
from tests.ref.test_layouts_medusa import medusa

WORDS = Words(torch.tensor(IDS), V)


class TestSaving:
    """What `save_*` writes is read back as it was, and is what vLLM looks for."""

    @pytest.mark.parametrize("normed", [True, False])
    @pytest.mark.parametrize("words", [WORDS, None])
    def test_eagle(self, tmp_path: Path, normed: bool, words: Words | None) -> None:
        t = eagle3_tensors("layers.0.", layers=2)
        del t["lm_head.weight"]
        sizes = SIZES | {"num_hidden_layers": 2}
        note = {"licence": "Apache-2.0"}
        folder = tmp_path / "new" / "head"
        saving.save_eagle(folder, t, target()[0], sizes, [1, 4, 6], normed=normed, words=words, note=note)
        config = json.loads((folder / "config.json").read_text())
        assert config["speculators_model_type"] == "eagle3" and config["fc_norm"] is normed
        assert config["transformer_layer_config"]["num_attention_heads"] == HEADS
        assert config["specdecode_ref"]["licence"] == "Apache-2.0"
        assert config["specdecode_ref"]["shares"] == ["embed_tokens", "lm_head"]
        files = load_file(folder / "model.safetensors")
        assert {weight.dtype for name, weight in files.items() if name not in ("d2t", "t2d")} == {torch.float16}
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
        head = layouts.load(folder, target()[0])
        assert isinstance(head, EagleHead) and head.fusion.layers == (1, 4, 6) and head.name == "head"
        features = streams(target()[0], TOKENS[:-1], (1, 4, 6))
        ones = torch.ones(H, dtype=torch.float64)
        fused = torch.cat([rms(f, ones) if normed else f for f in features], -1) @ t["fc.weight"].T
        table = target()[1]["model.embed_tokens.weight"]
        rows = table[IDS] if words else table
        check(head, eagle3(t, table, layers=2), fused, lambda x: rms(x, t["norm.weight"]) @ rows.T)

    @pytest.mark.parametrize("words", [WORDS, None])
    def test_medusa(self, tmp_path: Path, words: Words | None) -> None:
        t = {f"blocks.{i}.layers.0.weight": some(H, H) for i in range(4)}
        t |= {f"blocks.{i}.layers.0.bias": some(H) for i in range(4)}
        saving.save_medusa(tmp_path, t, target(False)[0], words=words)
        config = json.loads((tmp_path / "config.json").read_text())
        wanted = {"num_heads": 4, "num_hidden_layers": 1, "medusa_fc_bias": True, "original_lm_head": True}
        assert wanted.items() <= config.items()
        heads, feature = layouts.load(tmp_path, target(False)[0]), some(H)
        lm_head = target(False)[1]["lm_head.weight"][IDS if words else slice(None)]
        expected = medusa(t, "blocks.{}.layers.{}", 4, 1, [lm_head], feature)
        assert isinstance(heads, MedusaHeads)
        torch.testing.assert_close(heads.logits(feature), expected, **CLOSE)

    @pytest.mark.parametrize("shared", [True, False])
    @pytest.mark.parametrize("words", [WORDS, None])
    def test_draft(self, tmp_path: Path, words: Words | None, shared: bool) -> None:
        t, table = llama(2, True), target()[1]["model.embed_tokens.weight"]
        sizes = SIZES | {"num_hidden_layers": 2, "tie_word_embeddings": True}
        if shared:
            del t["model.embed_tokens.weight"]
        saving.save_draft(tmp_path, t, target()[0], sizes, words=words)
        draft = layouts.load(tmp_path, target()[0])
        assert isinstance(draft, DraftModel)
        model = draft.model
        got = model.forward(torch.tensor([TOKENS]), [range(-1, len(TOKENS) - 1)], model.new_cache(1, 9)).logits[0]
        table = table if shared else t["model.embed_tokens.weight"]
        torch.testing.assert_close(got, plain(t, table, table[IDS] if words else table, TOKENS, 2), **CLOSE)

    def test_a_full_disk_leaves_what_was_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        t = {"blocks.0.layers.0.weight": some(H, H)}
        saving.save_medusa(tmp_path / "head", t, target()[0])
        before = {path.name: path.read_bytes() for path in (tmp_path / "head").iterdir()}
        write_bytes = Path.write_bytes

        def full(path: Path, data: bytes) -> int:
            write_bytes(path, data[:10])
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "write_bytes", full)
        for folder in ("head", "other"):
            with pytest.raises(ModelError, match="No space left on device; make room"):
                saving.save_medusa(tmp_path / folder, t | {"blocks.1.layers.0.weight": some(H, H)}, target()[0])
        assert {path.name: path.read_bytes() for path in (tmp_path / "head").iterdir()} == before
        assert not (tmp_path / "other").exists()

    def test_a_place_that_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with pytest.raises(ModelError, match="a folder that can be written"):
            saving.save_medusa(tmp_path / "file", {"blocks.0.layers.0.weight": some(H, H)}, target()[0])


def instead(old: dict[str, Any], new: Mapping[str, Any]) -> None:
    """All of `new` and nothing else."""
    old.clear()
    old.update(new)


def nothing_known(config: dict[str, Any], tensors: Tensors) -> None:
    """Neither file says what this is."""
    instead(config, {})
    instead(tensors, {"x": some(2)})


Change = Callable[[dict[str, Any], Tensors], Any]
"""What is wrong with a checkpoint: changes its configuration and its tensors in place."""

WRONG: dict[str, tuple[Change, str]] = {
    "another width": (lambda c, t: c["transformer_layer_config"].update(hidden_size=48), "a head for 'host'"),
    "another target's width": (lambda c, t: c.update(target_hidden_size=48), "a head for 'host' .24 wide"),
    "another vocabulary": (lambda c, t: c["transformer_layer_config"].update(vocab_size=V + 1), "a vocabulary of 53"),
    "a deeper target": (lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 8]), "layers up to 7"),
    "a layer below none": (lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[-1, 2, 3]), "layers up to 7"),
    "layers that are none": (lambda c, t: c.update(eagle_aux_hidden_state_layer_ids="all"), "a list of layers"),
    "more features than fc reads": (
        lambda c, t: c.update(eagle_aux_hidden_state_layer_ids=[1, 2, 3, 4]),
        "fc.weight of shape .24, 96.",
    ),
    "a saved head of another target": (
        lambda c, t: c.update(specdecode_ref={"target": {"num_hidden_layers": 30}}),
        "num_hidden_layers 7.*got num_hidden_layers 30",
    ),
    "a missing tensor": (lambda c, t: t.pop("fc.weight"), "a weight named fc.weight"),
    "a missing LM head": (lambda c, t: t.pop("lm_head.weight"), "a weight named lm_head.weight"),
    "a wrong shape": (lambda c, t: t.update({"norm.weight": some(H + 1)}), "norm.weight of shape .24."),
    "a norm that is not applied": (
        lambda c, t: t.update({"input_norm.weight": some(3 * H)}),
        "accounts for.*input_norm",
    ),
    "a norm that is not there": (lambda c, t: c.update(fc_norm=True), "a weight named fc_norm.0.weight"),
    "words out of order": (lambda c, t: t.update(d2t(IDS[::-1])), "ascending token ids"),
    "words out of range": (lambda c, t: t.update(d2t=t["d2t"] + 1), "token ids below 53"),
    "words below none": (lambda c, t: t.update(d2t=t["d2t"] - 1), "token ids below 53"),
    "words that are no numbers": (lambda c, t: t.update(d2t=t["d2t"].double()), "whole numbers in d2t"),
    "no words": (lambda c, t: t.pop("d2t"), "a weight named d2t"),
    "more words than it says": (lambda c, t: c.update(draft_vocab_size=12), "d2t of shape .12."),
    "tensors of a Medusa head": (
        lambda c, t: instead(t, {"blocks.0.layers.0.weight": some(H, H)}),
        "tensors of EAGLE-3, as config.json of .* says; got tensors of Medusa",
    ),
    "a configuration of Medusa": (
        lambda c, t: c.update(speculators_model_type="medusa"),
        "tensors of Medusa, as config.json of .* says; got tensors of EAGLE-3",
    ),
    "an unknown kind": (lambda c, t: c.update(speculators_model_type="mlp"), "eagle, eagle3 or medusa"),
    "tensors of nothing known": (nothing_known, "a draft head or a draft model"),
    "sizes that are none": (lambda c, t: c.update(transformer_layer_config=[1]), "sizes of layers"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_checkpoint_that_does_not_fit_is_refused_in_one_line(tmp_path: Path, wrong: str) -> None:
    change, why = WRONG[wrong]
    config, tensors = json.loads(json.dumps(speculators())), eagle3_tensors("layers.0.") | d2t()
    layouts.load(write(tmp_path, config, tensors), target()[0])
    change(config, tensors)
    with pytest.raises(ModelError, match=why) as caught:
        layouts.load(write(tmp_path, config, tensors), target()[0])
    assert "\n" not in str(caught.value) and str(caught.value).startswith("expected")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda c, t: c.update(num_heads=3), "a weight named blocks.2.layers.0.weight"),
        (lambda c, t: c.update(num_heads=0), "numbers of heads and layers"),
        (lambda c, t: c.update(hidden_size=48), "24 wide"),
        (lambda c, t: c.update(vocab_size=99), "a vocabulary of 53 tokens"),
        (lambda c, t: c.update(truncated_vocab_size=V), "an LM head over the words"),
        (lambda c, t: t.update(token_map=torch.tensor([1, 1, 2, 3, 4])), "each once"),
        (lambda c, t: t.update(token_map=torch.tensor([1, 53, 2, 3, 4])), "token ids below 53"),
        (lambda c, t: t.pop("token_map"), "a weight named token_map"),
        (lambda c, t: t.pop("lm_heads.1.weight"), "a weight named lm_heads.1.weight"),
        (lambda c, t: t.update({"lm_heads.1.weight": some(6, H)}), "an LM head over the words"),
        (lambda c, t: t.update({"lm_heads.1.weight": torch.tensor(1.0)}), "one row or more"),
    ],
)
def test_medusa_heads_that_do_not_fit_are_refused(tmp_path: Path, change: Change, why: str) -> None:
    config: dict[str, Any] = {"model_type": "medusa", "hidden_size": H, "vocab_size": V, "num_heads": 2}
    config |= {"num_hidden_layers": 1, "truncated_vocab_size": 5}
    tensors = {f"blocks.{i}.layers.0.weight": some(H, H) for i in range(2)}
    tensors |= {f"lm_heads.{i}.weight": some(5, H) for i in range(2)} | {"token_map": torch.tensor([9, 1, 2, 3, 4])}
    layouts.load(write(tmp_path, config, tensors), target()[0])
    change(config, tensors)
    with pytest.raises(ModelError, match=why):
        layouts.load(write(tmp_path, config, tensors), target()[0])


def test_a_draft_model_lacks_no_tensor_that_it_did_not_share(tmp_path: Path) -> None:
    config, tensors = SIZES | {"tie_word_embeddings": False}, llama(1, True)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        with pytest.raises(ModelError, match=f"a weight named {name}"):
            layouts.load(write(tmp_path, config, tensors), target()[0])
        tensors = llama(1, False)
        del tensors["model.embed_tokens.weight"]


def test_norms_of_a_later_eagle1_are_refused(tmp_path: Path) -> None:
    config = {"speculators_model_type": "eagle", "transformer_layer_config": SIZES, "layernorms": True}
    t = {"fusion_fc.weight": some(H, 2 * H)}
    with pytest.raises(ModelError, match="without extra norms"):
        layouts.load(write(tmp_path, config, t), target()[0])


@pytest.mark.parametrize("suffix", ["pt", "bin"])
def test_a_pickle_is_not_opened(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"medusa_num_heads": 2}))
    (tmp_path / f"medusa_lm_head.{suffix}").write_bytes(b"not even a pickle")
    with pytest.raises(ModelError, match=r"a pickle, which could run code; convert it .*save_file.*weights_only=True"):
        layouts.load(tmp_path, target()[0])


def test_damaged_and_missing_files(tmp_path: Path) -> None:
    folder = write(tmp_path / "head", speculators(), eagle3_tensors("layers.0.") | d2t())
    whole = (folder / "model.safetensors").read_bytes()
    for data in (whole[:-100], whole[:20], b""):
        (folder / "model.safetensors").write_bytes(data)
        with pytest.raises(ModelError, match="a damaged file"):
            layouts.load(folder, target()[0])
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="JSON in"):
        layouts.load(folder, target()[0])
    with pytest.raises(ModelError, match="a folder with config"):
        layouts.load(tmp_path / "nowhere", target()[0])


def test_a_target_without_layers_lends_nothing(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="a target with layers"):
        layouts.load(write(tmp_path, speculators(), d2t()), TableModel.random(V))
