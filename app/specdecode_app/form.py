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
    "eagle": "EAGLE: a trained layer on the model's own features",
    "hybrid": "hybrid: n-gram and EAGLE in one tree",
    "medusa": "Medusa: four trained heads, one look",
    "model": "draft model: a small model trained to write like the large one",
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
DRAWN = {
    "chain": "",
    "drawn: 3 · 2 · 1 · 1 children": "sampled:3,2,1,1",
    "drawn: 4 · 2 · 2 children": "sampled:4,2,2",
    "drawn: 2 · 2 · 2 · 1 children": "sampled:2,2,2,1",
}
RANKED = {
    "dynamic: the 5 likeliest nodes": "dynamic:4,3,5",
    "dynamic: the 11 likeliest nodes": "dynamic:5,3,11",
    "dynamic: only nodes above 10%": "dynamic:5,3,11,0.1",
}
STATIC = {"static: 5 nodes": "static:narrow", "static: 10 nodes": "static:middle", "static: 20 nodes": "static:wide"}
TREES = {
    "early-exit": DRAWN,
    "ngram": {"chain": ""},
    "ngram+early-exit": {"chain": ""},
    "eagle": RANKED | STATIC | DRAWN,
    "hybrid": RANKED,
    "medusa": STATIC | RANKED | DRAWN,
    "model": DRAWN | RANKED | STATIC,
    "none": {"chain": ""},
}
"""The shapes that each drafter can grow, the first one chosen."""
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
    shapes = TREES[st.session_state.drafter]
    if st.session_state.get("tree") not in shapes:  # chosen for another drafter
        st.session_state.tree = next(iter(shapes))
    right.selectbox("Shape of the draft", shapes, key="tree", disabled=len(shapes) == 1)
    chain = not shapes[st.session_state.tree]
    left.slider("gamma: draft tokens in a chain", 1, 16, 4, key="gamma", disabled=not chain)
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
        tree=TREES[s.drafter].get(s.tree, ""),
        exit_layer=int(s.exit_layer),
        temperature=float(s.temperature),
        top_p=float(s.top_p),
        seed=int(s.seed),
        max_new_tokens=int(s.max_new_tokens),
    )
