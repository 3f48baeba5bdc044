"""The peers of a benchmark: `transformers` on the very weights that our model runs on.

`hf` is plain `generate`, `hf-pld` its prompt lookup with ten tokens, the value its documentation uses, and
`hf-assisted` its assisted generation with the draft model that is shipped for the target, as its defaults have it.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from specdecode_ref.bench import Method, Run
from specdecode_ref.errors import ModelError
from specdecode_ref.models import gguf, store, zoo

if TYPE_CHECKING:
    from specdecode_ref.sampling import SamplingRule

PEERS: Mapping[str, Mapping[str, Any]] = {"hf": {}, "hf-pld": {"prompt_lookup_num_tokens": 10}, "hf-assisted": {}}
"""Name -> what is added to the settings of `generate`."""


def transformers_methods(
    names: Sequence[str], model_name: str, loaded: zoo.Loaded, rule: SamplingRule, seed: int
) -> dict[str, Method]:
    """The peers of those names, all on one model with the weights, dtype and device of `loaded` (loaded by that name).

    Temperature, top-k, top-p, min-p and the end of the text are the rule's; the folder's own settings are not used.
    Raises ModelError where transformers is missing.
    """
    if not names:
        return {}
    if find_spec("transformers") is None:
        raise ModelError("the package transformers for --peers", "none", "pip install 'specdecode-ref[hf]'")
    import transformers

    quiet = transformers.utils.logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    target = loaded.model
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        _folder(model_name), dtype=target.dtype, local_files_only=True
    )
    model.to(target.device).eval()
    model.generation_config = transformers.GenerationConfig()
    forwards = [0]
    model.register_forward_hook(lambda *_: forwards.__setitem__(0, forwards[0] + 1))

    assistant = _assistant(transformers, target) if "hf-assisted" in names else None

    def method(name: str) -> Method:
        assisted = {"assistant_model": assistant} if name == "hf-assisted" else {}

        def run(prompt: Sequence[int], max_new_tokens: int) -> Run:
            settings = transformers.GenerationConfig(
                max_new_tokens=max_new_tokens,
                eos_token_id=list(rule.eos) or None,
                pad_token_id=rule.eos[0] if rule.eos else 0,
                **_sampling(rule),
                **PEERS[name],
            )
            ids = torch.tensor([list(prompt)], device=target.device)
            forwards[0] = 0
            torch.manual_seed(seed)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                out = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings, **assisted)
            return Run(tuple(out[0, len(prompt) :].tolist()), forwards[0])

        return run

    return {name: method(name) for name in names}


def _assistant(transformers: Any, target: Any) -> Any:
    """The shipped draft model as a model of `transformers`, with the target's whole LM head: it has no smaller ones."""
    from specdecode_ref.drafters import shipped
    from specdecode_ref.drafters.layouts.host import Host

    folder = shipped.folder("draft", target)
    if folder is None:
        raise ModelError(f"a draft model that is shipped for '{target.name}'", "none", "leave hf-assisted out")
    config = zoo.read_json(folder / "config.json")
    sizes = {name: value for name, value in config.items() if name not in ("architectures", "draft_vocab_size")}
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    own = {name: tensor.float() for name, tensor in zoo.SafetensorsFolder(folder).items() if name not in ("d2t", "t2d")}
    host = Host.of(target)
    lent = {"model.embed_tokens.weight": host.table, "lm_head.weight": host.rows(torch.arange(host.vocab_size))}
    made.load_state_dict(lent | own)
    return made.to(target.dtype).to(target.device).eval()


def _folder(name: str) -> Path:
    """The folder that `zoo.load(name)` reads its weights from."""
    path = zoo.embedded() if name == zoo.DEFAULT else Path(name).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        return store.converted(path, path.stem, gguf.convert)[0]
    import huggingface_hub

    return Path(huggingface_hub.snapshot_download(name, local_files_only=True))


def _sampling(rule: SamplingRule) -> dict[str, Any]:
    """Our rule in the words of `generate`; a rule that changes nothing is left out."""
    if rule.temperature == 0:
        return {"do_sample": False}
    wanted = {"temperature": rule.temperature, "top_k": rule.top_k, "top_p": rule.top_p, "min_p": rule.min_p}
    return {"do_sample": True, **wanted, "min_p": rule.min_p or None}
