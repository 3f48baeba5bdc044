// Where you are: every word the animation shows or speaks. Tokens become visible text, states become one sentence.
// A trace may come from anyone, so invisible and direction-changing characters are spelled out here, and the page only
// ever receives these strings as text, never as markup.

const NAMES = { 0x20: "·", 0x0a: "⏎", 0x0d: "␍", 0x09: "⇥", 0xa0: "⍽", 0x7f: "␡" };
const UNSEEN = /[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Zl}\p{Zp}]/u;
const JOINING = /^\p{M}/u;

/** Text with every character that would not show, or would turn the line around, made visible. */
export function visible(text) {
  let out = "";
  for (const char of text) {
    const code = char.codePointAt(0);
    if (NAMES[code]) out += NAMES[code];
    else if (code < 0x20) out += String.fromCharCode(0x2400 + code);
    else if (UNSEEN.test(char)) out += `⟨${code.toString(16).toUpperCase()}⟩`;
    else out += char;
  }
  return JOINING.test(out) ? `◌${out}` : out;
}

/** The first and last characters of a long text, `most` in all; whole characters, never half of one. */
export function shorten(text, most) {
  const chars = Array.from(text);
  if (chars.length <= most) return text;
  if (most < 4) return `${chars.slice(0, Math.max(1, most - 1)).join("")}…`;
  const head = Math.ceil((most - 1) * 0.65);
  return `${chars.slice(0, head).join("")}…${chars.slice(chars.length - (most - 1 - head)).join("")}`;
}

/** A token as it is drawn: its text if the trace knows it, otherwise its number. */
export function label(trace, token, most = 16) {
  if (token == null) return "?";
  const text = trace.vocab[token];
  if (text == null) return `#${token}`;
  return text === "" ? "∅" : shorten(visible(text), most);
}

/** A token inside a sentence: quoted, with real spaces, and no invisible characters. */
export function spoken(trace, token) {
  const text = trace.vocab[token];
  return text == null ? `number ${token}` : `'${shorten(visible(text).replaceAll("·", " "), 24)}'`;
}

/** A probability in two digits, or as many as it takes to tell it from 0 and 1. */
export function prob(value) {
  if (value == null) return "–";
  if (value === 0 || value === 1) return String(value);
  if (value < 0.0001) return "<0.0001";
  if (value > 0.9999) return ">0.9999";
  return value < 0.01 || value > 0.99 ? value.toFixed(4) : value.toFixed(2);
}

/** Two probabilities with the digits it takes to tell them apart, and from nothing; four at most. */
export function pair(a, b) {
  if (a == null || b == null) return [prob(a), prob(b)];
  const bare = (text) => Number(text) === 0;
  for (const digits of [2, 3, 4]) {
    const [left, right] = [a.toFixed(digits), b.toFixed(digits)];
    if (left !== right && (a === 0 || !bare(left)) && (b === 0 || !bare(right))) return [left, right];
  }
  return [a, b].map((value) => (value > 0 && value < 0.0001 ? "<0.0001" : value.toFixed(a.toFixed(2) === b.toFixed(2) ? 4 : 2)));
}

/** Nanoseconds as a short time. */
export function duration(ns) {
  if (ns == null) return "–";
  if (ns < 1e6) return `${Math.round(ns / 1e3)} µs`;
  return ns < 1e9 ? `${(ns / 1e6).toFixed(ns < 1e7 ? 1 : 0)} ms` : `${(ns / 1e9).toFixed(1)} s`;
}

/** `count` of a thing, in the singular where it is one. */
export function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
}

const EMITTED = {
  bonus: (token) => `Every draft token on the path held, so the same pass also gives a bonus token: ${token}, drawn from p.`,
  residual: (token, { lossy }) => `The replacement is ${token}, drawn from the residual: what p has beyond q.${lossy ? "" : " This keeps the output law exact."}`,
  target: (token) => `Then comes ${token}, drawn from p as plain decoding would.`,
};

const CUTS = { eos: "the model ended its answer", stop: "a stop string was completed", length: "the length limit was reached" };

const COIN = {
  by: "coin",
  bar: "min(1, p/q)",
  note: "u is a fair coin between 0 and 1. Accepting when it falls below p/q keeps exactly as much of the guess as the target would write itself.",
};
const PATH = {
  ...COIN,
  path: true,
  bar: "the weight of the path",
  note: "The whole path down to this token is judged, its end first: its weight is how much of it the target is still owed.",
};
const LOSSY = "This rule is lossy: the output law is not the target's.";
const THRESHOLD = { by: "threshold", lossy: true, note: `No coin: the token passes if p is above the threshold. ${LOSSY}` };
const RULES = {
  match: { by: "comparison" },
  block: PATH,
  traversal: PATH,
  kseq: { ...COIN, note: "Each of the candidates has the same chance at its share of p, which is p divided by rho." },
  onehot: { ...COIN, note: "The guess is judged as if it had been certain, so q counts as 1 and p alone decides." },
  lenient: { ...COIN, lossy: true, note: `q was multiplied by a lenience below 1, so more passes. ${LOSSY}` },
  typical: THRESHOLD,
  relaxed: THRESHOLD,
};

/** How the trace's verifier decides: by a coin under a bar, a threshold or a comparison; whether it judges whole paths. */
export function ruleBook(trace) {
  return RULES[trace.header.verifier] ?? COIN;
}

/** True when a test of this trace follows from a coin and a bar, both of which it holds. */
export function tossesCoins(trace, test) {
  return ruleBook(trace).by === "coin" && test.u != null && test.p_eff != null && test.q_eff != null;
}

/** The rule of one test in words: which side of its bar the coin fell on, or p of its threshold. */
export function ruleOf(trace, test) {
  const { p_eff: p, q_eff: q, u, accepted } = test;
  const { by } = ruleBook(trace);
  if (by === "comparison") return accepted ? "accepted: it is the target's own draw" : "rejected: the target drew another token";
  if (by === "threshold" && u != null && p != null) {
    const [likely, least] = pair(p, u);
    return accepted ? `accepted: p ${likely} > ${least}` : `rejected: p ${likely} ≤ ${least}`;
  }
  if (!tossesCoins(trace, test)) return accepted ? "accepted (the trace holds no coin)" : "rejected (the trace holds no coin)";
  const [coin, bar] = pair(u, p >= q ? (p > 0 ? 1 : 0) : p / q);
  return accepted ? `accepted: u ${coin} < ${bar}` : `rejected: u ${coin} ≥ ${bar}`;
}

/** True where a node was chosen, by rank or from earlier text, and no coin was tossed for it: its q counts as 1. */
export function chosen(round, node) {
  return round.nodes.draw?.[node] === "deterministic";
}

/** One sentence on what is happening at this state; also what the live region speaks. */
export function caption(trace, state, round, tests, emitted) {
  const nodes = round.nodes.parent.length - 1;
  const name = (token) => spoken(trace, token);
  if (state.kind === "root") {
    return nodes ? `A new round starts from the last token, ${name(round.nodes.token?.[0])}. It is the root of the draft.`
      : `A new round starts from ${name(round.nodes.token?.[0])}. The drafter has no guess this time.`;
  }
  if (state.kind === "grow") {
    const fresh = state.nodes.filter((node) => node.fresh).length;
    const first = state.nodes.findIndex((node) => node.fresh);
    const what = fresh === 1 ? `${name(round.nodes.token?.[first])} next` : `${count(fresh, "token")} at depth ${state.depth}`;
    return chosen(round, first) ? `The drafter chooses ${what}. Nothing is drawn, so q counts as 1.`
      : `The drafter guesses ${what}. A thick edge means it is sure (high q).`;
  }
  if (state.kind === "sweep") {
    return nodes ? `One pass of the target reads all ${count(nodes + 1, "node")} at once and gives p, its own probability, for each guess.`
      : "One pass of the target gives p for the next token.";
  }
  if (state.kind === "test") {
    const test = tests[state.test];
    return `Token ${name(round.nodes.token?.[test.node])} ${ruleOf(trace, test)}.`;
  }
  if (state.kind === "emit") return (EMITTED[state.emission.kind] ?? EMITTED.target)(name(state.emission.token), ruleBook(trace));
  const dropped = round.nodes.parent.length - round.path.length;
  const cut = round.cut ? ` The text ends here: ${CUTS[round.cut.reason] ?? "it was cut"}.` : "";
  const rows = dropped ? ` ${dropped === 1 ? "One KV row is" : `${dropped} KV rows are`} dropped.` : " Every KV row is kept.";
  return `${count(emitted, "token")} for one pass of the target ${emitted === 1 ? "joins" : "join"} the text.${rows}${cut}`;
}
