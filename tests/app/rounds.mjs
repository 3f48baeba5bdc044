// Where you are: rounds and traces for the JavaScript tests, made from a seed so that every run sees the same ones.
// They keep the invariants of specdec-trace/1; `hostile` shapes are the largest a valid file may hold.

/** Numbers in [0, 1) from a seed (mulberry32). */
export function numbers(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let t = Math.imul(state ^ (state >>> 15), state | 1);
    t = (t + Math.imul(t ^ (t >>> 7), t | 61)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
}

/** The parents of a tree with `shape[d]` children for every node at depth d. */
export function parents(shape) {
  const out = [-1];
  let level = [0];
  for (const width of shape) {
    const next = [];
    for (const parent of level) for (let k = 0; k < width; k++) next.push(out.push(parent) - 1);
    level = next;
  }
  return out;
}

/** A round on the given parents, with tests in sibling order and a verdict that follows from them. */
export function makeRound(parent, random, committed = 10, index = 0) {
  const n = parent.length;
  const children = parent.map((_, node) => parent.flatMap((p, i) => (i && p === node ? [i] : [])));
  const column = () => [null, ...Array.from({ length: n - 1 }, random)];
  const [p, q] = [column(), column()];
  const tests = [];
  const path = [0];
  for (let node = 0; ;) {
    const accepted = children[node].find((child) => {
      const test = { node: child, p_eff: p[child], q_eff: q[child], u: random() };
      tests.push({ ...test, accepted: test.u * test.q_eff < test.p_eff });
      return tests[tests.length - 1].accepted;
    });
    if (accepted === undefined) break;
    path.push((node = accepted));
  }
  const kind = children[path[path.length - 1]].length ? "residual" : path.length > 1 ? "bonus" : "target";
  return {
    index, committed, tests, path, cut: null, topk: {}, ns: { draft: 1, verify: 2, sample: 3 },
    nodes: { parent, token: parent.map((_, i) => (i + index) % 7), draw: parent.map((_, i) => (i ? "with_replacement" : null)), p, q },
    emitted: { token: 3, kind },
  };
}

/** A trace whose rounds have the given shapes. */
export function makeTrace(shapes, seed = 1) {
  const random = numbers(seed);
  let committed = 5;
  const rounds = shapes.map((shape, index) => {
    const round = makeRound(parents(shape), random, committed, index);
    committed += round.path.length;
    return round;
  });
  const vocab = { 0: " the", 1: " cat", 2: "\n", 3: "<b>x</b>", 4: "\u202eabc", 5: " ", 6: "é" };
  return { id: "t", header: { method: "model", verifier: "tree", level: 3 }, prompt: [0, 1, 2, 0, 1], vocab, rounds };
}

export const chain = (length) => Array(length).fill(1);
