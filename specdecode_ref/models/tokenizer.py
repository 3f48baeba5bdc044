"""Text to token ids and back, and what the rest of the package asks of a tokenizer: bytes, chat template, hash.

A thin layer over the `tokenizers` library and a sandboxed Jinja template; it reads a folder's `tokenizer.json`,
`tokenizer_config.json`, `generation_config.json` and `config.json`, and runs no code from any of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from specdecode_ref.errors import InputError, ModelError

Message = Mapping[str, str]
"""One turn of a chat: {"role": "system" | "user" | "assistant", "content": text}."""


class Tokenizer:
    """Encode, decode, and name tokens. `eos_ids` end a generation; `bos_id` starts a text where a model wants one."""

    def __init__(
        self,
        backend: Any,
        eos_ids: Sequence[int] = (),
        bos_id: int | None = None,
        chat_template: str | None = None,
    ) -> None:
        self.backend = backend
        self.eos_ids = tuple(sorted(set(eos_ids)))
        self.bos_id = bos_id
        self.chat_template = chat_template

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read a model's folder. Raises ModelError when it holds no readable tokenizer.json."""
        from tokenizers import Tokenizer as Backend

        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelError("a tokenizer.json beside the weights", f"none in {folder}", "copy the model's own there")
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for whatever is wrong with the file
            why = str(error).splitlines()[0]
            raise ModelError(f"a tokenizer in {path}", f"a damaged file ({why})", "fetch it again") from error
        settings = _json(folder / "tokenizer_config.json")
        return cls(
            backend,
            eos_ids=_eos(backend, folder, settings),
            bos_id=_id(backend, settings.get("bos_token")),
            chat_template=_template(folder, settings),
        )

    @property
    def vocab_size(self) -> int:
        """How many ids have a token; the model may have more rows."""
        return int(self.backend.get_vocab_size())

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Token ids of a text. `special` adds what the model expects around it (a first token, mostly)."""
        return list(self.backend.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """The text of some ids; special tokens are left out unless `special`."""
        return str(self.backend.decode(list(ids), skip_special_tokens=not special))

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token stands for; joined, a text's tokens are its UTF-8 bytes. An id without a token has none."""
        piece = self.backend.id_to_token(token)
        if piece is None:
            return b""
        if token in self._added:
            return piece.encode()
        if not self._byte_level:
            byte = piece.startswith("<0x") and piece.endswith(">") and len(piece) == 6
            return bytes([int(piece[3:5], 16)]) if byte else piece.replace("▁", " ").encode()
        return bytes(BYTES[c] for c in piece) if all(c in BYTES for c in piece) else piece.encode()

    def text_bytes(self, token: int) -> bytes:
        """The bytes a token adds to the text: none for a mark of the format."""
        return b"" if self.is_special(token) else self.token_bytes(token)

    def is_special(self, token: int) -> bool:
        """Whether a token is a mark of the format (a turn's end, say) and not text."""
        return self._added.get(token, False)

    def chat(self, messages: str | Sequence[Message]) -> list[int]:
        """Token ids of a conversation (or of one user's message), up to where the assistant is to speak."""
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.encode(self.render(messages), special=False)

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The conversation as the model was taught to read it. Raises InputError when it has no chat template."""
        if self.chat_template is None:
            raise InputError("a model with a chat template", "none", "give the prompt raw")
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise TemplateError(message)

        room = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        room.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        room.globals["raise_exception"] = refuse
        room.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        token = self.backend.id_to_token
        try:
            return room.from_string(self.chat_template).render(
                messages=[dict(m) for m in messages],
                add_generation_prompt=add_generation_prompt,
                bos_token="" if self.bos_id is None else token(self.bos_id),
                eos_token=token(min(self.eos_ids)) if self.eos_ids else "",
            )
        except Exception as error:  # a template is a program of the model's: it may fail in any way
            do = "give the prompt raw, or mend the template"
            raise InputError(
                "a chat template that takes this prompt", f"{type(error).__name__}: {error}", do
            ) from error

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the whole tokenizer: two models with equal hashes share their vocabulary."""
        return hashlib.sha256(self.backend.to_str().encode()).hexdigest()

    @cached_property
    def _added(self) -> dict[int, bool]:
        """Tokens that are matched in the text as they stand -> whether they are special."""
        return {i: bool(token.special) for i, token in self.backend.get_added_tokens_decoder().items()}

    @cached_property
    def _byte_level(self) -> bool:
        return '"ByteLevel"' in json.dumps(json.loads(self.backend.to_str()).get("decoder"))


def _letters() -> dict[str, int]:
    """GPT-2's alphabet of bytes: printable Latin-1 stands for itself, the other 68 bytes follow from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


BYTES = _letters()
"""Letter in a byte-level vocabulary -> the byte it stands for."""


def _json(path: Path) -> dict[str, Any]:
    """A JSON object, or nothing where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"JSON in {path}", f"a damaged file ({error})", "fetch it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"a JSON object in {path}", type(value).__name__, "fetch it again")
    return value


def _id(backend: Any, token: Any) -> int | None:
    """The id of a token given as text or, in older files, as {"content": text}."""
    text = token.get("content") if isinstance(token, dict) else token
    return backend.token_to_id(text) if isinstance(text, str) else None


def _eos(backend: Any, folder: Path, settings: Mapping[str, Any]) -> list[int]:
    """The ids that end a text: what generation uses, else what the model or its tokenizer names."""
    for name in ("generation_config.json", "config.json"):
        value = _json(folder / name).get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(type(i) is int and i >= 0 for i in ids):
                raise ModelError(f"eos_token_id as token ids in {folder / name}", repr(value)[:80], "fetch it again")
            return ids
    token = _id(backend, settings.get("eos_token"))
    return [] if token is None else [token]


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own in newer folders, else in tokenizer_config.json, maybe one of several."""
    own = folder / "chat_template.jinja"
    if own.is_file():
        try:
            return own.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"UTF-8 in {own}", error, "fetch it again") from error
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {e.get("name"): e.get("template") for e in template if isinstance(e, dict)}.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelError(f"a chat template in {folder}", type(template).__name__, "fetch tokenizer_config.json again")
    return template
