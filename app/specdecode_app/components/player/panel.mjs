// Where you are: the numbers beside the tree. While a test is on, the coin u is a pin over the bar of min(1, p/q), or of
// what else the rule compares: left of the bar's end the token is accepted. Before that it lists what was drafted, after
// that where the last token is from.

import { emits, ratio, testsOf } from "./replay.mjs";
import { chosen, count, duration, label, pair, prob, ruleBook, ruleOf, tossesCoins } from "./words.mjs";
import { chip, element, mark } from "./stream.mjs";

const ROWS = 7;

function meter(parent, letter, words, value, text) {
  const row = element("div", `meter ${letter}`, parent);
  element("span", "letter", row, letter);
  element("span", "words", row, words);
  const track = element("span", "gauge", row);
  element("span", "level", track).style.width = `${100 * (value ?? 0)}%`;
  element("span", "number", row, text ?? prob(value));
}

function head(parent, title, small) {
  const line = element("div", "panel-head", parent);
  element("strong", "", line, title);
  if (small) element("span", "", line, small);
}

function listing(parent, trace, round, verified) {
  const nodes = round.nodes.parent.length;
  const table = element("table", "listing", parent);
  const top = element("tr", "", element("thead", "", table));
  for (const [words, name] of [["guess", ""], ["q", "q"], ["p", "p"]]) element("th", name, top, words).scope = "col";
  const body = element("tbody", "", table);
  for (let i = 1; i < Math.min(nodes, ROWS + 1); i++) {
    const row = element("tr", "", body);
    element("bdi", "", element("th", "", row), label(trace, round.nodes.token?.[i], 14)).parentNode.scope = "row";
    element("td", "q", row, prob(round.nodes.q?.[i]));
    element("td", "p", row, verified ? prob(round.nodes.p?.[i]) : "·");
  }
  if (nodes > ROWS + 1) element("p", "note", parent, `and ${count(nodes - 1 - ROWS, "more guess").replace("guesss", "guesses")}`);
}

function drafted(parent, trace, round, verified) {
  const nodes = round.nodes.parent.length - 1;
  const time = round.ns ? duration(verified ? round.ns.verify : round.ns.draft) : "";
  head(parent, verified ? "p, from one target pass" : count(nodes, "draft token"), time);
  if (!nodes) return element("p", "note", parent, "No guess: this round is a step of plain decoding.");
  listing(parent, trace, round, verified);
  const [guessed, judged] = chosen(round, 1)
    ? ["The guesses were chosen, not drawn: q counts as 1. p comes next, from the target.",
      "The guesses were chosen, not drawn: q counts as 1, and p, how likely the target finds each, alone decides."]
    : ["q is how likely the drafter found its own guess. p comes next, from the target.",
      "p is how likely the target finds each guess, q how likely the drafter did."];
  return element("p", "note", parent, verified ? judged : guessed);
}

function decided(parent, trace, round, state) {
  const tests = testsOf(round);
  const test = tests[state.test];
  head(parent, `Test ${state.test + 1} of ${tests.length}`, `node ${test.node}`);
  const line = element("p", "subject", parent);
  chip(trace, round.nodes.token?.[test.node], "candidate", line);
  element("span", "note", line, ` after ${label(trace, round.nodes.token?.[round.nodes.parent[test.node]], 12)}`);
  const plain = round.nodes.p?.[test.node];
  const rule = ruleBook(trace);
  const updated = !rule.path && rule.by === "coin" && trace.header.verifier !== "kseq" && plain != null && test.p_eff != null && Math.abs(plain - test.p_eff) > 1e-9;
  const [p, q] = pair(test.p_eff, test.q_eff);
  if (rule.path) meter(parent, "w", "of the path", test.p_eff, p);
  else meter(parent, "p", updated ? "target, updated" : "target", test.p_eff, p);
  if (rule.by === "threshold") meter(parent, "t", "threshold", test.u, prob(test.u));
  else if (!rule.path) meter(parent, "q", "draft", test.q_eff, q);
  if (tossesCoins(trace, test)) coin(parent, test, rule.bar);
  const verdict = element("p", `verdict ${test.accepted ? "accepted" : "rejected"}`, parent);
  mark(test.accepted ? "accepted" : "rejected", verdict);
  element("span", "", verdict, ruleOf(trace, test));
  if (rule.note && (rule.by === "threshold" || tossesCoins(trace, test))) element("p", "note", parent, rule.note);
  if (updated) element("p", "note", parent, `An earlier sibling was rejected, so p is now the residual (it was ${prob(plain)}).`);
}

function coin(parent, test, name) {
  const bar = ratio(test);
  const [u, end] = pair(test.u, bar);
  const box = element("div", "coin", parent);
  const pin = element("span", "pin", box);
  pin.style.left = `${100 * test.u}%`;
  element("span", `pin-label${test.u > 0.7 ? " left" : ""}`, pin, `coin u = ${u}`);
  const track = element("span", "zone-track", box);
  element("span", "zone", track).style.width = `${100 * bar}%`;
  const scale = element("div", "scale", box);
  element("span", "", scale, "0");
  element("span", "", scale, `accept below ${name} = ${end}`);
  element("span", "", scale, "1");
}

const LAWS = { bonus: "drawn from p", residual: "drawn from the residual", target: "drawn from p" };

function emitted(parent, trace, round) {
  const { kind, token } = round.emitted;
  head(parent, { bonus: "Bonus token", residual: "Replacement token", target: "Target token" }[kind] ?? "Last token", LAWS[kind]);
  chip(trace, token, kind, element("p", "subject", parent));
  const rows = round.topk?.[round.path[round.path.length - 1]];
  const law = kind === "residual" ? rows?.residual : rows?.p;
  for (const [id, value] of (law ?? []).slice(0, 6)) {
    const row = element("div", `meter law ${id === token ? "chosen" : ""}`, parent);
    element("bdi", "words", row, label(trace, id, 12));
    element("span", "level", element("span", "gauge", row)).style.width = `${100 * value}%`;
    element("span", "number", row, prob(value));
  }
  if (law?.length) element("p", "note", parent, kind === "residual" ? "residual = what is left of max(p − q, 0), scaled to sum to 1" : "the most likely tokens under p");
}

function committed(parent, trace, round) {
  const made = emits(round).length;
  const nodes = round.nodes.parent.length - 1;
  head(parent, `${count(made, "token")}, one target pass`);
  const line = element("p", "subject", parent);
  for (const { token, kind } of emits(round).slice(0, 8)) chip(trace, token, kind, line, 12);
  const facts = [[`${round.path.length - 1} of ${nodes}`, "draft tokens accepted"], [String(round.path.length), "KV rows kept"], [String(nodes + 1 - round.path.length), "KV rows dropped"]];
  for (const [value, words] of facts) {
    const row = element("p", "fact", parent);
    element("strong", "", row, value);
    element("span", "", row, ` ${words}`);
  }
  if (!round.ns) return;
  const { draft, verify, sample } = round.ns;
  element("p", "note", parent, `draft ${duration(draft)} · target pass ${duration(verify)} · decide ${duration(sample)}`);
}

/** Write the panel for a state. */
export function showPanel(parent, trace, state) {
  const round = trace.rounds[state.round];
  parent.replaceChildren();
  if (state.kind === "test") decided(parent, trace, round, state);
  else if (state.kind === "emit") emitted(parent, trace, round);
  else if (state.kind === "commit") committed(parent, trace, round);
  else drafted(parent, trace, round, state.phase === "verify");
}

/** The KV cache as one row: what is committed, then this round's nodes, kept or dropped. */
export function showCache(parent, state) {
  const shown = state.nodes.length <= 128;
  const cells = [...parent.querySelectorAll(".cell")];
  const wanted = shown ? state.nodes.length : 0;
  while (cells.length > wanted) cells.pop().remove();
  while (cells.length < wanted) cells.push(element("i", "cell", parent.querySelector(".cells")));
  if (shown) state.nodes.forEach((node, i) => cells[i].dataset.kv !== node.kv && (cells[i].dataset.kv = node.kv));
  parent.querySelector(".held").textContent = `${count(state.cached, "row")}`;
  const total = (kv) => state.nodes.filter((node) => node.kv === kv).length;
  const words = state.phase === "commit" ? `${total("kept")} kept, ${total("dropped")} dropped`
    : state.phase === "draft" ? "nothing new yet" : `${total("pending")} in question`;
  parent.querySelector(".kv-words").textContent = words;
}
