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
# # Lesson 1: guess, test, repair
#
# You are at the start. This lesson shows, on a language of three words, why speculative decoding changes nothing about
# what a model says. You need basic Python and a little PyTorch; no model is loaded. Lesson 2 repeats it on a real one.
#
# Run one cell at a time. Where it says **Predict**, commit yourself to an answer before you run the next cell: a wrong
# guess teaches more than a right one.
#
# There are three exercises, each with a solution and a check below it. To try your own answer, edit the exercise cell,
# run it, skip the solution and run the check.

# %% [markdown]
# ## 1. The promise
#
# A language model writes one token at a time, and every token costs a full pass through the model. Speculative decoding
# lets something cheap (the *draft*) guess a few tokens ahead. The large model (the *target*) then looks at all the
# guesses in a single pass, keeps the good ones and repairs the first bad one.
#
# The promise is strong: the text has **exactly** the distribution it would have had without the draft. Not "nearly as
# good". If the draft is poor you lose time, never quality.
#
# Always taking the likeliest token makes that easy to believe: keep the guesses that agree. With sampling there is no
# single right token to agree with, so we need a rule about *probabilities*. That rule is this lesson.

# %% [markdown]
# ## 2. A law and a coin
#
# A *law* is a list of probabilities that sum to one. Throughout the project `p` is the target's law and `q` is the
# draft's. Here are both, for the next word after "I would like some".

# %%
import torch

words = ["tea", "coffee", "water"]
p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)


def show(title, law):
    print(title)
    for word, mass in zip(words, law.tolist(), strict=True):
        print(f"  {word:<7}{mass:.3f}  {'#' * round(40 * mass)}")


show("p, what the target wants", p)
show("q, what the draft guesses", q)

# %% [markdown]
# To draw a word we need one random number `u` in [0, 1), which we call a *coin*. Lay the words end to end on a line
# from 0 to 1, each as wide as its probability, and take the word under `u`. In the code that is `pick(law, u)`.
#
# **Predict:** which words do the coins 0.49, 0.50, 0.79 and 0.80 draw from `p`?

# %%
from specdecode_ref.sampling import pick

for u in (0.49, 0.50, 0.79, 0.80):
    print(f"u = {u:.2f} draws {words[pick(p, u)]}")

# %% [markdown]
# ## 3. Guess, then test
#
# The draft draws `x` from `q`. If we kept every guess, our words would follow `q`, which is the wrong law: coffee would
# come too often and tea too rarely.
#
# So we keep `x` only with probability `min(1, p(x) / q(x))`. A word that the draft likes *less* than the target does is
# always kept. A word that the draft likes *too much* is kept just often enough to undo that.
#
# **Predict:** which of the three words can be rejected, and how often is it kept?

# %%
for x, word in enumerate(words):
    print(f"{word:<7} is kept with probability {min(1.0, float(p[x] / q[x])):.3f}")

# %% [markdown]
# The code throws a second coin and accepts when `u * q(x) < p(x)`. On paper that is `u < p(x) / q(x)`. Without the
# division it is right at the edges too:
#
# - a word with `p(x) = 0` is never accepted, because `u * q(x)` is never below zero;
# - where `p(x) = q(x)` the word is always accepted, because `u` is below 1.
#
# With `<=` in place of `<`, the coin `u = 0` would let an impossible word through.

# %%
for u, p_x, q_x in ((0.0, 0.0, 0.5), (0.999999, 0.3, 0.3)):
    print(f"p = {p_x}, q = {q_x}, u = {u}:  < says {u * q_x < p_x},  <= says {u * q_x <= p_x}")

# %% [markdown]
# ### How often is a guess kept?
#
# Word `x` is guessed with probability `q(x)` and then kept with `min(1, p(x) / q(x))`. Multiply: `min(p(x), q(x))`. Add
# up over all words and you have the acceptance rate, called `alpha`:
#
#     alpha = sum over x of min(p(x), q(x))
#
# The *total variation distance*, TV, is half of the summed differences: the largest disagreement between two laws
# about the probability of any event. The two numbers add up to one, so the guesses are kept as often as the laws
# overlap.

# %%
alpha = float(torch.minimum(p, q).sum())


def tv(a, b):
    return float((a - b).abs().sum()) / 2


print(f"alpha = {alpha:.3f}   TV(p, q) = {tv(p, q):.3f}   alpha + TV = {alpha + tv(p, q):.3f}")

# %% [markdown]
# ## 4. Repair what was rejected
#
# A rejected guess leaves an empty place, and something must be emitted there. What?
#
# Accepted guesses already bring `min(p, q)` of each word. The target wants `p` of it. What is missing is
# `p - min(p, q)`, which is the same as `max(p - q, 0)`. Scaled up to sum to one, it is called the *residual*, and a
# rejection emits from it.
#
# **Predict:** the residual of our `p` and `q`. How many words does it hold?

# %%
from specdecode_ref.sampling import residual

show("already there: min(p, q)", torch.minimum(p, q))
show("still missing: max(p - q, 0)", (p - q).clamp(min=0))
show("the residual", residual(p, q))

# %% [markdown]
# ## 5. The proof, by counting
#
# A rejection happens with probability `1 - alpha`, and the missing mass is just as large, since `min(p, q)` sums to
# `alpha` and `p` sums to one. So the scaling cancels, and nothing is left over:
#
#     emitted = min(p, q)  +  (1 - alpha) * residual
#             = min(p, q)  +  max(p - q, 0)
#             = p
#
# `q` has disappeared. A bad draft makes `alpha` small, and that is all it can do. Here are the numbers.

# %%
emitted = torch.minimum(p, q) + (1 - alpha) * residual(p, q)
show("emitted", emitted)
print("distance from p:", tv(emitted, p))

# %% [markdown]
# (A distance around 1e-16 is rounding: the computer's own last digit.)
#
# That was a proof of the *formula*. It says nothing about a program. So let us ask the real verifier of this project,
# `verify/chain.py`, which is the one that lesson 2 runs. It is a pure function of a draft, the laws and the coins.

# %%
from specdecode_ref.tree import DraftTree
from specdecode_ref.verify import chain


def by(rule):
    """One guess x, judged by `rule`: the word it emits. u is the coin of the test, v the coin of the repair."""

    def first_word(x, p, q, u, v):
        draft = DraftTree.chain(root=0, tokens=(x,), q=(q,))
        verdict = rule(draft, [p, p], [0.0, u], [v, v])
        return x if verdict.accepted else verdict.token

    return first_word


coffee = words.index("coffee")
for u in (0.55, 0.65):
    print(f"guess coffee, u = {u}: emits {words[by(chain.verify)(coffee, p, q, u, 0.5)]}")

# %% [markdown]
# A coin can take endlessly many values, but the answer only changes at a few of them: at `p(x) / q(x)`, and where one
# word of a law ends and the next begins. Between two such places the answer stays the same. So we test each interval
# once, in the middle, and weigh the answer by the interval's length. No randomness, no "approximately".

# %%
from itertools import pairwise


def intervals(edges):
    """The pieces that the edges cut [0, 1] into, as (middle, length)."""
    inside = sorted({0.0, 1.0, *(edge for edge in edges if 0 < edge < 1)})
    return [((a + b) / 2, b - a) for a, b in pairwise(inside)]


def exact_law(first_word, p, q):
    """The law of the emitted word, summed over every guess and every interval of both coins."""
    law = torch.zeros_like(p)
    for x in range(len(p)):
        edges = [float(p[x] / q[x]), float(q[x] / p[x])]  # the second one matters to a bug in section 7
        edges += [*p.cumsum(0).tolist(), *residual(p, q).cumsum(0).tolist()]
        for u, du in intervals(edges):
            for v, dv in intervals(edges):
                law[first_word(x, p, q, u, v)] += q[x] * du * dv
    return law


show("the real verifier emits", exact_law(by(chain.verify), p, q))
print("distance from p:", tv(exact_law(by(chain.verify), p, q), p))

# %% [markdown]
# ### Exercise 1: write the rule yourself
#
# Fill in `my_first_word`. It gets a guess `x` (an index), the laws `p` and `q`, the coin `u` for the test and the coin
# `v` for the repair, and returns the index of the word to emit. `pick` and `residual` may help. At the moment it keeps
# every guess. The check puts it through the same count as the real verifier.


# %% tags=["exercise"]
def my_first_word(x, p, q, u, v):
    return x


# %% tags=["solution"]
def my_first_word(x, p, q, u, v):
    if u * q[x] < p[x]:
        return x
    return pick(residual(p, q), v)


# %% tags=["check"]
other_p = torch.tensor([0.1, 0.3, 0.6], dtype=torch.float64)
for a, b in ((p, q), (q, p), (other_p, q)):
    mine = exact_law(my_first_word, a, b)
    assert tv(mine, a) < 1e-12, f"the target law is {a.tolist()}, but my_first_word emits {mine.tolist()}"
print("exercise 1: my_first_word emits the target's law exactly")

# %% [markdown]
# ## 6. Watch it converge
#
# Counting is exact. It is still good to see words fall. We draw guesses from `q`, judge them with the real verifier and
# keep what comes out. The coins come from `Coins`, which section 9 explains.

# %%
from specdecode_ref.coins import Coins


def sample(rule, p, q, n):
    """n words, each one drafted from q and judged by `rule`."""
    out = []
    for sequence in range(n):
        coins = Coins(seed=0, sequence=sequence)
        x = pick(q, coins.draft(base=1, node=1))
        _, u = coins.accept(base=1, nodes=2)
        out.append(by(rule)(x, p, q, u, coins.emit(position=1)))
    return torch.tensor(out)


def distance_in_batches(sample, size):
    """How far the shares of words in a batch of this size are from p, on average over the batches."""
    shares = [torch.bincount(batch, minlength=3) / size for batch in sample.split(size)]
    return sum(tv(share, p) for share in shares) / len(shares)


right = sample(chain.verify, p, q, 3200)

# %% [markdown]
# **Predict:** with four times as many words, how much closer to `p` do we get?

# %%
for size in (25, 100, 400, 1600):
    print(f"{size:>4} words: distance {distance_in_batches(right, size):.4f} from p")

# %% [markdown]
# Roughly half as far each time: the distance of a correct program falls like one over the square root of the number of
# words. It never reaches zero, which is why sampling alone is a weak test. A small bug hides in this noise until the
# sample is large.

# %% [markdown]
# ## 7. Four classic bugs
#
# Each of these looks harmless, and most have been found in published code. We make them by changing one line in a
# private copy of the real verifier; the project itself has no switch for being wrong.

# %%
import inspect
import types


def changed(old, new):
    """The real rule with one piece of its source replaced."""
    source = inspect.getsource(chain)
    assert source.count(old) == 1, f"the source no longer holds this once: {old}"
    module = types.ModuleType("changed_chain")
    exec(source.replace(old, new), module.__dict__)
    return module.verify


repair = "law = residual(p[node], q)"
bugs = {
    "residual = p": changed(repair, "law = p[node]"),
    "argmax on rejection": changed(repair, "law = point_mass(int(p[node].argmax()), q)"),
    "test upside down": changed("u * q_x < p_x", "u * p_x < q_x"),
    "accept coin used twice": changed('pick(law, emit_coins[len(path) - 1]), "residual"', 'pick(law, u), "residual"'),
}

# %% [markdown]
# - **residual = p**: "it was rejected, so just sample from the target". But accepted guesses have already brought part
#   of `p`, and now they are counted twice.
# - **argmax on rejection**: emit the target's favourite.
# - **test upside down**: `q / p` where `p / q` belongs. Some well-known programs use the two letters the other way
#   round, so copying one line from them is enough.
# - **accept coin used twice**: the coin that rejected the guess also draws the repair. After a rejection we know that
#   this coin is large, so it is no longer a fair one.
#
# **Predict:** order them by how far they will be from `p`, worst first.


# %%
def report(p, q):
    for name, rule in {"correct": chain.verify, **bugs}.items():
        law = exact_law(by(rule), p, q)
        numbers = ", ".join(f"{mass:.3f}" for mass in law.tolist())
        print(f"{name:<23} emits ({numbers})   TV {tv(law, p):.3f}")


report(p, q)

# %% [markdown]
# Look at the first bug. Fifteen words in a hundred are wrong, yet every word still comes, in believable amounts. Nobody
# would notice by reading the text. **Predict:** what happens to the distance when the batches grow?

# %%
wrong = sample(bugs["residual = p"], p, q, 3200)
for size in (25, 100, 400, 1600):
    print(f"{size:>4} words: distance {distance_in_batches(wrong, size):.4f} from p")

# %% [markdown]
# It settles at the distance that we counted. More words do not help: they only make the error certain.
#
# Now look at the two bugs with TV 0. They are wrong, but *this pair of laws cannot show it*. The residual holds only
# tea, so a correct repair emits tea whatever its coin says, and tea happens to be the target's favourite too. A test
# suite with only this pair would call both programs correct.
#
# ### Exercise 2: find a pair that shows the bug
#
# Choose `my_p` and `my_q`, three probabilities each, so that "argmax on rejection" is off by at least 0.1. Think about
# what the residual must look like first.

# %% tags=["exercise"]
my_p = [0.5, 0.3, 0.2]
my_q = [0.2, 0.5, 0.3]

# %% tags=["solution"]
# The residual must hold two words: the draft wants far too much of the third, and too little of both others.
my_p = [0.4, 0.35, 0.25]
my_q = [0.1, 0.2, 0.7]

# %% tags=["check"]
my_p, my_q = (torch.as_tensor(law, dtype=torch.float64) for law in (my_p, my_q))
for name, law in (("my_p", my_p), ("my_q", my_q)):
    assert law.shape == (3,) and bool((law > 0).all()), f"{name} needs three probabilities above 0"
    assert abs(float(law.sum()) - 1) < 1e-9, f"{name} must sum to 1, but sums to {float(law.sum()):.3f}"
distance = tv(exact_law(by(bugs["argmax on rejection"]), my_p, my_q), my_p)
assert distance >= 0.1, f"on your pair the bug is off by only {distance:.3f}: what does the residual hold?"
print(f"exercise 2: on this pair the argmax bug is off by {distance:.3f}")

# %% [markdown]
# Here is your pair under all the bugs. A test that has never failed proves little. So the project's own tests plant
# bugs like these, and require that each of them is caught.

# %%
report(my_p, my_q)

# %% [markdown]
# ## 8. A chain of guesses
#
# With one guess, a pass of the target yields two words at best. So the draft guesses `gamma` words, each on top of the
# one before, and the target's single pass gives a law `p` after every one of them. All of this, up to the verdict, is a
# *round*. The tests run from left to right:
#
# - the first rejection emits from the residual, and the round ends, since all later guesses stood on a wrong word;
# - if all are accepted, the pass has already paid for one more law, and the round ends with a free word from it: the
#   *bonus*.
#
# Either way a round with `k` accepted guesses emits `k + 1` words. So the worst round emits one, like plain decoding.
#
# The mean number of words per round is called `tau`. Suppose that each test passes with the same probability `alpha`,
# whatever happened before. A round emits more than `k` words exactly when its first `k` guesses pass, which has
# probability `alpha ** k`.
# Adding up over `k = 0, 1, ..., gamma` gives
#
#     tau = 1 + alpha + alpha**2 + ... + alpha**gamma = (1 - alpha**(gamma + 1)) / (1 - alpha)
#
# **Predict:** our `alpha` is 0.7. What does `tau` become when `gamma` grows without end?


# %%
def tau_formula(alpha, gamma):
    return (1 - alpha ** (gamma + 1)) / (1 - alpha)


for gamma in (1, 2, 4, 8, 16):
    print(f"gamma = {gamma:>2}   tau = {tau_formula(alpha, gamma):.3f}")
print(f"limit: 1 / (1 - alpha) = {1 / (1 - alpha):.3f}")

# %% [markdown]
# Every further guess is less likely to survive than the one before, but costs the same. So real drafts are short.
#
# Does the real loop agree? A `TableModel` is a language model whose logits we write down ourselves. These two say `p`
# and `q` after every word. `speculative` is the same function that runs a real model in lesson 2.

# %%
from specdecode_ref.decode import speculative
from specdecode_ref.drafters.model import ModelDrafter
from specdecode_ref.models.table import TableModel


def always(law):
    """A model that says the same law after each of the three words, and at the beginning."""
    return TableModel(law.log().expand(4, 3))


gamma = 4
drafter = ModelDrafter(always(q), shape=(1,) * gamma)
run = speculative(always(p), drafter, prompt=[0], max_new_tokens=1000, seed=3)
lengths = torch.tensor([float(r.kept) for r in run.trace.rounds])
error = float(lengths.std()) / len(lengths) ** 0.5
print(f"measured tau {float(lengths.mean()):.2f}, standard error {error:.2f}; formula {tau_formula(alpha, gamma):.2f}")
show("what it wrote", torch.bincount(torch.tensor(run.tokens), minlength=3) / len(run.tokens))

# %% [markdown]
# ### When the formula is only an approximation
#
# It assumed that every test passes with the same probability. Real text has easy stretches (the rest of a name, a
# closing bracket) and hard ones. Suppose half of all rounds are easy, with `alpha` 0.95, and half are hard, with 0.45.
# The mean `alpha` is 0.7, as before.
#
# **Predict:** is the mean `tau` of these rounds below, at or above the formula's value for 0.7?

# %%
easy, hard = 0.95, 0.45
true_tau = (tau_formula(easy, gamma) + tau_formula(hard, gamma)) / 2
print(f"mean tau of easy and hard rounds   {true_tau:.3f}")
print(f"formula at the mean alpha          {tau_formula((easy + hard) / 2, gamma):.3f}")

# Another common reading of alpha: the share of all tests that passed. Easy rounds run more tests, so they weigh more.
passed = (tau_formula(easy, gamma) + tau_formula(hard, gamma)) / 2 - 1
tested = (tau_formula(easy, gamma - 1) + tau_formula(hard, gamma - 1)) / 2
pooled = passed / tested
print(f"formula at the share of passed tests, {pooled:.3f}: {tau_formula(pooled, gamma):.3f}")

# %% [markdown]
# Here one reading of `alpha` says too little and the other too much. Acceptance can also fade along a draft, when each
# guess stands on less certain ground than the one before. So: plan with the formula, but measure `tau`.
#
# One more trap. Engines log an "acceptance rate": accepted over *drafted* tokens. That counts guesses which were never
# tested, because an earlier one fell. It is not `alpha`. The project's `Metrics` knows both:

# %%
from specdecode_ref.metrics import Metrics

measured = Metrics.of(run.trace)
print(f"accepted / drafted: {measured.acceptance_rate:.3f}")
print("accepted / tested, by position:", [round(rate, 3) for rate in measured.conditional_rates])
print(f"alpha: {alpha:.3f}")

# %% [markdown]
# ### Exercise 3: tau when every position differs
#
# Write `my_tau(alphas)`. `alphas[i]` is the probability that guess `i + 1` passes, given that all before it did. Return
# the mean number of words that a round emits. Now it only counts the word that every round emits.


# %% tags=["exercise"]
def my_tau(alphas):
    return 1.0


# %% tags=["solution"]
def my_tau(alphas):
    total, reached = 1.0, 1.0
    for a in alphas:
        reached *= a
        total += reached
    return total


# %% tags=["check"]
for alphas, expected in (
    ([], 1.0),
    ([0.0, 0.9], 1.0),
    ([1.0, 1.0, 1.0], 4.0),
    ([0.9, 0.5], 1 + 0.9 + 0.9 * 0.5),
    ([alpha] * gamma, tau_formula(alpha, gamma)),
):
    got = my_tau(alphas)
    assert abs(got - expected) < 1e-12, f"for {alphas} the mean is {expected:.3f}, but my_tau returns {got}"
print("exercise 3: my_tau is right, and the formula is its special case")

# %% [markdown]
# ## 9. Where the coins come from
#
# Most programs keep one random generator and ask it for the next number. Then every number depends on how many were
# asked for before, and one more draft token changes all that follows. A run is hard to repeat.
#
# Here a coin is a pure function of what it is *for*: the seed, the sequence, the place, and its purpose (to draw a
# draft, to accept it, or to emit). Same key, same coin, in any order, in any batch.

# %%
coins = Coins(seed=0)
print("asked now:  ", coins.accept(base=10, nodes=3)[1:])
_ = coins.emit(position=99)
print("asked again:", coins.accept(base=10, nodes=3)[1:])
print("next round: ", coins.accept(base=12, nodes=3)[1:])

# %% [markdown]
# So a whole run can be replayed from its seed. It also allows another lossless rule, called *match*. It draws the
# target's word as plain decoding would, with the same coin, and then looks whether the draft had guessed it. Its output
# is not just equally distributed. It is the same text, word for word.
#
# **Predict:** match keeps a guess only if the target's own draw hits it. Is its `tau` higher or lower than before?

# %%
from specdecode_ref.decode import autoregressive

plain = autoregressive(always(p), prompt=[0], max_new_tokens=400, seed=3)
matched = speculative(always(p), drafter, prompt=[0], max_new_tokens=400, seed=3, verifier="match")
print("match, same text as plain decoding:    ", matched.tokens == plain.tokens)
print("rejection, same text as plain decoding:", run.tokens[:400] == plain.tokens)
print(f"match:     tau {Metrics.of(matched.trace).tau:.2f}   formula {tau_formula(float((p * q).sum()), gamma):.2f}")
print(f"rejection: tau {Metrics.of(run.trace).tau:.2f}   formula {tau_formula(alpha, gamma):.2f}")

# %% [markdown]
# The draft and the target throw separate coins, so match keeps a guess with probability `sum p(x) * q(x)` only.
# Rejection sampling keeps more, because it only has to get the *law* right, not the very same word. No lossless rule
# keeps a single guess more often: two draws, one from `q` and one from `p`, agree with probability `1 - TV(p, q)` at
# most.
#
# ### A coin must be fine enough
#
# Our coins have 53 bits, and laws are summed in 64-bit floats. Much fast code uses 32-bit floats for both. Its coins
# then have 24 bits: 16.8 million different values. That sounds like plenty, until one of them must choose among 131,072
# tokens. The next cell works out the law that such coins really draw, for a rather flat law and for a peaked one.

# %%
tokens, grid = 131_072, 2**24
for name, scale in (("flat", 1.0), ("peaked", 4.0)):
    noise = torch.randn(tokens, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wanted = (scale * noise).softmax(0)
    line = wanted.float().cumsum(0)
    ends = ((line / line[-1]).double() * grid).ceil()
    drawn = ends.diff(prepend=ends.new_zeros(1)) / grid
    unreachable = float((drawn <= 0).double().mean())
    print(f"{name:<7} TV {tv(drawn, wanted):.5f}   tokens that no coin can draw: {unreachable:.1%}")

# %% [markdown]
# A thousandth is little, but it is there in every run, whatever the seed, and the peaked law shows what hides behind
# it: most of its vocabulary can never be written at all. The cure is finer coins, or to choose in steps: first a block
# of the vocabulary, then a token inside it.

# %% [markdown]
# ## What you have seen
#
# - Test with `u * q(x) < p(x)`; repair from `norm(max(p - q, 0))`. The result is `p`, whatever `q` is.
# - A guess is kept with probability `alpha = sum min(p, q) = 1 - TV(p, q)`.
# - Small mistakes give plausible text with the wrong law. Exact counting finds them; reading does not; and one lucky
#   pair of laws can hide them.
# - A round emits its accepted guesses plus one. `tau` is the number to measure.
#
# To read next: `specdecode_ref/verify/chain.py`, the whole rule in about 25 lines. Then lesson 2, where a real model
# does all of this. The rule is due to Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318).
