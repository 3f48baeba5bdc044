"""The form of a live run: the prompt, and the settings behind a button.

The ranges here are the ones the decoder accepts, so a form that can be sent is a run that can start.
"""

from __future__ import annotations

import streamlit as st

from specdecode_app.live import Settings

DRAFTERS = {
    "early-exit": "early exit: the model's own first layers",
    "ngram": "n-gram: copy what followed the same words before",
    "ngram+early-exit": "n-gram first, early exit when it has no match",
    "none": "none: plain decoding",
}
VERIFIERS = {
    "auto": "rejection sampling, chain or tree",
    "match": "match: compare with the target's own draw",
    "traversal": "traversal: from the leaves to the root; on a chain, block verification",
    "onehot": "one-hot: as if the draft were certain, the default of most engines",
    "typical": "typical acceptance, as in Medusa (LOSSY: not the target's law)",
}
LAYERS = 30
TREES = {"chain": (), "3 · 2 · 1 · 1": (3, 2, 1, 1), "4 · 2 · 2": (4, 2, 2), "2 · 2 · 2 · 1": (2, 2, 2, 1)}
EXAMPLE = "Why is the sky blue? Answer in two sentences."


def prompt(disabled: bool) -> None:
    """The prompt box."""
    st.text_input("Your prompt", EXAMPLE, key="prompt", max_chars=4000, disabled=disabled)


def settings() -> None:
    """Everything else."""
    st.selectbox("Drafter", DRAFTERS, key="drafter", format_func=DRAFTERS.__getitem__)
    st.slider(
        f"Early exit: draft with this many of the {LAYERS} layers",
        1,
        LAYERS - 1,
        Settings.exit_layer,
        key="exit_layer",
        disabled="early-exit" not in st.session_state.drafter,
    )
    left, right = st.columns(2)
    left.slider("gamma: draft tokens in a chain", 1, 16, 4, key="gamma")
    right.selectbox(
        "Shape: children at each depth", TREES, key="tree", disabled=st.session_state.drafter != "early-exit"
    )
    st.selectbox("Verifier", VERIFIERS, key="verifier", format_func=VERIFIERS.__getitem__)
    left, right = st.columns(2)
    left.slider("Temperature", 0.0, 2.0, 0.8, 0.1, key="temperature")
    right.slider("top-p", 0.05, 1.0, 1.0, 0.05, key="top_p")
    left.number_input("Seed", 0, 2**53 - 1, 0, key="seed")
    right.number_input("At most this many tokens", 1, 256, 64, key="max_new_tokens")


def read() -> Settings:
    """The form as it stands."""
    s = st.session_state
    return Settings(
        prompt=s.prompt,
        drafter=s.drafter,
        verifier=s.verifier,
        gamma=int(s.gamma),
        tree=TREES[s.tree] if s.drafter == "early-exit" else (),
        exit_layer=int(s.exit_layer),
        temperature=float(s.temperature),
        top_p=float(s.top_p),
        seed=int(s.seed),
        max_new_tokens=int(s.max_new_tokens),
    )
