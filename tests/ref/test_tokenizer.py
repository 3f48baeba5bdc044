"""Tokenizers: text to ids and back to its bytes, special tokens, templates that cannot reach out."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from specdecode_ref.errors import InputError
from specdecode_ref.models.tokenizer import Tokenizer


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
