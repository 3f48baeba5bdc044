"""A model of a few kilobytes in a folder, complete enough for the real loader and the real command line.

And two small worlds: a cache folder of one's own, and a calibration that is quickly done.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

END = "<|end|>"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 256,
}


def write_model(folder: Path, extra: str | None = None, seed: int = 0, scale: float = 0.4) -> Path:
    """A random Llama over bytes and one end token; `extra` is one more token, which makes another vocabulary."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    from specdecode_ref.models.tokenizer import BYTES

    folder.mkdir()
    config = CONFIG | ({"vocab_size": 258} if extra else {})
    h, m, kv = 32, 48, 16
    shapes = {"model.embed_tokens": (config["vocab_size"], h), "model.norm": (h,)}
    for layer in range(3):
        at = f"model.layers.{layer}."
        shapes |= {at + "self_attn.q_proj": (h, h), at + "self_attn.o_proj": (h, h)}
        shapes |= {at + "self_attn.k_proj": (kv, h), at + "self_attn.v_proj": (kv, h)}
        shapes |= {at + "mlp.gate_proj": (m, h), at + "mlp.up_proj": (m, h), at + "mlp.down_proj": (h, m)}
        shapes |= {at + "input_layernorm": (h,), at + "post_attention_layernorm": (h,)}
    generator = torch.Generator().manual_seed(seed)
    weights = {
        f"{name}.weight": torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) * scale
        for name, shape in shapes.items()
    }
    weights["model.embed_tokens.weight"][256] = 0.0  # logit 0: the end of the text is unlikely, so that texts get long
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = Tokenizer(models.BPE(dict(BYTES), []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in (END, extra) if t])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "chat_template": template}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model."""
    return str(write_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="session")
def other_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model with one token more."""
    return str(write_model(tmp_path_factory.mktemp("models") / "other", extra="<|extra|>"))


@pytest.fixture
def specdecode(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command line in this process: (exit code, standard output, standard error)."""
    from specdecode_ref import cli

    def run(*arguments: str) -> tuple[int, str, str]:
        capfd.readouterr()
        code = cli.execute(arguments)
        return (code, *capfd.readouterr())

    return run


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of one's own, so that no test sees the user's. It is not there yet."""
    monkeypatch.setenv("SPECDECODE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def short_calibration(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two short prompts and few sizes: a table reads its context slot by slot."""
    from specdecode_ref.drafters import measuring

    monkeypatch.setattr(measuring, "PROMPTS", ("one fine day", "def f(x): "))
    monkeypatch.setattr(measuring, "ROWS", (1, 4))
    monkeypatch.setattr(measuring, "NODES", (1, 2))
    monkeypatch.setattr(measuring, "CONTEXT", 16)
    monkeypatch.setattr(measuring, "PLACES", 40)
