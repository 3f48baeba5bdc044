# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Lesson 2: a chain on a real model
#
# Lesson 1 proved the rule on three words. Here the same functions run SmolLM2, a language model with 135 million
# parameters, small enough for any laptop. You will do one round by hand, write the loop, read what it recorded, and
# find out when it is worth the trouble.
#
# Run one cell at a time, and **predict** before you run. There are three exercises, each with a solution and a check
# below it: edit the exercise cell, run it, skip the solution and run the check. The model comes with the project. The
# very first run converts its weights, which takes a little longer.

# %% [markdown]
# ## 1. A prompt becomes tokens

# %%
import torch

from specdecode_ref.models.zoo import load

smol = load("smollm2", dtype="float32", device="cpu")
model, tokenizer = smol.model, smol.tokenizer
print(f"{smol.name}: {model.config.layers} layers, {model.config.hidden} wide, {model.vocab_size:,} tokens")

# %% [markdown]
# A chat model was trained on conversations written in a fixed form. The *chat template* puts our question into that
# form, up to the place where the assistant is to speak. Then the text is cut into tokens.

# %%
question = (
    "Correct the spelling: The cat sat on the mat and looked at the bird in the tree. "
    "The bird sang a song about the cat, and the cat lisened."
)
messages = [{"role": "user", "content": question}]
print(tokenizer.render(messages))
prompt = tokenizer.chat(messages)
print(f"{len(prompt)} tokens, the first ten: {prompt[:10]}")


def pieces(tokens):
    """The text of each token, quoted so that spaces show."""
    return " ".join(repr(tokenizer.decode([token], special=True)) for token in tokens)


print(pieces(prompt[:10]))

# %% [markdown]
# ## 2. Plain decoding, step by step
#
# The model reads tokens and returns *logits*: one number per token of the vocabulary, after every token that it read.
# A `SamplingRule` turns logits into a law. Temperature 0 means *greedy*: all the mass on the largest logit.
#
# What has been read is kept in a cache of keys and values, so that it need not be read again. We first read all of the
# prompt but its last token. That last one is the *root*: the newest token, not yet in the cache. Every step reads the
# root, draws the next token, and makes it the new root.

# %%
from specdecode_ref.coins import Coins
from specdecode_ref.sampling import SamplingRule, law, pick

greedy = SamplingRule(temperature=0, eos=tuple(tokenizer.eos_ids))
coins = Coins(seed=0)


def fresh_cache(tokens):
    """A cache that holds all the tokens but the last."""
    cache = model.new_cache(batch=1, capacity=128)
    model.prefill([tokens[:-1]], cache)
    return cache


tokens = list(prompt)
cache = fresh_cache(tokens)
for _ in range(4):
    root = torch.tensor([[tokens[-1]]])
    logits = model.forward(root, [[-1]], cache).logits[0, 0]
    cache.commit([[0]])
    p = law(logits, greedy, tokens, len(prompt))
    tokens.append(pick(p, coins.emit(len(tokens))))
print(pieces(tokens[len(prompt) :]))

# %% [markdown]
# Four tokens, four passes through all the layers. `autoregressive` is the same loop with stopping and bookkeeping. It
# ends at the token that closes the turn.

# %%
from specdecode_ref.decode import autoregressive

plain = autoregressive(model, prompt, rule=greedy, max_new_tokens=40)
print(tokenizer.decode(plain.tokens))
print(f"{len(plain.tokens)} tokens in {len(plain.trace.rounds)} passes; ended by: {plain.trace.footer.finish_reason}")

# %% [markdown]
# (It is a small model. It copies the mistake too.)
#
# ## 3. One round by hand
#
# ### Draft
#
# The answer repeats the question, and a program can notice that. The `ngram` drafter looks for the last few tokens
# earlier in the text, and proposes whatever followed them there. It has no model and costs next to nothing. (`room` is
# how many tokens a draft may hold before the length limit.)
#
# **Predict:** the answer so far is the first six tokens of the text above. What will it propose?

# %%
from specdecode_ref.drafters.ngram import NGram
from specdecode_ref.types import Context

tokens = [*prompt, *plain.tokens[:6]]
proposer = NGram(gamma=4).start(prompt, greedy)
draft = proposer.propose(Context(tokens, len(prompt), room=8), coins)
print("so far:  ", pieces(tokens[len(prompt) :]))
print("root:    ", pieces(draft.tokens[:1]))
print("proposes:", pieces(draft.tokens[1:]))
print("parents: ", draft.parents)

# %% [markdown]
# A draft is a tree. Node 0 is the root, and every node names its parent. This one is a chain, each node hanging on the
# one before.
#
# ### One pass of the target
#
# All five nodes go through the model together. Each sees the cache, its own ancestors and itself. So row `i` of the
# logits is what plain decoding would have got, had it written the tokens up to node `i`. That is the whole trick: five
# answers from one pass.

# %%
cache = fresh_cache(tokens)
logits = model.forward(torch.tensor([draft.tokens]), [draft.parents], cache).logits[0]


def target_laws(draft, logits, tokens, rule):
    """The target's law after every node of the draft."""
    return [law(row, rule, [*tokens, *draft.history(i)], len(prompt)) for i, row in enumerate(logits)]


p = target_laws(draft, logits, tokens, greedy)
for i, row in enumerate(p):
    print(f"after node {i}, {pieces(draft.tokens[i : i + 1]):<10} the target wants {pieces([int(row.argmax())])}")

# %% [markdown]
# ### Verdict
#
# **Predict:** compare what each node holds with what the target wanted after its parent. How many are accepted? Which
# token comes last, and of what kind is it: `bonus` or `residual`?

# %%
from specdecode_ref.verify import chain

base = len(tokens)
verdict = chain.verify(draft, p, coins.accept(base, len(draft)), coins.emits(base, len(draft)))
for test in verdict.tests:
    word = pieces([draft.tokens[test.node]])
    print(f"node {test.node} {word:<10} p {test.p_eff:.2f}  q {test.q_eff:.2f}  u {test.u:.2f}  {test.accepted}")
print("accepted path:", verdict.path, " then emitted:", pieces([verdict.token]), verdict.kind)

# %% [markdown]
# ### Commit
#
# The pass put keys and values of all five nodes into the cache. Only those on the accepted path may stay, or later
# tokens would look at words that were never written. The emitted token is the next root: it is *not* in the cache yet.

# %%
cache.commit([verdict.path])
new = [*(draft.tokens[i] for i in verdict.path[1:]), verdict.token]
tokens += new
print(f"{len(new)} tokens from one pass: {pieces(new)}")
print(f"cached {cache.lengths[0]} of {len(tokens)} tokens: all but the root")
print("same as plain decoding:", tokens[len(prompt) :] == list(plain.tokens[: 6 + len(new)]))

# %% [markdown]
# ### Exercise 1: write the round
#
# Put the four steps together. `my_round` gets the tokens so far, a cache that holds all of them but the last, and a
# proposer. It drafts, runs one pass, judges, commits, and returns the list of new tokens. (It should not append them.)
# Everything you need is in the cells above. The check runs it until the answer ends.


# %% tags=["exercise"]
def my_round(tokens, cache, proposer):
    return []


# %% tags=["solution"]
def my_round(tokens, cache, proposer):
    draft = proposer.propose(Context(tokens, len(prompt), room=8), coins)
    logits = model.forward(torch.tensor([draft.tokens]), [draft.parents], cache).logits[0]
    p = target_laws(draft, logits, tokens, greedy)
    base = len(tokens)
    verdict = chain.verify(draft, p, coins.accept(base, len(draft)), coins.emits(base, len(draft)))
    cache.commit([verdict.path])
    return [*(draft.tokens[i] for i in verdict.path[1:]), verdict.token]


# %% tags=["check"]
tokens, rounds = list(prompt), 0
cache, proposer = fresh_cache(tokens), NGram(gamma=4).start(prompt, greedy)
while tokens[-1] not in greedy.eos:
    new = my_round(tokens, cache, proposer)
    assert new, "a round emits at least one token, but my_round returned none"
    expected = plain.tokens[len(tokens) - len(prompt) :][: len(new)]
    assert list(expected) == new[: len(expected)], f"plain decoding has {pieces(expected)}, my_round {pieces(new)}"
    tokens += new[: len(expected)]
    rounds += 1
    ended = tokens[-1] in greedy.eos
    assert ended or cache.lengths[0] == len(tokens) - 1, "after a round the cache holds every token but the last"
assert rounds < len(plain.tokens), "my_round never accepted a drafted token"
print(f"exercise 1: the same {len(plain.tokens)} tokens in {rounds} rounds")

# %% [markdown]
# ## 4. A draft with a law
#
# The n-gram draft is not random, so its `q` is 1 for what it says. Let us draft with a model, and raise the temperature
# to 0.8, so that `p` and `q` are both spread out.
#
# Where does a draft model come from? The cheapest one is the target's own lower part: run only its first layers, then
# go straight to the output. That is called *early exit*. SmolLM2 was not trained to be read there, so how deep must we
# go? We can measure it before drafting anything: read the answer once with the whole model and once with the lower
# part, and average `alpha = sum min(p, q)` over its tokens.
#
# **Predict:** what is `alpha` after 10 of the 30 layers? And after 28?

# %%
warm = SamplingRule(temperature=0.8, eos=tuple(tokenizer.eos_ids))
answer = [*prompt, *plain.tokens]


def answer_laws(some_model):
    """The laws of a model at each token of the answer, from a single pass."""
    parents = range(-1, len(answer) - 2)
    logits = some_model.forward(torch.tensor([answer[:-1]]), [parents], some_model.new_cache(1, 128)).logits[0]
    return [law(row, warm, answer, len(prompt)) for row in logits[len(prompt) - 1 :]]


target = answer_laws(model)
for layers in (10, 20, 24, 28):
    lower = answer_laws(model.truncated(layers))
    overlap = sum(float(torch.minimum(p, q).sum()) for p, q in zip(target, lower, strict=True)) / len(target)
    print(f"first {layers} layers: alpha {overlap:.2f}")

# %% [markdown]
# Layers that were not trained for it say little until near the end. (Drafts that *are* trained for the job do far
# better.) We take the first 24 layers: too slow to be useful, as we shall see, but a real law to learn from.

# %%
from specdecode_ref.drafters.model import ModelDrafter

early_exit = ModelDrafter(model.truncated(24), shape=(1, 1, 1), name="early-exit")
tokens = [*prompt, *plain.tokens[:6]]
draft = early_exit.start(prompt, warm).propose(Context(tokens, len(prompt), room=8), coins)
logits = model.forward(torch.tensor([draft.tokens]), [draft.parents], fresh_cache(tokens)).logits[0]
p = target_laws(draft, logits, tokens, warm)
print("proposes:", pieces(draft.tokens[1:]))

# %% [markdown]
# Lesson 1 showed with three words that what is emitted has the law `p`. Here is the same sum over the whole vocabulary,
# at the root of this draft.
#
# **Predict:** how far from `p` will the emitted law be?

# %%
from specdecode_ref.sampling import residual

q = draft.q[0]
overlap = torch.minimum(p[0], q)
emitted = overlap + (1 - overlap.sum()) * residual(p[0], q)
distance = float((emitted - p[0]).abs().sum()) / 2
print(f"alpha here {float(overlap.sum()):.3f}, distance of the emitted law from p: {distance:.1e}")

# %% [markdown]
# ## 5. The loop, and what it recorded
#
# `speculative` repeats these rounds. It returns the tokens and a *trace*, which holds every draft, test and verdict.
# The animated tree in the app is drawn from nothing else.

# %%
from specdecode_ref.decode import speculative

sampled = speculative(model, early_exit, prompt, rule=warm, seed=1, max_new_tokens=14)
print(tokenizer.decode(sampled.tokens))

# %% [markdown]
# Now read its tests. In each line, check the rule yourself: accepted when `u * q < p`.
#
# **Predict:** can you find a token with `p` above `q`? What must its verdict be, whatever `u` is?


# %%
def show(r):
    """One round of a trace: its tests, then the token that it emitted last."""
    print(f"round {r.index}, {r.committed} tokens committed")
    for test in r.tests:
        word, verdict = pieces([r.nodes.token[test.node]]), "accepted" if test.accepted else "rejected"
        print(f"    {word:<14} p {test.p_eff:.3f}  q {test.q_eff:.3f}  u {test.u:.3f}  {verdict}")
    print(f"    {pieces([r.emitted.token]):<14} {r.emitted.kind}")


for r in sampled.trace.rounds[:6]:
    show(r)

# %% [markdown]
# `sampled.trace.write(path)` saves it, one JSON object a line, and the app opens such files. This is the line of the
# first round:

# %%
line = list(sampled.trace.lines())[1]
print(line[:360], "...")

# %% [markdown]
# ## 6. Counting
#
# Now both drafters on the same question, greedy. `Metrics` counts from the trace. `tau` is tokens per round, and the
# rates per position say how often the first, second, ... guess was accepted once the text got there.
#
# **Predict:** which drafter has the higher `tau`, the one without a model or the one with 24 layers?

# %%
from specdecode_ref.metrics import Metrics

runs = {
    "ngram": speculative(model, NGram(gamma=4), prompt, rule=greedy, max_new_tokens=40),
    "early-exit": speculative(model, early_exit, prompt, rule=greedy, max_new_tokens=40),
}
for name, run in runs.items():
    m = Metrics.of(run.trace)
    print(f"{name:<10} tau {m.tau:.2f}, {m.rounds} rounds, by position:", [f"{r:.2f}" for r in m.conditional_rates])

# %% [markdown]
# The figures depend on the text more than on anything else. The same n-gram drafter, on a question whose answer repeats
# nothing:

# %%
story = tokenizer.chat([{"role": "user", "content": "Tell me a short story about a lighthouse."}])
told = speculative(model, NGram(gamma=4), story, rule=greedy, max_new_tokens=16)
m = Metrics.of(told.trace)
print(tokenizer.decode(told.tokens))
print(f"tau {m.tau:.2f}: of {m.drafted} drafted tokens {m.accepted} were accepted, in {m.rounds} rounds")

# %% [markdown]
# ### Exercise 2: acceptance by position
#
# Write `my_rates(rounds, gamma)`. Take the rounds that drafted something, which are those with
# `len(r.nodes.parent) > 1`. Return for `i = 1 ... gamma` the share of them that accepted at least `i` drafted tokens. A
# round accepted `min(len(r.path) - 1, r.kept)` tokens; `kept` matters only where the text ended inside a draft. This is
# the rate that engines log per position. It cannot rise from one position to the next: why?


# %% tags=["exercise"]
def my_rates(rounds, gamma):
    return [0.0] * gamma


# %% tags=["solution"]
def my_rates(rounds, gamma):
    accepted = [min(len(r.path) - 1, r.kept) for r in rounds if len(r.nodes.parent) > 1]
    return [sum(a >= i for a in accepted) / len(accepted) for i in range(1, gamma + 1)]


# %% tags=["check"]
for name, run in runs.items():
    gamma = 4 if name == "ngram" else 3
    got, counted = my_rates(run.trace.rounds, gamma), Metrics.of(run.trace)
    expected = [*counted.unconditional_rates, *[0.0] * gamma][:gamma]
    wrong = len(got) != gamma or any(abs(a - b) > 1e-12 for a, b in zip(got, expected, strict=True))
    assert not wrong, f"{name}: the rates are {expected}, but my_rates returned {got}"
    print(f"exercise 2: {name:<10} 1 + the sum of the rates is {1 + sum(got):.2f}, tau is {counted.tau:.2f}")

# %% [markdown]
# One plus the sum of the rates is the mean length of a round *with a draft*. `tau` also counts the rounds without one,
# and it loses a little where the text ended inside a round. Two honest figures, two names.

# %% [markdown]
# ## 7. Is it lossless? Look at the tokens
#
# - *Greedy*: the tokens must be those of plain decoding. There is nothing random that could excuse a difference.
# - *Match verification* at any temperature: the same coins must give the same tokens.
# - *Rejection sampling*: the same law, other tokens. Looking at one text cannot prove it; lesson 1 did, by counting.
#
# **Predict:** which of these four lines will say True?

# %%
settings = {"rule": warm, "seed": 1, "max_new_tokens": 14}
plain_warm = autoregressive(model, prompt, **settings)
matched = speculative(model, NGram(gamma=4), prompt, verifier="match", **settings)
for name, run in runs.items():
    print(f"greedy, {name}, same tokens as plain:", run.tokens == plain.tokens)
print("match at temperature 0.8, same tokens:", matched.tokens == plain_warm.tokens)
print("rejection at temperature 0.8, same tokens:", sampled.tokens == plain_warm.tokens)

# %% [markdown]
# A note on rounding. A pass over five tokens may add the same numbers in another order than a pass over one, so the
# logits can differ in their last digits. If two tokens are almost tied for the first place, they can trade places. In
# 64-bit floats that is next to impossible. In 16-bit floats it happens, and then one must ask: a tie, or a defect?

# %% [markdown]
# ## 8. Where the time goes
#
# Why should five tokens cost no more than one? Because a model that writes one token at a time mostly waits for memory.
# Each pass must read every weight once. For a model of 70 billion parameters in 16 bits on an H100, whose memory
# delivers 3.35 TB a second:

# %%
parameters, bytes_each = 70e9, 2
bandwidth, arithmetic = 3.35e12, 989e12  # bytes a second; 16-bit operations a second, dense (NVIDIA's data sheet)
read = parameters * bytes_each / bandwidth
compute = 2 * parameters / arithmetic  # one multiplication and one addition per parameter and token
print(f"to read {parameters * bytes_each / 1e9:.0f} GB: {read * 1e3:.1f} ms, so at most {1 / read:.0f} tokens a second")
print(f"to calculate one token: {compute * 1e3:.2f} ms, so {read / compute:.0f} tokens in the time of one reading")

# %% [markdown]
# Whoever writes one token a pass uses a fraction of a percent of the arithmetic. Speculation puts some of the rest to
# work. (The bound assumes that the model fits one device, and ignores the cache, which must be read too.)
#
# Our own model is read in the same way. Each layer holds the matrices of attention and of the feed-forward part, and at
# the end comes the *head*, the matrix that makes logits. How much of it does the early exit read?

# %%
size = model.config
attention = 2 * size.hidden * size.head_dim * (size.heads + size.kv_heads)
layer = attention + 3 * size.hidden * size.intermediate
head = size.vocab_size * size.hidden


def parameters_read(layers):
    return layers * layer + head


share = parameters_read(24) / parameters_read(size.layers)
print(f"all layers read {parameters_read(size.layers) / 1e6:.0f} million parameters a pass")
print(f"24 layers read {parameters_read(24) / 1e6:.0f} million: a draft step costs about {share:.2f} passes")

# %% [markdown]
# And in seconds, on this machine: how long does a pass over `n` new tokens take?
#
# **Predict:** eight tokens in one pass take how many times as long as one?

# %%
import time
from statistics import median

cache = fresh_cache(answer)


def pass_seconds(some_model, n):
    """Median time of a pass over a chain of n tokens, after the cached text."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        some_model.forward(torch.tensor([answer[-n:]]), [range(-1, n - 1)], cache)
        times.append(time.perf_counter() - start)
        cache.rollback()
    return median(times)


pass_seconds(model, 1)  # the first passes of a shape are slower
one = pass_seconds(model, 1)
for n in (2, 4, 8, 16):
    print(f"{n:>2} tokens: {pass_seconds(model, n) / one:.2f} times as long as one")

# %% [markdown]
# (Clocks wobble, more so on a busy machine. Run the cell twice before you believe it.)
#
# ## 9. When does it pay?
#
# ### Exercise 3: the speed-up
#
# Measure time in passes of the target. A round costs one pass for the verification and `gamma` draft steps, each of
# which costs `c` passes. It yields `tau` tokens. Plain decoding pays one pass per token. How many times faster is
# speculation? At the moment `my_speedup` believes that drafting is free.


# %% tags=["exercise"]
def my_speedup(tau, gamma, c):
    return tau


# %% tags=["solution"]
def my_speedup(tau, gamma, c):
    return tau / (1 + gamma * c)


# %% tags=["check"]
for tau, gamma, c, expected in ((2.0, 4, 0.0, 2.0), (2.0, 4, 0.25, 1.0), (1.0, 1, 1.0, 0.5), (3.0, 5, 0.1, 2.0)):
    got = my_speedup(tau, gamma, c)
    assert abs(got - expected) < 1e-12, f"tau {tau}, gamma {gamma}, c {c}: the speed-up is {expected}, not {got}"
print("exercise 3: my_speedup is right")

# %% [markdown]
# Now the two drafters. A step of the n-gram drafter costs almost nothing, and one of the early exit the share of a pass
# that we worked out in section 8.
#
# **Predict:** does the early exit pay?

# %%
cost = {"ngram": 0.0, "early-exit": share}
for name, gamma in (("ngram", 4), ("early-exit", 3)):
    m = Metrics.of(runs[name].trace)
    print(f"{name:<10} tau {m.tau:.2f}, model of the speed-up: {my_speedup(m.tau, gamma, cost[name]):.2f}")

# %% [markdown]
# And measured: tokens per second after the prompt, speculative over plain. This includes what the simple model left
# out: a pass over five tokens is not quite free, and the loop itself takes time.

# %%
plain_rate = Metrics.of(plain.trace).tokens_per_second
for name, run in runs.items():
    m = Metrics.of(run.trace)
    print(f"{name:<10} tau {m.tau:.2f}, measured speed-up: {m.tokens_per_second / plain_rate:.2f}")

# %% [markdown]
# A speed-up below 1 is a loss. Here the early exit loses, and it could hardly win: three of its draft steps cost more
# than two passes, and save at most three. Which draft length is best? It depends on `alpha` and on `c`:

# %%
print("alpha    c   best gamma   speed-up (a model, not measured)")
for alpha in (0.4, 0.6, 0.8):
    for c in (0.02, 0.2, 0.8):
        taus = {gamma: (1 - alpha ** (gamma + 1)) / (1 - alpha) for gamma in range(13)}
        best = max(taus, key=lambda gamma: my_speedup(taus[gamma], gamma, c))
        print(f"{alpha:>5} {c:>5} {best:>10} {my_speedup(taus[best], best, c):>12.2f}")

# %% [markdown]
# `gamma = 0` means: do not speculate. Speculation does not pay
#
# - when the draft is too dear for how often it is right, like our early exit;
# - when the text surprises the draft: a story for n-grams, a high temperature for most;
# - when the arithmetic is already busy: a server that handles hundreds of users in each pass has no idle arithmetic to
#   fill, and every rejected token takes it from somebody.
#
# It pays best for one user or a few, with a cheap draft, on text that the draft can foresee.

# %% [markdown]
# ## What you have seen
#
# - A round is: draft, one pass over the draft, verdict, commit. All of it fits in the few lines of exercise 1.
# - Row `i` of that pass is what plain decoding would have got after the tokens up to node `i`.
# - After a round the cache holds every committed token but the root.
# - Greedy and match give the very tokens of plain decoding; rejection gives its law.
# - `tau` says how many tokens a pass yields. Whether that is faster depends on what the draft and the pass cost.
#
# To read next: `specdecode_ref/decode.py`, the real loop; then open the app and watch these rounds as a tree.
