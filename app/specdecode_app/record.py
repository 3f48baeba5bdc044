"""Records the traces that ship with the app: `python -m specdecode_app.record`, from nothing but the embedded default.

The tokens follow from the seeds; the times are those of the machine that records, so record on a quiet one.
"""

from __future__ import annotations

from specdecode_app.live import Settings
from specdecode_app.recorded import path

SKY = "Why is the sky blue? Answer in two sentences."
COPY = "Repeat this sentence three times: The quick brown fox jumps over the lazy dog."
CODE = "Write a Python function that counts the vowels in a word."

RECORDINGS = {
    "chain": Settings(SKY, exit_layer=28, gamma=4, temperature=0.8, top_p=0.95, seed=2, max_new_tokens=40),
    "tree": Settings(SKY, tree="sampled:3,2,1,1", exit_layer=28, temperature=0.8, top_p=0.95, max_new_tokens=40),
    "hybrid": Settings(CODE, drafter="hybrid", tree="dynamic:4,3,8", temperature=0.0, max_new_tokens=60),
    "n-gram": Settings(COPY, drafter="ngram", gamma=6, temperature=0.0, seed=0, max_new_tokens=44),
}


def record() -> None:
    """Decode each recording and write it over the shipped one."""
    from specdecode_app.session import load, open_session

    loaded = load()
    for name, settings in RECORDINGS.items():
        session, _ = open_session(loaded, settings)
        (generation,) = session.run()
        generation.trace.write(path(name))
        print(f"{path(name).name}: {len(generation.trace.rounds)} rounds, {generation.text!r}")


if __name__ == "__main__":
    record()
