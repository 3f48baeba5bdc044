"""Fidelity: how we know that the output law is the target's law, and how to find out about anyone's verifier.

    from specdecode_ref.fidelity import assert_lossless
    assert_lossless(my_verify)

The exact rungs: `cube` turns a program of uniform coins into its law, `edges` says in fractions where it may change,
`laws` and `loop` compare it with the target's, for a verifier and for the whole decode loop; `coupling` compares states
and tokens, `boundaries` asks about the edges of float64. The sampled rung: `statistics`, `betting`, `pairs`, `sampled`.
`mutants` plants known bugs in private copies of this package (`private`), and `suite` is what they are sent through.
For code that is not ours: `conformance`, and `vectors` for programs in other languages. `compare` sets the verifiers
side by side, `divergence` explains where two greedy outputs part. The page docs/lossless.md tells the whole story.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdecode_ref.fidelity.conformance import Report, assert_lossless, examine

__all__ = ["Report", "assert_lossless", "examine"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from specdecode_ref.fidelity import conformance

    return getattr(conformance, name)
