"""Before anything is timed: the kernels give on this card what the reference gives, on the same coins.

The reference runs in float64, on the host where it is written in Python. Whole decisions are compared; a token may
differ where its coin lies within rounding of an edge of the law. Then what runs eagerly is captured in a CUDA graph and
replayed a hundred times.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdecode_kernels import cache, coins, ngram, sampling, tree, tree_attention, verify
from specdecode_kernels.bench import attention, loop, peers
from specdecode_kernels.bench.stand import Case, Figures, Stand
from specdecode_kernels.bench.verify import WARM, Chains, Shape, chains
from specdecode_ref.batched import cache as cache_reference
from specdecode_ref.batched import coins as coins_reference
from specdecode_ref.batched import ngram as ngram_reference
from specdecode_ref.batched import sampling as sampling_reference
from specdecode_ref.batched import tree as tree_reference
from specdecode_ref.batched import tree_attention as attention_reference
from specdecode_ref.batched import verify as verify_reference
from specdecode_ref.batched.records import DETERMINISTIC, WITH, WITHOUT, Drafts, Rules, Verdicts
from specdecode_ref.sampling import Laws, SamplingRule
from specdecode_ref.verify import block as block_rule
from specdecode_ref.verify import chain as chain_rule
from specdecode_ref.verify import tree as tree_rule

SECTION = "checks"

RULES = (
    SamplingRule(temperature=0.7),
    SamplingRule(temperature=0),
    SamplingRule(temperature=1.1, top_k=20),
    SamplingRule(temperature=0.9, top_p=0.9),
    SamplingRule(temperature=1.0, min_p=0.02),
    SamplingRule(temperature=0.8, top_k=100, top_p=0.95, min_p=0.001),
)

LAW_TV = 5e-6
"""The goal for the law of a row, in total variation."""

EDGE = 1e-4
"""How near to an edge of a residual law a coin may give the next token: rounding of p - q, over its mass."""

REPLAYS = 100

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Of attention, absolute: its values are means of standard normal ones."""

RULE = {"chain": chain_rule.verify, "block": block_rule.verify, "tree": tree_rule.verify}


def cases(smoke: bool) -> Iterator[Case]:
    """All of them."""
    yield Case(SECTION, "law is the reference's", _law)
    yield Case(SECTION, "pick is the reference's", _pick)
    yield Case(SECTION, "top_k is the reference's", _top_k)
    for function in RULE:
        for plain in (True,) if smoke else (True, False):
            name = f"verify_{function} is the reference's, {'temperature only' if plain else 'all rules'}"
            yield Case(SECTION, name, partial(_verify, function=function, plain=plain))
    for dtype in TOLERANCE:
        name = f"tree_attention is the reference's, {str(dtype).removeprefix('torch.')}"
        yield Case(SECTION, name, partial(_attention, dtype=dtype))
    yield Case(SECTION, "topology is the reference's", _topology)
    yield Case(SECTION, "commit is the reference's", _commit)
    yield Case(SECTION, "ngram is the reference's", _ngram)
    yield Case(SECTION, "coins are the reference's", _coins)
    yield Case(SECTION, "the peers accept what we accept", _peers)
    for function in RULE:
        yield Case(SECTION, f"{REPLAYS} replays of verify_{function}", partial(_replays, function=function))
    yield Case(SECTION, "a whole round" if smoke else f"{REPLAYS} replays of a whole round", _rounds)


def _require(holds: object, what: str) -> None:
    """What fails here is the run's news, so it must not depend on how Python treats asserts."""
    if not holds:
        raise ValueError(what)


def _rows(stand: Stand, rows: int, vocab: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Rules, Tensor]:
    """Logits [R, V], a rule a row and coins [R]."""
    generator = stand.generator(3)
    logits = (torch.randn(rows, vocab, generator=generator, device=stand.device) * 3).to(dtype)
    rules = Rules.of([RULES[i % len(RULES)] for i in range(rows)], stand.device)
    return logits, rules, torch.rand(rows, generator=generator, device=stand.device, dtype=torch.float64)


def _on_host(*records: Any) -> list[Any]:
    """Tensors, and records of them, on the CPU."""
    out: list[Any] = []
    for record in records:
        if isinstance(record, Tensor):
            out.append(record.cpu())
        else:
            columns = {name: value.cpu() for name, value in vars(record).items() if isinstance(value, Tensor)}
            out.append(replace(record, **columns))
    return out


def _law(stand: Stand) -> Figures:
    logits, rules, _ = _rows(stand, 3 if stand.smoke else len(RULES), 67 if stand.smoke else 128256)
    ours = sampling.law(logits, rules).double().cpu()
    theirs = sampling_reference.law(*_on_host(logits, rules))
    tv = float((ours - theirs).abs().sum(-1).max() / 2)
    _require(tv <= LAW_TV, f"total variation {tv:.2g}, at most {LAW_TV:.0e} is allowed")
    return {"law_total_variation": tv, "vocabulary": logits.shape[-1]}


def _pick(stand: Stand) -> Figures:
    logits, rules, drawing = _rows(stand, 3 if stand.smoke else 96, 67 if stand.smoke else 32001)
    ours = sampling.pick(logits, rules, drawing).cpu()
    logits, rules, drawing = _on_host(logits, rules, drawing)
    laws = sampling_reference.law(logits, rules)
    near = 0
    for i, (token, u) in enumerate(zip(ours.tolist(), drawing.tolist(), strict=True)):
        near += _same_or_near(laws[i], u, token, sampling.BAND, f"row {i}")
    return {"compared": len(ours), "coins_on_an_edge": near}


def _same_or_near(law: Tensor, u: float, token: int, band: float, where: str) -> bool:
    """Whether `token` is not the pick but its coin lies on an edge. Raises where it is neither."""
    cdf = law.double().cumsum(-1)
    cdf = cdf / cdf[-1]
    wanted = int(torch.searchsorted(cdf, u, right=True))
    if token == wanted:
        return False
    _require(0 <= token < len(cdf), f"{where}: token {token}, the reference has {wanted}")
    low, high = sorted((token, wanted))
    distance = float((cdf[low:high] - u).abs().max())
    _require(distance <= band, f"{where}: token {token}, the reference has {wanted}; its coin is {distance:.2g} away")
    return True


def _top_k(stand: Stand) -> Figures:
    logits, _, _ = _rows(stand, 2 if stand.smoke else 16, 67 if stand.smoke else 32001)
    k = 8
    ours, theirs = sampling.top_k(logits, k), sampling_reference.top_k(logits.cpu(), k)
    _require(torch.equal(ours.tokens.cpu(), theirs.tokens), "other tokens")
    distance = float((ours.logs.double().cpu() - theirs.logs).abs().max())
    _require(distance < 1e-4, f"log probabilities {distance:.2g} apart")
    return {"compared": len(logits) * k, "largest_distance": distance}


def _drafted(stand: Stand, function: str, plain: bool) -> Chains:
    """A batch for one verifier: chains, or trees with siblings of every kind; one row without a draft."""
    batch, gamma, vocab = (2, 2, 67) if stand.smoke else (48, 5, 2003)
    rules = [RULES[i % 2 if plain else i % len(RULES)] for i in range(batch)]
    made = chains(stand, Shape(batch, gamma, vocab), SamplingRule(temperature=1.0), dtype=torch.float32)
    drafts = replace(made.drafts, lse=None)
    if function == "tree":
        drafts = _as_trees(drafts, made.logits, random.Random(5))
    drafts.tokens[0, 1:] = -1
    return made._replace(drafts=drafts, rules=Rules.of(rules, stand.device))


def _as_trees(drafts: Drafts, logits: Tensor, rng: random.Random) -> Drafts:
    """Siblings are drawn alike: with replacement, without, or not at all; likely tokens, so that some are accepted."""
    batch, nodes = drafts.tokens.shape
    best = logits.float().topk(8, -1).indices.tolist()
    tokens, parents, draws = ([[fill] * nodes for _ in range(batch)] for fill in (0, -1, WITH))
    for b in range(batch):
        for node in range(1, nodes):
            parent = rng.randrange(max(0, node - 3), node)
            siblings = [i for i in range(1, node) if parents[b][i] == parent]
            draw = draws[b][siblings[0]] if siblings else rng.choice((WITH, WITHOUT, DETERMINISTIC))
            taken = [tokens[b][i] for i in siblings] if draw == WITHOUT else []
            tokens[b][node] = rng.choice([x for x in best[b][parent] if x not in taken])
            parents[b][node], draws[b][node] = parent, draw
    device = drafts.tokens.device
    made = [torch.tensor(column, device=device) for column in (tokens, parents, draws)]
    return Drafts(made[0], made[1], made[2], drafts.logits)


def _verify(stand: Stand, function: str, plain: bool) -> Figures:
    made = _drafted(stand, function, plain)
    (ours,) = _on_host(getattr(verify, f"verify_{function}")(*made))
    host = Chains(*_on_host(*made))
    theirs = getattr(verify_reference, f"verify_{function}")(*host)
    near = 0
    for b in range(len(ours.token)):
        where = f"request {b}"
        for name in ("status", "length", "path", "kind"):
            mine, other = getattr(ours, name)[b].tolist(), getattr(theirs, name)[b].tolist()
            _require(mine == other, f"{where}: {name} {mine}, the reference has {other}")
        if ours.token[b] != theirs.token[b]:
            u = float(host.emit[b, int(_depth(ours, b))])
            near += _same_or_near(_last_law(host, function, b), u, int(ours.token[b]), EDGE, where)
    for name in ("p_eff", "q_eff"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-4, atol=1e-6, equal_nan=True)
    return {
        "compared": len(ours.token),
        "coins_on_an_edge": near,
        "tokens_a_round": float(ours.length.double().mean()),
    }


def _depth(verdicts: Verdicts, b: int) -> int:
    return int(verdicts.length[b]) - 1


def _last_law(host: Chains, function: str, b: int) -> Tensor:
    """The law that the reference draws a request's last token from."""
    draft, kept = verify_reference.draft_tree(host.drafts, host.rules, b, host.logits.shape[-1])
    laws = Laws(host.logits[b, kept].double(), host.rules.row(b), lambda node: (), 0)
    return RULE[function](draft, laws, host.accept[b, kept].tolist(), host.emit[b].tolist()).law


def _attention(stand: Stand, dtype: torch.dtype) -> Figures:
    shapes = [attention.TINY]
    if not stand.smoke:
        shapes = [attention.Shape(2, nodes, context) for nodes in (1, 5, 16, 64) for context in (0, 77, 2048)]
        shapes += [attention.Shape(1, 100, 300, 16, 2, 64)]
    largest = 0.0
    for shape in shapes:
        made = attention.inputs(stand, shape, dtype=dtype)
        ours, theirs = tree_attention.tree_attention(*made), attention_reference.tree_attention(*made)
        distance = float((ours.double() - theirs.double()).abs().max())
        _require(distance <= TOLERANCE[dtype], f"{shape}: {distance:.2g} apart, {TOLERANCE[dtype]} is allowed")
        largest = max(largest, distance)
    return {"compared": len(shapes), "largest_distance": largest}


def _topology(stand: Stand) -> Figures:
    rng, compared = random.Random(2), 0
    for nodes in (7,) if stand.smoke else (1, 7, 64, 65, 200):
        rows = [[-1, *(rng.randrange(-1, i + 1) for i in range(1, nodes))] for _ in range(16)]
        parents = torch.tensor(rows)
        ours, theirs = tree.topology(parents.to(stand.device)), tree_reference.topology(parents)
        for name, column in theirs._asdict().items():
            _require(torch.equal(getattr(ours, name).cpu(), column), f"{name} of trees of {nodes} nodes")
        compared += len(rows)
    return {"compared": compared}


def _commit(stand: Stand) -> Figures:
    batch, nodes, start = 3, 9, 5
    rng, generator = random.Random(4), stand.generator(4)
    planes = [torch.randn(batch, 2, 24, 64, generator=generator, device=stand.device).bfloat16() for _ in range(4)]
    paths = [[0, *sorted(rng.sample(range(1, nodes), 4))] for _ in range(batch)]
    path = torch.tensor([row + [-1] * (nodes - len(row)) for row in paths])
    count, lengths = torch.tensor([5, 1, 3]), torch.full((batch,), start)
    theirs, their_lengths = [plane.cpu() for plane in planes], lengths.clone()
    cache_reference.commit(theirs, their_lengths, path, count)
    ours = lengths.to(stand.device)
    cache.commit(planes, ours, path.to(stand.device), count.to(stand.device))
    _require(torch.equal(ours.cpu(), their_lengths), "lengths")
    for i, (mine, other) in enumerate(zip(planes, theirs, strict=True)):
        _require(torch.equal(mine.cpu(), other), f"plane {i}")
    return {"compared": len(planes)}


def _ngram(stand: Stand) -> Figures:
    rows, width = 6, 90 if stand.smoke else 3000
    tokens = torch.randint(5, (rows, width), generator=torch.Generator().manual_seed(1))
    lengths = torch.tensor([width, width - 7, 1, 0, 33, 2])
    arguments = (4, 4, 1)
    ours = ngram.find(tokens.to(stand.device), lengths.to(stand.device), *arguments)
    theirs = ngram_reference.find(tokens, lengths, *arguments)
    for name, column in theirs._asdict().items():
        _require(torch.equal(getattr(ours, name).cpu(), column), name)
    return {"compared": rows}


def _coins(stand: Stand) -> Figures:
    sequences, base = torch.tensor([0, 1, 77, 2**31 + 5]), torch.tensor([1, 900, 3, 12])
    seed, count = 2**40 + 12345, 70
    for stream in ("draft", "accept", "emits"):
        ours = getattr(coins, stream)(seed, sequences.to(stand.device), base.to(stand.device), count)
        theirs = getattr(coins_reference, stream)(seed, sequences, base, count)
        _require(torch.equal(ours.cpu(), theirs), stream)
    return {"compared": 3 * len(base) * count}


def _peers(stand: Stand) -> Figures:
    """What we are compared with does the same work: it accepts the same tokens, and emits where p > q."""
    made = chains(stand, Shape(2, 1, 67) if stand.smoke else Shape(64, 4, 32001), WARM)
    ours = verify.verify_chain(*made).length
    assert made.drafts.logits is not None
    columns = made.drafts.tokens, made.rules.temperature.float(), torch.stack((made.accept, made.emit)).float()
    draft = made.drafts.logits
    for name in ("plain_torch", "mrv2_style", "fused_temperature"):
        given = draft[:, :-1] if name == "plain_torch" else draft
        length, token = getattr(peers, name)(made.logits, given, *columns)
        differing = int((length != ours).sum())
        _require(differing <= len(ours) // 32, f"{name}: {differing} of {len(ours)} accept otherwise")
        at = (length - 1)[:, None, None].expand(-1, 1, draft.shape[-1])
        scale = made.rules.temperature.float()[:, None]
        p, q = ((x.gather(1, at)[:, 0].float() / scale).softmax(-1) for x in (made.logits, draft))
        gained = (p - q).gather(1, token[:, None])[:, 0]
        wrong = int(((gained < -1e-6) & (length < made.logits.shape[1])).sum())
        _require(not wrong, f"{name}: {wrong} tokens that no residual holds")
    return {"compared": len(ours)}


def _replays(stand: Stand, function: str) -> Figures:
    stand.require_gpu("CUDA graphs")
    made = _drafted(stand, function, plain=True)
    run: Callable[..., Verdicts] = getattr(verify, f"verify_{function}")
    run(*made)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(*made)
    generator = stand.generator(8)
    for turn in range(REPLAYS):
        for column in (made.accept, made.emit):
            column.copy_(torch.rand(column.shape, generator=generator, device=stand.device, dtype=torch.float64))
        graph.replay()
        _require_same(vars(out), vars(run(*made)), f"replay {turn}")
    return {"compared": REPLAYS}


def _require_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], where: str) -> None:
    for name, column in ours.items():
        other = theirs[name]
        same = (column == other) | ((column != column) & (other != other))
        _require(same.all(), f"{where}: {name} is not what the eager call gives")


def _rounds(stand: Stand) -> Figures:
    """A small model and a smaller draft: texts from replayed rounds are those of rounds launched one by one."""
    count = 1 if stand.smoke else REPLAYS
    replayed, eager = loop.small_rounds(stand, count), loop.small_rounds(stand, count)
    for _ in range(count):
        replayed.play()
        eager.play_eagerly()
    _require(torch.equal(replayed.text, eager.text), "other tokens")
    tokens = int(replayed.total.sum() - len(replayed.total) * loop.SMALL_PROMPT)
    return {"compared": tokens, "tokens_a_round": tokens / count / len(replayed.total)}
