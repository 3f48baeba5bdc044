// Where you are: the tests of every word the animation shows: hostile tokens, probabilities, captions.

import assert from "node:assert/strict";
import { test } from "node:test";

import { emits, events, stateAt, testsOf } from "../../app/specdecode_app/components/player/replay.mjs";
import { caption, duration, label, pair, prob, ruleBook, ruleOf, shorten, spoken, visible } from "../../app/specdecode_app/components/player/words.mjs";
import { chain, makeTrace } from "./rounds.mjs";

test("white space and control characters are visible", () => {
  assert.equal(visible(" a\n\tb\r"), "·a⏎⇥b␍");
  assert.equal(visible("\u0000\u0007\u007f\u009b"), "␀␇␡⟨9B⟩");
  assert.equal(visible("\u200b\u2028\ufeff"), "⟨200B⟩⟨2028⟩⟨FEFF⟩");
});

test("no character that turns the line around survives", () => {
  const turned = visible("\u202eevil\u202c \u2066x\u2069\u200f");
  assert.doesNotMatch(turned, /[\u200e\u200f\u202a-\u202e\u2066-\u2069]/);
  assert.equal(visible("שלום"), "שלום");
});

test("a lone accent gets something to sit on, half a character is spelled out", () => {
  assert.equal(visible("\u0301"), "◌\u0301");
  assert.equal(visible("\ud83d"), "⟨D83D⟩");
});

test("long texts are shortened by whole characters", () => {
  assert.equal(shorten("abcdef", 6), "abcdef");
  assert.equal(Array.from(shorten("x".repeat(500), 12)).length, 12);
  assert.equal(Array.from(shorten("😀".repeat(50), 9)).length, 9);
  assert.doesNotMatch(shorten("😀".repeat(50), 3), /\p{Cs}/u);
});

test("tokens without a text, or with an empty one, have a name", () => {
  const trace = { vocab: { 1: "", 2: " a" } };
  assert.deepEqual([0, 1, 2, null].map((token) => label(trace, token)), ["#0", "∅", "·a", "?"]);
  assert.equal(spoken(trace, 2), "' a'");
});

test("two probabilities never read as equal when they are not, nor as 0 when they are not", () => {
  assert.deepEqual(pair(0.412, 0.83), ["0.41", "0.83"]);
  assert.deepEqual(pair(0.412, 0.414), ["0.412", "0.414"]);
  assert.deepEqual(pair(0.5, 0.0004), ["0.5000", "0.0004"]);
  assert.deepEqual(pair(0.5, 0), ["0.50", "0.00"]);
  assert.equal(pair(0.5, 0.0000004)[1], "<0.0001");
  assert.deepEqual([0, 1, 0.5, 0.00001, 0.99999, null].map(prob), ["0", "1", "0.50", "<0.0001", ">0.9999", "–"]);
});

test("times read as times", () => {
  assert.deepEqual([1200, 1.2e6, 41e6, 2.5e9, null].map(duration), ["1 µs", "1.2 ms", "41 ms", "2.5 s", "–"]);
});

test("verdicts in words", () => {
  const trace = { header: { verifier: "chain" }, vocab: {} };
  assert.equal(ruleOf(trace, { p_eff: 0.5, q_eff: 0.6, u: 0.41, accepted: true }), "accepted: u 0.41 < 0.83");
  assert.equal(ruleOf(trace, { p_eff: 0.06, q_eff: 0.6, u: 0.41, accepted: false }), "rejected: u 0.41 ≥ 0.10");
  assert.match(ruleOf({ header: { verifier: "match" } }, { p_eff: 0.5, q_eff: 1, u: 0.4, accepted: true }), /target's own draw/);
  assert.match(ruleOf(trace, { accepted: true }), /no coin/);
});

test("every rule says what it compares, and the lossy ones that they are", () => {
  const test_ = { p_eff: 0.5, q_eff: 1, u: 0.09, accepted: true };
  const words = (verifier) => ruleOf({ header: { verifier }, vocab: {} }, test_);
  assert.equal(words("traversal"), "accepted: u 0.09 < 0.50");
  assert.equal(words("typical"), "accepted: p 0.50 > 0.09");
  for (const verifier of ["typical", "relaxed", "lenient"]) {
    assert.match(ruleBook({ header: { verifier } }).note, /lossy/);
    const state = { kind: "emit", emission: { kind: "residual", token: 0 } };
    assert.doesNotMatch(caption({ header: { verifier }, vocab: {} }, state, { nodes: { parent: [-1] } }, [], 1), /exact/);
  }
  assert.ok(["block", "traversal"].every((verifier) => ruleBook({ header: { verifier } }).path));
});

test("every state of a trace has a caption that names no undefined", () => {
  const trace = makeTrace([[], chain(3), [3, 2, 1]], 4);
  trace.rounds[2].cut = { reason: "length", kept: 1 };
  const line = events(trace);
  for (let place = 0; place < line.total; place++) {
    const state = stateAt(trace, line.at(place));
    const round = trace.rounds[state.round];
    const words = caption(trace, state, round, testsOf(round), emits(round).length);
    assert.match(words, /^[\p{L}\p{N}].*\.$/u);
    assert.doesNotMatch(words, /undefined|NaN|null/);
  }
});

test("what was chosen and not drawn is not said to be sure of itself", () => {
  const trace = makeTrace([[2, 1]]);
  const round = trace.rounds[0];
  const line = events(trace);
  const states = Array.from({ length: line.total }, (_, place) => stateAt(trace, line.at(place)));
  const said = () => states.filter((state) => state.kind === "grow")
    .map((state) => caption(trace, state, round, testsOf(round), emits(round).length));
  for (const words of said()) assert.match(words, /^The drafter guesses .* A thick edge means it is sure/);
  round.nodes.draw = round.nodes.draw.map((draw) => draw && "deterministic");
  assert.equal(said().length, 2);
  for (const words of said()) assert.match(words, /^The drafter chooses .*\. Nothing is drawn, so q counts as 1\.$/);
});
