"""Our folder `kernels/` and Hugging Face's package of the same name do not disturb each other.

`transformers` asks whether `kernels` can be imported. From the repository root Python sees our folder as a namespace
package of that name. A namespace package has no version and always yields to an installed one, wherever that is on the
path, so nothing changes as long as the folder holds no `__init__.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

PROBE = """
import torch, transformers
from transformers.integrations import hub_kernels
from transformers.utils import is_kernels_available

config = transformers.LlamaConfig(vocab_size=7, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                  num_attention_heads=2, num_key_value_heads=1)
logits = transformers.LlamaForCausalLM(config)(torch.tensor([[1, 2, 3]])).logits
print(is_kernels_available(), *logits.shape)
"""


def python(code: str, folder: Path, *more_path: Path) -> tuple[str, str]:
    """What the code prints, and what it complains about, run in a folder that is first on the path."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, more_path))}
    run = subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip(), run.stderr.strip()


def test_the_folder_is_no_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert python("import kernels; print(kernels.__file__)", ROOT) == ("None", "")


@pytest.mark.skipif("kernels" in {d.name for d in distributions()}, reason="Hugging Face's kernels is really installed")
def test_transformers_sees_no_kernels_here() -> None:
    assert python(PROBE, ROOT) == ("False 1 3 7", "")


def test_an_installed_kernels_package_wins(tmp_path: Path) -> None:
    installed = tmp_path / "kernels"
    installed.mkdir()
    (installed / "__init__.py").write_text("")
    assert python("import kernels; print(kernels.__file__)", ROOT, tmp_path) == (str(installed / "__init__.py"), "")
