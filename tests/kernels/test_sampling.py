"""Kernels that sample: the same coins, the same tokens as the reference, and the exact law they draw from."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from specdecode_kernels import cuts as cuts_file
from specdecode_kernels import sampling
from specdecode_kernels import top_k as top_k_file
from specdecode_kernels.sampling import BAND, Cuts, law, pick, top_k
from torch import Tensor

from specdecode_ref.batched import sampling as reference
from specdecode_ref.batched.records import Rules
from specdecode_ref.errors import InputError, NotApplicableError
from specdecode_ref.fidelity import statistics
from specdecode_ref.sampling import Order, SamplingRule, scores

ALMOST_ONE = 1 - 2.0**-53
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ORDERS: tuple[Order, ...] = ("transformers", "vllm")
NEAR = 1e-5
"""How near the mass up to a token must be to top_p for the kept sets to differ there."""


pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture(autouse=True)
def one_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a test the thresholds of the same logits and rules are looked for once: interpreted, that takes long."""
    found: dict[tuple[int, int], tuple[Tensor, Rules, Cuts]] = {}

    def remembered(logits: Tensor, rules: Rules) -> Cuts:
        key = logits.data_ptr(), id(rules)
        if key not in found:
            found[key] = logits, rules, cuts_file.cuts(logits, rules)  # kept, so that no other gets their addresses
        return found[key][2]

    monkeypatch.setattr(sampling, "cuts", remembered)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 64 tokens, so that few tokens are many blocks."""
    monkeypatch.setattr(cuts_file, "BLOCK", 64)


def random_logits(rows: int, size: int, dtype: torch.dtype, seed: int = 0, scale: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, size, generator=generator) * scale).to(dtype)


def random_coins(rows: int, seed: int = 1) -> Tensor:
    """Random, but the first is the smallest and the last the largest."""
    coins = torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    coins[0], coins[-1] = 0.0, ALMOST_ONE
    return coins


def mixed(order: Order, temperatures: tuple[float, ...] = (0.0, 0.7, 1.3)) -> list[SamplingRule]:
    """Every rule alone, two together, all together and none, and greedy rows between them."""
    settings = [(0, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.05), (7, 0.8, 0.0), (40, 0.8, 0.2)]
    hot = [t for t in temperatures if t]
    rules = [SamplingRule(hot[i % len(hot)], k, p, m, order=order) for i, (k, p, m) in enumerate(settings)]
    return rules + [SamplingRule(t, 3, 0.5, 0.1, order=order) for t in temperatures if t == 0]


def kept(logits: Tensor, found: Cuts) -> Tensor:
    """bool [R, V]: what a threshold leaves, said once more in PyTorch."""
    x, floor = logits.float(), found.floor[:, None]
    return (x > floor) | ((x == floor) & (torch.arange(x.shape[1]) < found.ties[:, None]))


def kept_by_reference(logits: Tensor, rules: list[SamplingRule]) -> Tensor:
    return torch.stack([scores(row, rule, (), 0).isfinite() for row, rule in zip(logits, rules, strict=True)])


def cells(laws: Tensor) -> Tensor:
    """Edges float64 [R, V + 1] of the tokens' cells in the coin."""
    edges = laws.double().cumsum(-1)
    return torch.cat([torch.zeros(len(laws), 1, dtype=torch.float64), edges / edges[:, -1:]], 1)


def assert_same_picks(tokens: Tensor, laws: Tensor, coins: Tensor) -> None:
    """Each coin lies in the cell of the token it gave, or within BAND of it, and the token has mass."""
    edges, at = cells(laws), tokens[:, None]
    assert ((tokens >= 0) & (tokens < laws.shape[1])).all()
    assert (laws.gather(1, at) > 0).all()
    assert (coins >= edges.gather(1, at)[:, 0] - BAND).all()
    assert (coins < edges.gather(1, at + 1)[:, 0] + BAND).all()


def variation(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().sum(-1).max() / 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 63, 127, 1000])
def test_laws_and_picks_are_the_references(size: int, dtype: torch.dtype) -> None:
    """Temperatures only: no threshold is looked for."""
    temperatures = [0.0, 1.0, 0.3, 2.5, 0.0, 1e-3, 1e-300, 1e4, 0.8]
    rules = Rules.of([SamplingRule(t) for t in temperatures])
    assert rules.plain
    logits, coins = random_logits(len(rules), size, dtype), random_coins(len(rules))
    want = reference.law(logits, rules)
    got = law(logits, rules)
    assert got.dtype == torch.float32
    assert variation(got, want) < 2e-6
    tokens = pick(logits, rules, coins)
    assert_same_picks(tokens, want, coins)
    assert torch.equal(tokens, reference.pick(logits, rules, coins)), "no coin of this seed is near an edge"


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("size", "dtype"), [(1, DTYPES[0]), (63, DTYPES[1]), (127, DTYPES[0]), (1000, DTYPES[2])])
def test_rules_of_every_kind_in_one_batch(size: int, dtype: torch.dtype, order: Order) -> None:
    rules = mixed(order)
    logits, coins = random_logits(len(rules), size, dtype, seed=2), random_coins(len(rules))
    batch = Rules.of(rules)
    want = reference.law(logits, batch)
    assert torch.equal(kept(logits, sampling.cuts(logits, batch)), kept_by_reference(logits, rules))
    assert variation(law(logits, batch), want) < 2e-6
    assert_same_picks(pick(logits, batch, coins), want, coins)


@pytest.mark.parametrize("off", [-1, 0, 1])
@pytest.mark.parametrize("count", [1, 3])
def test_the_last_block_may_be_short(count: int, off: int, small_blocks: None) -> None:
    rules = Rules.of([*mixed("transformers"), SamplingRule(1.0)])
    logits = random_logits(len(rules), 64 * count + off, torch.bfloat16, seed=3)
    coins = random_coins(len(rules), seed=4)
    want = reference.law(logits, rules)
    assert variation(law(logits, rules), want) < 2e-6
    assert_same_picks(pick(logits, rules, coins), want, coins)
    assert torch.equal(top_k(logits, 9).tokens, reference.top_k(logits, 9).tokens)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_wide_vocabulary_of_odd_size(dtype: torch.dtype) -> None:
    rules = Rules.of([SamplingRule(0.7), SamplingRule(0), SamplingRule(1.0)])
    logits, coins = random_logits(3, 32001, dtype, seed=5), torch.tensor([0.3, 0.6, 0.999], dtype=torch.float64)
    want = reference.law(logits, rules)
    assert variation(law(logits, rules), want) < 2e-6
    assert_same_picks(pick(logits, rules, coins), want, coins)
    ruled = [SamplingRule(1.0, top_k=50, top_p=0.9)]
    assert torch.equal(
        kept(logits[:1], sampling.cuts(logits[:1], Rules.of(ruled))), kept_by_reference(logits[:1], ruled)
    )


@pytest.mark.parametrize("plain", [True, False])
def test_a_row_without_a_law_is_said_to_have_none(plain: bool, small_blocks: None) -> None:
    """And leaves its neighbours alone. -inf in a row is a token that never comes."""
    bad = random_logits(8, 130, torch.float32)
    bad[0, 0] = bad[1, 129] = bad[2, 70] = math.nan
    bad[3, 65] = math.inf
    bad[4] = -math.inf
    bad[5] = math.nan
    bad[6, ::2] = -math.inf
    bad[7, 1:] = -math.inf
    logits = bad.repeat(2, 1)
    greedy = SamplingRule(0) if plain else SamplingRule(0, top_k=3)
    drawn = SamplingRule(0.9) if plain else SamplingRule(0.9, top_k=30, top_p=0.95, min_p=0.001)
    rules = Rules.of([greedy] * 8 + [drawn] * 8)
    assert rules.plain == plain
    coins = random_coins(16)
    tokens, laws = pick(logits, rules, coins), law(logits, rules)
    without = torch.tensor([True] * 6 + [False] * 2).repeat(2)
    assert torch.equal(tokens == -1, without)
    assert torch.equal(laws.isnan().all(1), without)
    want = reference.law(logits, rules)[~without]
    assert variation(laws[~without], want) < 2e-6
    assert_same_picks(tokens[~without], want, coins[~without])
    best, same = top_k(logits, 5), reference.top_k(logits, 5)
    assert torch.equal(best.tokens, same.tokens)
    torch.testing.assert_close(best.logs.double(), same.logs, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize(("order", "dtype"), [("transformers", DTYPES[2]), ("vllm", DTYPES[1])])
def test_ties_stay_as_the_rules_say(order: Order, dtype: torch.dtype, small_blocks: None) -> None:
    """Top-k keeps what ties with the k-th; top-p keeps the first of those that tie at its edge."""
    few = torch.randint(-2, 3, (8, 200), generator=torch.Generator().manual_seed(7)).float()
    few[1] = 0.0
    few[2, ::2] = -0.0
    few[3, :150] = -math.inf
    rules = [SamplingRule(1.0, k, p, m, order=order) for k, p, m in
             [(7, 1.0, 0.0), (9, 0.313, 0.0), (0, 0.513, 0.0), (0, 0.9, 0.03), (60, 0.77, 0.0), (0, 1e-6, 0.0),
              (1, 1.0, 0.0), (0, 1.0, 1.0)]]  # fmt: skip
    logits, batch = few.to(dtype), Rules.of(rules)
    want = kept_by_reference(logits, rules)
    assert torch.equal(kept(logits, sampling.cuts(logits, batch)), want)
    assert torch.equal(law(logits, batch) > 0, want)


def test_greedy_rows_take_the_first_of_equal_maxima(small_blocks: None) -> None:
    """Within a block and across blocks."""
    logits = torch.zeros(3, 200)
    logits[0, [70, 71, 150]] = logits[1, [3, 199]] = 1.0
    rules = Rules.of([SamplingRule(0)] * 3)
    assert pick(logits, rules, random_coins(3)).tolist() == [70, 3, 0]
    assert torch.equal(law(logits, rules).double(), reference.law(logits, rules))


def test_where_masses_are_exact_so_is_the_pick(small_blocks: None) -> None:
    """256 equal tokens: a coin on an edge gives the token behind it, the coin before it the token before."""
    edges = torch.arange(1, 256, dtype=torch.float64) / 256
    coins = torch.cat([edges, edges - 2.0**-53])
    tokens = pick(torch.zeros(1, 256).expand(510, -1), Rules.of([SamplingRule(1.0)] * 510), coins)
    assert tokens.tolist() == [*range(1, 256), *range(255)]


def test_what_is_cut_is_what_lies_near_the_edge_at_most(small_blocks: None) -> None:
    """Masses are float32: where the mass up to a token is as good as top_p, either side of it may be taken."""
    logits = random_logits(1, 150, torch.float16, seed=8)
    p, order = logits[0].double().softmax(-1).sort(descending=True, stable=True)
    reached = p.cumsum(-1)
    moves = (-2 * NEAR, -1e-8, 0.0, 1e-8, 2 * NEAR)
    rules = [SamplingRule(top_p=float(reached[at]) + by) for at, by in product((2, 20), moves)]
    rows = logits.expand(len(rules), -1)
    got, want = kept(rows, sampling.cuts(rows, Rules.of(rules))), kept_by_reference(rows, rules)
    for rule, ours, theirs in zip(rules, got, want, strict=True):
        excused = order[(reached - rule.top_p).abs() < NEAR] if not torch.equal(ours, theirs) else []
        differ = (ours != theirs).nonzero()[:, 0]
        # The token after an edge is the one that float32 may need, or not.
        following = {int(order[int((order == token).nonzero()) + 1]) for token in excused}
        assert set(differ.tolist()) <= following
    exact = torch.tensor([abs(by) >= 2 * NEAR for _, by in product((2, 20), moves)])
    assert torch.equal(got[exact], want[exact])


def test_a_cut_is_a_logit_of_the_row() -> None:
    """The floor is the smallest logit that is kept, and what has no rule keeps all."""
    rules = [SamplingRule(0.8, top_k=4), SamplingRule(0.8, top_p=0.7), SamplingRule(0, top_k=4), SamplingRule(0.8)]
    logits = random_logits(4, 90, torch.float16, seed=9)
    found = sampling.cuts(logits, Rules.of(rules))
    left = logits.float().masked_fill(~kept_by_reference(logits, rules), math.inf).amin(1)
    assert torch.equal(found.floor[:2], left[:2])
    assert found.floor[2:].tolist() == [-math.inf] * 2
    assert found.ties[2:].tolist() == [90, 90]
    plain = sampling.cuts(logits, Rules.of([SamplingRule(0.8)] * 4))
    assert plain.floor.tolist() == [-math.inf] * 4
    assert plain.ties.tolist() == [90] * 4


def own_edges(logits: Tensor, rules: list[SamplingRule], near: Tensor) -> Tensor:
    """Where the kernel's own cells end, [R, V]: the smallest coin that gives a later token, by bisection.

    near: [R, V], within 1e-4 of them, or what comes out is as far away as that from where they are.
    """
    count, size = logits.shape
    tokens, rows = torch.arange(size).repeat(count), logits.repeat_interleave(size, 0)
    batch = Rules.of([rule for rule in rules for _ in range(size)])
    low, high = (near.flatten() - 1e-4).clamp(0), (near.flatten() + 1e-4).clamp(max=1)
    for _ in range(16):
        middle = (low + high) / 2
        later = pick(rows, batch, middle) > tokens
        low, high = torch.where(later, low, middle), torch.where(later, middle, high)
    return high.view(count, size)


def test_the_exact_law_of_the_sampler(small_blocks: None) -> None:
    """A sampler is a step function of its coin; the widths of its steps are the law, and no sample is needed.

    Three laws of 190 tokens, a usual one, a peaked one and a flat one.
    """
    rules = [SamplingRule(0.7), SamplingRule(1.0), SamplingRule(1.5)]
    scales = torch.tensor([[3.0], [8.0], [0.1]])
    logits = random_logits(3, 190, torch.float32, seed=10, scale=1.0) * scales
    want = reference.law(logits, Rules.of(rules))
    edges = own_edges(logits, rules, cells(want)[:, 1:])
    own = edges.diff(prepend=torch.zeros(3, 1, dtype=torch.float64))
    assert (own >= -(2.0**-27)).all(), "tokens come in order"
    assert variation(own, want) <= 5e-6


@pytest.mark.parametrize("size", [32001, 128256])
def test_edges_of_a_wide_vocabulary_are_within_the_band(size: int) -> None:
    """A flat float32 sum would miss them by 1e-3."""
    logits = random_logits(1, size, torch.bfloat16, seed=11, scale=1.0)
    edges = cells(reference.law(logits, Rules.of([SamplingRule(0.9)])))[0]
    at = torch.randint(1, size, (8,), generator=torch.Generator().manual_seed(12))
    coins = torch.cat([edges[at] - BAND, edges[at] + BAND])
    tokens = pick(logits.expand(16, -1), Rules.of([SamplingRule(0.9)] * 16), coins)
    assert (tokens[:8] < at).all()
    assert (tokens[8:] >= at).all()
    assert (edges[at + 1] - edges[at - 1] < 20 / size).all(), "cells are about as narrow as the band"


def test_coins_out_of_their_range_give_tokens(small_blocks: None) -> None:
    """The first or the last that has mass, and never one behind the vocabulary."""
    logits = torch.full((5, 150), -math.inf)
    logits[:, 3:140] = 0
    coins = torch.tensor([-1.0, 1.0, 7.0, math.inf, math.nan], dtype=torch.float64)
    tokens = pick(logits, Rules.of([SamplingRule(1.0)] * 5), coins)
    assert tokens.tolist() == [3, 139, 139, 139, 139]


@pytest.mark.parametrize(("size", "trials"), [(16, 2**14), (70, 2**12)])
def test_stratified_coins_give_exact_counts(size: int, trials: int, small_blocks: None) -> None:
    """M equally spaced coins hit each cell M p times, but for one at its two ends."""
    coins = (torch.arange(trials, dtype=torch.float64) + 0.5) / trials
    logits = random_logits(1, size, torch.float32, seed=13)
    rules = Rules.of([SamplingRule(0.8)] * trials)
    counts = pick(logits.expand(trials, -1), rules, coins).bincount(minlength=size)
    owed = trials * reference.law(logits, Rules.of([SamplingRule(0.8)]))[0]
    assert ((counts - owed).abs() <= 1 + trials * 2 * BAND).all()


def test_two_hundred_thousand_trials_of_a_narrow_vocabulary() -> None:
    """Agrawal's bound on the G statistic, with a false alarm rate of 1e-9."""
    trials = 200_000
    logits = random_logits(1, 16, torch.float32, seed=14, scale=1.5)
    owed = reference.law(logits, Rules.of([SamplingRule(0.8)]))[0]
    coins = torch.from_numpy(np.random.Generator(np.random.Philox(15)).random(trials))
    column = torch.full((trials,), 0.8, dtype=torch.float64)
    rules = Rules(column, torch.zeros(trials, dtype=torch.int64), torch.ones(trials), torch.zeros(trials), plain=True)
    counts = Counter(pick(logits.expand(trials, -1), rules, coins).tolist())
    gate = statistics.gate(counts, dict(enumerate(owed.tolist())))
    assert not gate.rejects, str(gate)


def test_a_program_takes_any_number_of_rows(small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU one row a program, in the interpreter many; the last tile may be short."""
    rules = Rules.of([SamplingRule(t, min_p=0.01) for t in (0.7, 0, 1.0, 1.3, 0.4)])
    logits, coins = random_logits(len(rules), 130, torch.float32, seed=16), random_coins(len(rules))
    tokens, laws = pick(logits, rules, coins), law(logits, rules)
    for tile in (64, 256):
        monkeypatch.setattr(sampling, "TILE_INTERPRETED", tile)
        assert torch.equal(pick(logits, rules, coins), tokens)
        assert torch.equal(law(logits, rules), laws)
    assert sampling.requests_of(1000, 4096, interpreted=False) == 1
    assert sampling.requests_of(1000, 64, interpreted=False) == 64


@pytest.mark.parametrize(
    ("size", "k", "dtype"),
    [(1, 64, DTYPES[0]), (63, 3, DTYPES[1]), (127, 64, DTYPES[2]), (200, 8, DTYPES[0]), (5, 64, DTYPES[1])],
    ids=str,
)
def test_the_likeliest_tokens(size: int, k: int, dtype: torch.dtype, small_blocks: None) -> None:
    logits = random_logits(3, size, dtype, seed=17)
    logits[1] = (logits[1] / 2).round()  # ties, and zeros of both signs
    logits[2, size // 2 :] = -math.inf
    if size == 1:
        logits[2] = 0.5
    got, want = top_k(logits, k), reference.top_k(logits, k)
    assert got.tokens.shape == (3, min(k, size))
    assert torch.equal(got.tokens, want.tokens)
    torch.testing.assert_close(got.logs.double(), want.logs, rtol=1e-6, atol=1e-6)


def test_rows_may_lie_anywhere(small_blocks: None) -> None:
    """Gaps between rows, one row many times, and a last dimension with gaps, which is copied."""
    rules, coins = Rules.of([SamplingRule(t) for t in (0, 0.7, 1.3)]), random_coins(3)
    ruled = Rules.of([SamplingRule(0.7, min_p=0.05)] * 3)
    wide = random_logits(3, 300, torch.float32, seed=18)
    tall = random_logits(150, 3, torch.float32, seed=19)
    for logits in (wide[:, 20:170], tall.T, wide[:1, :150].expand(3, -1)):
        packed = logits.contiguous()
        assert torch.equal(pick(logits, rules, coins), pick(packed, rules, coins))
        assert torch.equal(law(logits, ruled), law(packed, ruled))
        assert torch.equal(top_k(logits, 4).tokens, top_k(packed, 4).tokens)


def test_an_empty_batch_launches_nothing() -> None:
    none = torch.zeros(0, dtype=torch.float64)
    rules = Rules(none, none.long(), none, none)
    logits = torch.zeros(0, 40)
    assert law(logits, rules).shape == (0, 40)
    assert pick(logits, rules, none).shape == (0,)
    assert top_k(logits, 3).tokens.shape == (0, 3)


def test_what_kernels_do_not_take_is_refused() -> None:
    rules, coins = Rules.of([SamplingRule(1.0)] * 2), torch.zeros(2, dtype=torch.float64)
    logits = torch.zeros(2, 5)
    for other in (torch.float64, torch.int32):
        with pytest.raises(NotApplicableError, match="logits of dtype"):
            pick(logits.to(other), rules, coins)
        with pytest.raises(NotApplicableError, match="logits of dtype"):
            top_k(logits.to(other), 1)
    with pytest.raises(NotApplicableError, match="coins of dtype"):
        pick(logits, rules, coins.float())
    with pytest.raises(InputError, match="coins of shape"):
        pick(logits, rules, coins[:1])
    with pytest.raises(InputError, match="rules of shape"):
        law(logits[:1], rules)
    with pytest.raises(InputError, match=r"logits of shape \[any, any\]; got \[5\]"):
        law(logits[0], rules)
    with pytest.raises(InputError, match="at least one token"):
        law(logits[:, :0], rules)
    with pytest.raises(InputError, match="a k of 1 or more"):
        top_k(logits, 0)
    with pytest.raises(NotApplicableError, match="a k of at most 64"):
        top_k(logits, 65)


@pytest.mark.parametrize("plain", [True, False])
def test_bytes_are_what_the_shapes_say(
    plain: bool, small_blocks: None, traffic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one row a program, as on a GPU. A min-p is found in one pass; other searches read a row again, from L2."""
    monkeypatch.setattr(sampling, "TILE_INTERPRETED", 1)
    logits, coins = random_logits(2, 128, torch.bfloat16, seed=20), random_coins(2)
    rules = Rules.of([SamplingRule(1.0, min_p=0.0 if plain else 0.1)] * 2)
    if not plain:
        with traffic(logits=logits) as moved:
            sampling.cuts(logits, rules)
        assert moved.bytes == cuts_file.bytes_moved(2, 128, 2)
    for name, call in (("law", lambda: law(logits, rules)), ("pick", lambda: pick(logits, rules, coins))):
        with traffic(logits=logits) as moved:
            call()
        assert moved.bytes == sampling.bytes_moved(name, 2, 128, 2, plain=plain)
    with traffic(logits=logits) as moved:
        top_k(logits, 3)
    assert moved.loaded["logits"] == logits.nbytes, "one read of the vocabulary"
    assert moved.bytes == top_k_file.bytes_moved(2, 128, 2, k=3)


@pytest.mark.parametrize("full", [False, True])
def test_variants_name_every_argument(full: bool) -> None:
    found = [*sampling.variants(full), *top_k_file.variants(full), *cuts_file.variants(full)]
    assert len({variant.name for variant in found}) == len(found)
    for variant in found:
        assert set(variant.kernel.arg_names) == variant.types.keys() | variant.constants.keys()
