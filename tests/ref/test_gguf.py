"""GGUF files, converted once into the cache; what is not converted exactly is refused in one line.

The files here are written by the `gguf` library, a few kilobytes each.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdecode_ref.errors import ModelError
from specdecode_ref.models import store, zoo
from specdecode_ref.models.tokenizer import BYTES
from specdecode_ref.models.transformer import Transformer
from tests.ref.test_zoo import logits, one_line

pytestmark = pytest.mark.usefixtures("cache_folder")

HIDDEN, INNER, VOCAB = 32, 64, 258
END, START = VOCAB - 1, VOCAB - 2
LLAMA = {"model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2}
LLAMA |= {"vocab_size": VOCAB, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
LLAMA |= {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}


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
    def test_a_damaged_cache_is_made_anew(self, tmp_path: Path, cache_folder: Path, name: str, harm: str) -> None:
        write_gguf(tmp_path / "m.gguf")
        before = logits(zoo.load(str(tmp_path / "m.gguf")).model)
        victim = next((cache_folder / "models").iterdir()) / name
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 0xFF
        if harm == "remove":
            victim.unlink()
        else:
            victim.write_bytes(content if harm == "flip" else content[: len(content) // 2])
        assert torch.equal(logits(zoo.load(str(tmp_path / "m.gguf")).model), before)
        assert len(list((cache_folder / "models").iterdir())) == 1

    def test_first_runs_at_once_leave_one_whole_conversion(self, tmp_path: Path, cache_folder: Path) -> None:
        write_gguf(tmp_path / "m.gguf")
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda _: logits(zoo.load(str(tmp_path / "m.gguf")).model), range(4)))
        assert all(torch.equal(answer, answers[0]) for answer in answers)
        (folder,) = (cache_folder / "models").iterdir()
        assert store.is_whole(folder)

    def test_a_conversion_that_fails_leaves_nothing(
        self, tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_gguf(tmp_path / "m.gguf")

        def full_disk(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(store, "_seal", full_disk)
        with pytest.raises(ModelError) as caught:
            zoo.load(str(tmp_path / "m.gguf"))
        one_line(caught.value, str(cache_folder), "No space left on device", "SPECDECODE_CACHE")
        assert list((cache_folder / "models").iterdir()) == []

    @pytest.mark.parametrize("part", [0.0, 0.001, 0.1, 0.5, 0.99])
    def test_a_truncated_file(self, tmp_path: Path, cache_folder: Path, part: float) -> None:
        path = tmp_path / "m.gguf"
        write_gguf(path)
        content = path.read_bytes()
        path.write_bytes(content[: int(len(content) * part)])
        with pytest.raises(ModelError) as caught:
            zoo.load(str(path))
        one_line(caught.value, "a whole GGUF file", "damaged", "fetch it again")
        assert list((cache_folder / "models").iterdir()) == []

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
