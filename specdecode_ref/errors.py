"""Every error this package raises on purpose, and the one sentence each of them owes its reader.

    SpecDecodeError
    ├── InputError            an argument is out of its range (also a ValueError)
    ├── UnknownNameError      no model, drafter or verifier of that name
    ├── NotApplicableError    a verifier was given a draft outside its premises
    ├── ModelError            weights that cannot be found, read or verified in a tree
    ├── NumericalError        logits or laws that are not a distribution (NaN, no mass left)
    ├── FidelityError         a law, a state or a breakpoint is not what theory says
    └── TraceError            a trace file that is not a valid `specdec-trace/1`

Asserts elsewhere guard the package's own invariants; whatever a user can get wrong ends here.
"""


class SpecDecodeError(Exception):
    """What was expected, what came, and what to do about it, in one line."""

    def __init__(self, expected: str, came: object, do: str) -> None:
        self.expected, self.came, self.do = expected, came, do
        super().__init__(" ".join(f"expected {expected}; got {came}; {do}".split()))


class InputError(SpecDecodeError, ValueError):
    """An argument is outside its range."""


class UnknownNameError(SpecDecodeError, LookupError):
    """No model, drafter or verifier has this name."""


class NotApplicableError(SpecDecodeError):
    """The draft is outside the premises of the verifier, so its guarantee would not hold."""


class ModelError(SpecDecodeError):
    """Weights that cannot be found or read, or a model that cannot be verified in a tree."""


class NumericalError(SpecDecodeError):
    """A row that is not a distribution: NaN, or no probability left."""


class FidelityError(SpecDecodeError):
    """A law, a state or a breakpoint is not what theory says it is."""


class TraceError(SpecDecodeError):
    """A trace file that is not a valid `specdec-trace/1`."""
