// Where you are: the tests of the animation's pure half. `pytest tests/app` runs them through node, or run them alone
// with `node --test tests/app/*.test.mjs`.

import assert from "node:assert/strict";
import { test } from "node:test";

import { PHASES, children, depths, emits, events, eventsOf, join, layout, ratio, stateAt, tellingCursor, testsOf }
  from "../../app/specdecode_app/components/player/replay.mjs";
import { chain, makeRound, makeTrace, numbers, parents } from "./rounds.mjs";

const MIXED = makeTrace([[], chain(4), [3, 2, 1, 1], [4, 3, 2], chain(1), []], 7);
const HOSTILE = { "a chain of 1024": chain(1023), "256 children": [255], "1024 nodes, wide": [1023], "a broad tree": [8, 8, 8] };

function walk(trace) {
  const line = events(trace);
  return Array.from({ length: line.total }, (_, place) => line.at(place));
}

test("the line of events and the cursors name each other", () => {
  const line = events(MIXED);
  walk(MIXED).forEach((cursor, place) => assert.equal(line.place(cursor), place));
  assert.deepEqual(line.at(-5), { round: 0, event: 0 });
  assert.equal(line.place(line.at(1e9)), line.total - 1);
  assert.deepEqual(line.at(NaN), { round: 0, event: 0 });
});

test("a round goes through its four phases in order, and only the last event of each ends it", () => {
  for (const round of MIXED.rounds) {
    const order = eventsOf(round).map(({ phase }) => PHASES.indexOf(phase));
    assert.deepEqual(order, [...order].sort());
    assert.deepEqual([...new Set(order)], [0, 1, 2, 3]);
    assert.equal(eventsOf(round).filter(({ ends }) => ends).length, 4);
    assert.equal(eventsOf(round).filter(({ kind }) => kind === "sweep").length, 1);
  }
});

test("a state depends on the cursor alone: stepping, scrubbing and going back all agree", () => {
  const forward = walk(MIXED).map((cursor) => JSON.stringify(stateAt(MIXED, cursor)));
  const backward = walk(MIXED).reverse().map((cursor) => JSON.stringify(stateAt(MIXED, cursor))).reverse();
  assert.deepEqual(backward, forward);
  const random = numbers(3);
  for (let i = 0; i < 200; i++) {
    const place = Math.floor(random() * forward.length);
    assert.equal(JSON.stringify(stateAt(MIXED, events(MIXED).at(place))), forward[place]);
  }
});

test("a state is new each time, so that nobody can change another's", () => {
  const cursor = { round: 1, event: 2 };
  stateAt(MIXED, cursor).nodes[0].status = "spoiled";
  assert.notEqual(stateAt(MIXED, cursor).nodes[0].status, "spoiled");
});

test("draft: nodes appear a depth at a time, with their parents there before them", () => {
  for (const cursor of walk(MIXED)) {
    const state = stateAt(MIXED, cursor);
    const round = MIXED.rounds[cursor.round];
    if (state.phase !== "draft") continue;
    state.nodes.forEach((node, i) => {
      assert.equal(node.status, depths(round)[i] <= state.depth ? "drafted" : "hidden");
      if (node.status !== "hidden" && i) assert.notEqual(state.nodes[round.nodes.parent[i]].status, "hidden");
      assert.equal(node.kv, "absent");
    });
  }
});

test("verify: one event, and after it every node is verified at once", () => {
  for (const cursor of walk(MIXED)) {
    const state = stateAt(MIXED, cursor);
    if (state.kind === "sweep") assert.ok(state.nodes.every(({ status, kv }) => status === "verified" && kv === "pending"));
  }
});

test("decide: verdicts come in the order of the tests, one an event, and are never taken back", () => {
  for (const cursor of walk(MIXED)) {
    const state = stateAt(MIXED, cursor);
    if (state.kind !== "test") continue;
    const tests = testsOf(MIXED.rounds[cursor.round]);
    tests.forEach(({ node, accepted }, i) => {
      assert.equal(state.nodes[node].status, i <= state.test ? (accepted ? "accepted" : "rejected") : "verified");
    });
    assert.deepEqual(state.nodes.flatMap(({ active }, i) => (active ? [i] : [])), [tests[state.test].node]);
    assert.equal(state.emission, null);
  }
});

test("decide: the last token hangs on the end of the path, and what was never tested says so", () => {
  for (const cursor of walk(MIXED)) {
    const state = stateAt(MIXED, cursor);
    if (state.kind !== "emit") continue;
    const round = MIXED.rounds[cursor.round];
    assert.equal(state.emission.from, round.path.at(-1));
    const tested = new Set(testsOf(round).map(({ node }) => node));
    state.nodes.forEach(({ status }, i) => i && assert.equal(status === "skipped", !tested.has(i)));
  }
});

test("commit: text and KV cache grow by the path, the rest is dropped, and the next round starts there", () => {
  MIXED.rounds.forEach((round, index) => {
    const state = stateAt(MIXED, { round: index, event: eventsOf(round).length - 1 });
    assert.equal(state.committed, round.committed + round.path.length);
    assert.equal(state.cached, state.committed - 1);
    state.nodes.forEach(({ kv }, node) => assert.equal(kv, round.path.includes(node) ? "kept" : "dropped"));
    if (index + 1 < MIXED.rounds.length) {
      const next = stateAt(MIXED, { round: index + 1, event: 0 });
      assert.deepEqual([next.committed, next.cached], [state.committed, state.cached]);
    }
  });
});

test("a cut round commits only what is kept", () => {
  const trace = makeTrace([chain(4)], 5);
  const round = { ...makeRound(parents(chain(3)), () => 0.5, 5), path: [0, 1, 2], cut: { reason: "eos", kept: 1 } };
  trace.rounds = [round];
  assert.deepEqual(emits(round).map(({ node }) => node), [1]);
  const last = stateAt(trace, { round: 0, event: eventsOf(round).length - 1 });
  assert.equal(last.committed, 6);
  assert.equal(last.nodes.filter(({ kv }) => kv === "kept").length, 1);
});

test("a trace without coins or tokens still says what was accepted", () => {
  const round = { ...makeRound(parents(chain(3)), numbers(2)), tests: [], path: [0, 1] };
  assert.deepEqual(testsOf(round), [{ node: 1, accepted: true }]);
  assert.equal(ratio(testsOf(round)[0]), null);
});

test("min(1, p/q) never divides by nothing", () => {
  assert.deepEqual([[0, 0], [0.5, 0], [0, 0.5], [0.2, 0.4], [0.4, 0.2]].map(([p_eff, q_eff]) => ratio({ p_eff, q_eff })), [0, 1, 0, 0.5, 1]);
});

for (const [name, shape] of Object.entries(HOSTILE)) {
  test(`layout: tidy, and quick, for ${name}`, () => {
    const round = makeRound(parents(shape), numbers(11));
    const begin = performance.now();
    const plan = layout(round);
    assert.ok(performance.now() - begin < 500);
    assert.deepEqual(plan.x, depths(round));
    const spots = new Set([...plan.x.map((x, i) => `${x} ${plan.y[i]}`), `${plan.emitted.x} ${plan.emitted.y}`]);
    assert.equal(spots.size, plan.x.length + 1, "no two nodes share a place");
    assert.ok([...plan.y, plan.emitted.y].every((y) => y >= 0 && y < plan.rows));
    children(round).forEach((own, node) => {
      const rows = own.map((child) => plan.y[child]);
      assert.deepEqual(rows, [...rows].sort((a, b) => a - b), "siblings stand in draw order");
      if (own.length) assert.equal(plan.y[node], (rows[0] + rows[rows.length - 1]) / 2);
    });
    assert.deepEqual(layout(structuredClone(round)), plan, "the same round is always drawn the same way");
  });

  test(`states at every phase of ${name}`, () => {
    const trace = makeTrace([shape], 13);
    const line = eventsOf(trace.rounds[0]);
    for (const phase of PHASES) {
      const event = line.findIndex((e) => e.phase === phase && e.ends);
      assert.equal(stateAt(trace, { round: 0, event }).nodes.length, trace.rounds[0].nodes.parent.length);
    }
  });
}

test("the first picture is a rejection after an acceptance, or the nearest thing to it", () => {
  const cursor = tellingCursor(MIXED);
  const { test: number } = eventsOf(MIXED.rounds[cursor.round])[cursor.event];
  const tests = testsOf(MIXED.rounds[cursor.round]);
  assert.equal(tests[number].accepted, false);
  assert.equal(tests[number - 1].accepted, true);
  assert.deepEqual(tellingCursor(makeTrace([[], []])), { round: 0, event: 0 });
});

test("windows of a live run join by index: twice, late, or overlapping changes nothing, a gap is refused", () => {
  const all = makeTrace(Array(9).fill(chain(2))).rounds;
  const sent = (first, end) => structuredClone(all.slice(first, end));
  let rounds = join([], 0, all.slice(0, 3));
  rounds = join(rounds, 1, sent(1, 6));
  assert.deepEqual(join(rounds, 1, sent(1, 6)), rounds);
  assert.deepEqual(join(rounds, 0, sent(0, 2)), rounds);
  assert.equal(join(rounds, 8, all.slice(8)), null);
  rounds = join(rounds, 2, sent(2));
  assert.deepEqual(rounds, all);
  assert.strictEqual(rounds[2], all[2], "a round that is there is kept, with all that was derived from it");
});
