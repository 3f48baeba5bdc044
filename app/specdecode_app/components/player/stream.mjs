// Where you are: view A, the text as a row of tokens, each with the colour and the mark of where it came from.
// Tokens of rounds that the cursor has not reached are there already, faint, so that the text never jumps about; a click
// on a token goes to the event that made it. Long texts show the stretch around the cursor.

import { emits } from "./replay.mjs";
import { label, visible } from "./words.mjs";
import { svg } from "./tree.mjs";

const STRETCH = 480;
const PROMPT = 48;
const FROM = { draft: "draft token, accepted", residual: "replacement, drawn from the residual", bonus: "bonus token", target: "plain target token" };

export function element(name, className, parent, text) {
  const made = document.createElement(name);
  if (className) made.className = className;
  if (text != null) made.textContent = text;
  parent?.append(made);
  return made;
}

/** A small picture of a mark, in an element that screen readers skip. */
export function mark(kind, parent) {
  const holder = svg("svg", parent, { class: "icon", width: 12, height: 12, viewBox: "0 0 16 16", "aria-hidden": "true" });
  svg("use", holder, { href: `#mark-${kind}`, width: 16, height: 16 });
  return holder;
}

export function chip(trace, token, kind, parent, most = 22) {
  const made = element("span", `tok ${kind}`, parent);
  element("bdi", "", made, label(trace, token, most));
  if (kind !== "prompt") mark(kind, made);
  if (/^<\|.*\|>$/.test(trace.vocab[token] ?? "")) made.classList.add("special");
  return made;
}

export class Stream {
  constructor(parent, jump) {
    this.box = parent;
    this.jump = jump;
    parent.addEventListener("click", (event) => {
      const hit = event.target.closest("[data-token]");
      if (hit) this.jump(Number(hit.dataset.round), hit.dataset.node);
    });
  }

  /** Build the stretch of rounds around the cursor; a no-op while the cursor stays inside and no round was added. */
  build(trace, round) {
    const starts = this.counts(trace);
    const far = this.first === undefined || round < this.first || round >= this.end;
    const near = this.trace === trace && !far;
    if (near) return;
    let [first, end] = [round, round + 1];
    while (end < trace.rounds.length && starts[end] - starts[round] < STRETCH / 2) end++;
    while (first > 0 && starts[end] - starts[first - 1] < STRETCH) first--;
    Object.assign(this, { trace, first, end });
    this.rounds = new Map();
    this.box.replaceChildren();
    this.before(trace, starts, first);
    for (let i = first; i < end; i++) this.rounds.set(i, this.round(trace, i));
    const after = starts[trace.rounds.length] - starts[end];
    if (after) element("span", "more", this.box, `${after.toLocaleString("en")} more …`);
  }

  counts(trace) {
    if (this.counted !== trace) {
      this.starts = [0];
      for (const round of trace.rounds) this.starts.push(this.starts[this.starts.length - 1] + emits(round).length);
      this.counted = trace;
    }
    return this.starts;
  }

  before(trace, starts, first) {
    if (first) return element("span", "more", this.box, `… ${starts[first].toLocaleString("en")} before`);
    const hidden = Math.max(0, trace.prompt.length - PROMPT);
    const group = element("span", "prompt-tokens", this.box);
    element("span", "seam-name", group, "prompt");
    if (hidden) element("span", "more", group, `… ${hidden.toLocaleString("en")} before`);
    for (const token of trace.prompt.slice(hidden)) chip(trace, token, "prompt", group);
    return group;
  }

  round(trace, index) {
    const round = trace.rounds[index];
    const group = element("span", "round", this.box);
    group.title = `round ${index + 1}`;
    for (const { token, kind, node } of emits(round)) {
      const made = chip(trace, token, kind, group);
      Object.assign(made.dataset, { token: "", round: index, node: node ?? "emitted" });
      made.title = `${visible(trace.vocab[token] ?? "")} · round ${index + 1}: ${FROM[kind] ?? kind}`;
    }
    return group;
  }

  /** Fade what the cursor has not reached, and keep the current round in sight. */
  show(trace, state) {
    this.build(trace, state.round);
    for (const [index, group] of this.rounds) {
      const when = index < state.round || (index === state.round && state.phase === "commit") ? "past" : index === state.round ? "now" : "future";
      if (group.dataset.when !== when) group.dataset.when = when;
      const current = String(index === state.round);
      if (group.dataset.current !== current) group.dataset.current = current;
    }
    const group = this.rounds.get(state.round);
    const low = group.offsetTop - this.box.offsetTop;
    if (low < this.box.scrollTop || low + group.offsetHeight > this.box.scrollTop + this.box.clientHeight) {
      this.box.scrollTop = low - this.box.clientHeight / 2;
    }
  }

  /** The tokens of a round on the page, for those that fly in. */
  chips(round) {
    return [...(this.rounds.get(round)?.children ?? [])];
  }
}
