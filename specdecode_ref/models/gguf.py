"""From a GGUF file to the usual folder: `config.json`, `model.safetensors`, `tokenizer.json`, `tokenizer_config.json`.

A GGUF keeps a model in llama.cpp's names and number formats. Here each quantised weight becomes one number that
bfloat16, float16 and float32 all hold exactly, so the model is the same model in every dtype.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdecode_ref.errors import ModelError

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer as Bpe

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""GGUF's `general.architecture` -> Hugging Face's `model_type`, for the ones that are converted."""

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""llama.cpp's name of a tensor -> Hugging Face's."""

SPLITS = {
    "smollm": None,  # single digits, then GPT-2's words
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""GGUF's `tokenizer.ggml.pre` -> how text is cut before byte-pair encoding."""

CONTROL = 3
"""The token type of a special token, which text is cut at and which carries no text of its own."""


def convert(path: Path, folder: Path) -> None:
    """Write the model of the GGUF at `path` into `folder`, which exists.

    Raises ModelError for a damaged file and for an architecture or a tokenizer that is not converted exactly.
    """
    from safetensors.torch import save_file

    reader = _open(path)
    try:
        config = _config(reader)
        tokenizer, settings = _tokenizer(reader)
        weights = dict(_weights(reader, config))
    except (
        TypeError,
        ValueError,
        KeyError,
        IndexError,
        AttributeError,
    ) as error:  # an entry missing, or of another kind
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))


def _open(path: Path) -> GGUFReader:
    """The file's directory. It maps every tensor, and so fails on a file that is cut short."""
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError, struct.error) as error:
        raise _damaged(path, "cut short, or not a GGUF at all") from error


def _damaged(path: Path, why: str) -> ModelError:
    return ModelError(f"a whole GGUF file at {path}", f"a damaged one ({why.splitlines()[0]})", "fetch it again")


def _field(reader: GGUFReader, name: str, default: Any = None) -> Any:
    field = reader.fields.get(name)
    return default if field is None else field.contents()


def _config(reader: GGUFReader) -> dict[str, Any]:
    """What `config.json` would say."""
    arch = _field(reader, "general.architecture")
    if arch not in ARCHITECTURES:
        raise ModelError(f"a GGUF of {', '.join(ARCHITECTURES)}", repr(arch), "use the model's safetensors instead")

    def get(name: str, default: Any = None) -> Any:
        return _field(reader, f"{arch}.{name}", default)

    names = {tensor.name for tensor in reader.tensors}
    for present, what in (
        ("rope_freqs.weight" in names, "rescaled rotary frequencies"),
        (get("rope.scaling.type", "none") not in ("none", "linear"), "a scaled rotary embedding"),
        (get("expert_count", 0) > 0, "a mixture of experts"),
    ):
        if present:
            raise ModelError("a dense GGUF with plain rotary embedding", what, "use the model's safetensors instead")
    hidden, heads = get("embedding_length"), get("attention.head_count")
    config: dict[str, Any] = {
        "model_type": ARCHITECTURES[arch],
        "vocab_size": len(_field(reader, "tokenizer.ggml.tokens")),
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": get("attention.key_length", hidden // heads),
        "hidden_act": "silu",
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": round(get("attention.layer_norm_rms_epsilon"), 12),  # written as float32
        "rope_theta": get("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in names,
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "torch_dtype": "bfloat16",
    }
    config["architectures"] = [
        {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[arch]
    ]
    if get("rope.scaling.type", "none") == "linear":
        config["rope_scaling"] = {"rope_type": "linear", "factor": get("rope.scaling.factor")}
    return config


def _weights(reader: GGUFReader, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    from gguf import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in reader.tensors:
        *block, short, kind = tensor.name.split(".")
        if short not in NAMES:
            raise ModelError("tensors of a dense transformer", tensor.name, "use the model's safetensors instead")
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if config["model_type"] == "llama" and short in heads:
            weight = _unpermute(weight, heads[short])
        layer = f"model.layers.{block[1]}." if block else ""
        yield f"{layer}{NAMES[short]}.{kind}", _exact_everywhere(weight)


def _unpermute(weight: Tensor, heads: int) -> Tensor:
    """llama.cpp turns neighbouring channels (2d, 2d + 1), Hugging Face d and d + D/2: rows go back to that order."""
    rows, *rest = weight.shape
    return weight.view(heads, rows // heads // 2, 2, *rest).transpose(1, 2).reshape(rows, *rest)


def _exact_everywhere(weight: Tensor) -> Tensor:
    """The nearest bfloat16 numbers that float16 holds too; float32 stays where a vector (a norm) needs it."""
    narrow = weight.bfloat16()
    if weight.dim() == 1 and not torch.equal(narrow.float(), weight):
        return weight
    return narrow.half().bfloat16()


def _tokenizer(reader: GGUFReader) -> tuple[Bpe, dict[str, Any]]:
    """The byte-level BPE tokenizer, and what `tokenizer_config.json` would say."""
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    model, pre = _field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre")
    if model != "gpt2" or pre not in SPLITS:
        raise ModelError(f"a byte-level BPE of {', '.join(SPLITS)}", f"{model} {pre}", "use the model's own folder")
    tokens, types = _field(reader, "tokenizer.ggml.tokens"), _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(pair.split(" ")) for pair in _field(reader, "tokenizer.ggml.merges")]
    try:
        bpe = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    except Exception as error:  # the library raises bare Exception for whatever is wrong
        raise ValueError(f"its tokenizer cannot be built: {error}") from error
    if pre == "qwen2":
        bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = _pre_tokenizer(pre)
    bpe.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL]
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = _field(reader, f"tokenizer.ggml.{theirs}_token_id")
        if token is not None:
            settings[f"{ours}_token"] = tokens[token]
    settings["chat_template"] = _field(reader, "tokenizer.chat_template")
    return bpe, settings


def _pre_tokenizer(pre: str) -> Any:
    """Cut text into words first, then spell each in the byte alphabet."""
    from tokenizers import Regex, pre_tokenizers

    pattern = SPLITS[pre]
    if pattern is None:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    words = pre_tokenizers.Split(Regex(pattern), "isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
