// Where you are: the pure half of the animation. A trace and a cursor go in, a description of the picture comes out.
// Nothing here touches the page, the clock or a random number, so scrubbing back is the same as never having gone on.
// `trace` is {header, prompt, vocab, rounds}; a cursor is {round, event}; rounds are those of specdec-trace/1.

export const PHASES = ["draft", "verify", "decide", "commit"];

const memo = new WeakMap();

function once(round, name, make) {
  if (!memo.has(round)) memo.set(round, {});
  const kept = memo.get(round);
  return (kept[name] ??= make());
}

/** Depth of every node: the root has depth 0. */
export function depths(round) {
  return once(round, "depths", () => {
    const out = [];
    for (const parent of round.nodes.parent) out.push(parent < 0 ? 0 : out[parent] + 1);
    return out;
  });
}

/** The children of every node, in draw order. */
export function children(round) {
  return once(round, "children", () => {
    const out = round.nodes.parent.map(() => []);
    round.nodes.parent.forEach((parent, node) => parent >= 0 && out[parent].push(node));
    return out;
  });
}

/** Every decision of a round in order. A trace that recorded no coins still says which nodes were accepted. */
export function testsOf(round) {
  return once(round, "tests", () =>
    round.tests?.length ? round.tests : round.path.slice(1).map((node) => ({ node, accepted: true })));
}

/** What happens in a round, in order: grow the draft a depth at a time, one sweep, each test, the last token, commit. */
export function eventsOf(round) {
  return once(round, "events", () => {
    const deepest = depths(round).reduce((a, b) => Math.max(a, b), 0);
    const out = [{ phase: "draft", kind: "root", depth: 0 }];
    for (let depth = 1; depth <= deepest; depth++) out.push({ phase: "draft", kind: "grow", depth });
    out.push({ phase: "verify", kind: "sweep" });
    testsOf(round).forEach((_, test) => out.push({ phase: "decide", kind: "test", test }));
    out.push({ phase: "decide", kind: "emit" }, { phase: "commit", kind: "commit" });
    out.forEach((event, i) => (event.ends = event.phase !== out[i + 1]?.phase));
    return out;
  });
}

/** The events of a whole trace as one line: `total` of them, and both ways between a cursor and its place on the line. */
export function events(trace) {
  const starts = [];
  let total = 0;
  for (const round of trace.rounds) {
    starts.push(total);
    total += eventsOf(round).length;
  }
  const at = (place) => {
    const wanted = Math.max(0, Math.min(total - 1, Math.round(place) || 0));
    let low = 0;
    let high = starts.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (starts[middle] <= wanted) low = middle;
      else high = middle - 1;
    }
    return { round: low, event: wanted - (starts[low] ?? 0) };
  };
  return { total, starts, at, place: ({ round, event }) => (starts[round] ?? 0) + event };
}

/**
 * Tidy drawing of a round in units of one depth and one row: x = depth, y = row of a leaf in depth-first order, parents
 * in the middle of their children. The emitted token has a slot from the start, so that nothing jumps when it appears.
 */
export function layout(round) {
  return once(round, "layout", () => {
    const kids = children(round);
    const x = depths(round);
    const y = new Array(x.length).fill(0);
    const tip = round.path[round.path.length - 1] ?? 0;
    let rows = 0;
    let emitted = null;
    const stack = [[0, 0]];
    while (stack.length) {
      const top = stack[stack.length - 1];
      const [node, seen] = top;
      if (seen < kids[node].length) {
        top[1]++;
        stack.push([kids[node][seen], 0]);
        continue;
      }
      stack.pop();
      const own = kids[node];
      if (!own.length) y[node] = rows++;
      else y[node] = (y[own[0]] + y[own[own.length - 1]]) / 2;
      if (node === tip) emitted = { x: x[node] + 1, y: own.length ? rows++ : y[node] };
    }
    const columns = x.reduce((a, b) => Math.max(a, b), emitted.x);
    return { x, y, emitted, rows, columns };
  });
}

/** The probability that this test accepts: min(1, p/q), without dividing by nothing. */
export function ratio({ p_eff: p, q_eff: q }) {
  if (p == null || q == null) return null;
  return p >= q ? (p > 0 ? 1 : 0) : p / q;
}

/** Tokens a round puts into the text, first to last, each with where it came from; a cut round keeps only some. */
export function emits(round) {
  return once(round, "emits", () => {
    const out = round.path.slice(1).map((node) => ({ token: round.nodes.token?.[node], kind: "draft", node }));
    out.push({ token: round.emitted?.token, kind: round.emitted?.kind ?? "target", node: null });
    return round.cut ? out.slice(0, round.cut.kept) : out;
  });
}

/** What the picture shows at a cursor: every node's standing, the decision at hand, the text so far and the KV rows. */
export function stateAt(trace, cursor) {
  const round = trace.rounds[cursor.round];
  const line = eventsOf(round);
  const event = line[cursor.event];
  const { phase, kind } = event;
  const rank = PHASES.indexOf(phase);
  const depth = depths(round);
  const tests = testsOf(round);
  const grown = phase === "draft" ? event.depth : Infinity;
  const decided = phase === "decide" ? (kind === "emit" ? tests.length : event.test + 1) : rank > 2 ? tests.length : 0;
  const over = kind === "emit" || kind === "commit";
  const held = round.cut ? round.path.slice(0, round.cut.kept) : round.path;
  const onPath = new Set(held);

  const status = depth.map((d, node) => (d > grown ? "hidden" : rank < 1 ? "drafted" : over && node ? "skipped" : "verified"));
  for (let i = 0; i < decided; i++) status[tests[i].node] = tests[i].accepted ? "accepted" : "rejected";
  const active = kind === "test" ? tests[event.test].node : kind === "root" ? 0 : null;
  const nodes = depth.map((_, node) => ({
    status: status[node],
    active: node === active,
    fresh: kind === "grow" && depth[node] === grown,
    kept: onPath.has(node),
    ghost: phase === "commit",
    kv: rank < 1 ? "absent" : phase !== "commit" ? "pending" : onPath.has(node) ? "kept" : "dropped",
  }));
  return {
    round: cursor.round,
    event: cursor.event,
    phase,
    kind,
    depth: event.depth,
    ends: event.ends,
    nodes,
    test: kind === "test" ? event.test : null,
    emission: over ? { ...round.emitted, from: round.path[round.path.length - 1] } : null,
    committed: round.committed + (phase === "commit" ? emits(round).length : 0),
    cached: round.committed - 1 + (phase === "commit" ? held.length : 0),
  };
}

/** Where a newcomer should land: the first rejection that follows an acceptance, or else the first test there is. */
export function tellingCursor(trace) {
  let first = null;
  for (const [index, round] of trace.rounds.entries()) {
    const tests = round.tests ?? [];
    const turn = tests.findIndex((test, i) => !test.accepted && i > 0 && tests[i - 1].accepted);
    const chosen = turn >= 0 ? turn : first || !tests.length ? -1 : 0;
    if (chosen < 0) continue;
    const event = eventsOf(round).findIndex((e) => e.kind === "test" && e.test === chosen);
    if (turn >= 0) return { round: index, event };
    first = { round: index, event };
  }
  return first ?? { round: 0, event: 0 };
}

/** Rounds that came before joined with a window that begins at `first`; the same window twice changes nothing. */
export function join(rounds, first, more) {
  if (first > rounds.length) return null;
  const kept = rounds.slice(0, Math.max(first + more.length, rounds.length));
  more.forEach((round, i) => (kept[first + i] ??= round));
  return kept;
}
