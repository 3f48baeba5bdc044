// Where you are: the draft tree on the page, as SVG. It is told two states and how far it is between them, and draws
// that; it keeps no time and takes no decisions. Elements are kept and reused, and only what changed is written.

import { layout } from "./replay.mjs";
import { chosen, label, prob } from "./words.mjs";

const SVG = "http://www.w3.org/2000/svg";
const CHAR = 7.3;
const BAR = 46;
const FIELDS = 5; // x, y, opacity, share of the q bar shown, share of the p bar shown

export function svg(name, parent, attributes = {}) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  parent?.append(element);
  return element;
}

/** Set an attribute only where its value is new: a write costs far more than a comparison. */
function attr(element, name, value) {
  const written = (element.written ??= {});
  if (written[name] === value) return;
  written[name] = value;
  element.setAttribute(name, value);
}

/** From the units of `layout` to pixels: everything always fits; labels go where there is room for them. */
export function place(plan, width, height) {
  const chars = Math.min(14, Math.floor((width / (plan.columns + 0.7) - 44) / CHAR));
  const dy = Math.min(64, (height - 68) / Math.max(1, plan.rows - 1));
  const pills = chars >= 3 && dy >= 34;
  const room = (width - 56) / Math.max(1, plan.columns);
  const half = pills ? (chars * CHAR + 18) / 2 : Math.max(1.5, Math.min(7, dy * 0.42, Math.max(room * 0.36, 2.5)));
  const left = pills ? half + 10 : 22;
  const dx = Math.min(pills ? chars * CHAR + 96 : 210, (width - 2 * left - 12) / Math.max(1, plan.columns));
  const top = (height - (plan.rows - 1) * dy) / 2;
  return { pills, chars, half, left, dx, dy, top, x: (column) => left + column * dx, y: (row) => top + row * dy };
}

/** Where every node is and how much of it shows, five numbers a node, the emitted token last. */
export function poses(round, state, at) {
  const plan = layout(round);
  const { parent } = round.nodes;
  const out = new Float64Array((parent.length + 1) * FIELDS);
  const put = (i, x, y, ...rest) => out.set([at.x(x), at.y(y), ...rest], i * FIELDS);
  state.nodes.forEach(({ status, ghost, kept }, i) => {
    const hidden = status === "hidden";
    const from = hidden ? Math.max(0, parent[i]) : i;
    const opacity = hidden ? 0 : ghost ? (kept ? 0.45 : 0.14) : status === "skipped" ? 0.38 : 1;
    put(i, plan.x[from], plan.y[from], opacity, hidden ? 0 : 1, hidden || status === "drafted" ? 0 : 1);
  });
  const tip = round.path[round.path.length - 1];
  if (state.emission) put(parent.length, plan.emitted.x, plan.emitted.y, state.kind === "commit" ? 0.45 : 1, 0, 0);
  else put(parent.length, plan.x[tip], plan.y[tip], 0, 0, 0);
  return out;
}

function bend(x0, y0, x1, y1) {
  const middle = ((x0 + x1) / 2).toFixed(1);
  return `M${x0.toFixed(1)} ${y0.toFixed(1)}C${middle} ${y0.toFixed(1)} ${middle} ${y1.toFixed(1)} ${x1.toFixed(1)} ${y1.toFixed(1)}`;
}

export class Tree {
  constructor(element) {
    this.svg = element;
    this.edges = svg("g", element, { class: "edges" });
    this.items = svg("g", element, { class: "nodes" });
    this.ring = svg("rect", element, { class: "ring" });
    this.tags = ["active", "hover"].map((name) => this.makeTag(name));
    this.band = svg("rect", element, { class: "band", y: 0, width: 90, height: "100%", fill: "url(#sweep)", opacity: 0 });
    this.pool = [];
    element.addEventListener("pointerover", (event) => this.tag(1, this.pool.findIndex(({ node }) => node === event.target.closest(".node"))));
    element.addEventListener("pointerleave", () => this.tag(1, -1));
  }

  makeTag(name) {
    const group = svg("g", this.svg, { class: `tag ${name}` });
    return { group, back: svg("rect", group, { height: 20, rx: 5, y: -32 }), text: svg("text", group, { "text-anchor": "middle", y: -18 }) };
  }

  /** Prepare the elements of one round at one size; a no-op when neither changed. */
  prepare(trace, round, width, height) {
    if (this.round === round && this.width === width && this.height === height && this.trace === trace) return;
    Object.assign(this, { trace, round, width, height });
    this.at = place(layout(round), width, height);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.dataset.mode = this.at.pills ? "pills" : "dots";
    this.used = round.nodes.parent.length + 1;
    while (this.pool.length < this.used) this.pool.push(this.make());
    this.pool.forEach((item, i) => {
      for (const part of [item.node, item.edge]) attr(part, "display", i < this.used ? "inline" : "none");
      if (i < this.used) this.fit(item, i);
    });
    this.drawn = new Float64Array(this.used * FIELDS).fill(NaN);
    this.tag(1, -1);
  }

  make() {
    const node = svg("g", this.items, { class: "node" });
    return { node, edge: svg("path", this.edges, { class: "edge", fill: "none" }), box: svg("rect", node, { class: "box" }) };
  }

  /** Give an element its node: size, words, numbers. Only pills carry words; dots get them from a tag. */
  fit(item, i) {
    const { pills, half, chars, dy, dx } = this.at;
    const { parent, token, q, p } = this.round.nodes;
    const last = i === parent.length;
    const tip = this.round.path[this.round.path.length - 1];
    const words = pills ? label(this.trace, last ? this.round.emitted?.token : token?.[i], chars) : "";
    item.wide = pills ? Math.max(18, Math.min(half, (Array.from(words).length * CHAR + 18) / 2)) : half;
    item.high = pills ? 13 : half;
    item.from = last ? tip : parent[i];
    const bars = pills && !last && i > 0;
    item.q = bars ? q?.[i] ?? null : null;
    item.chosen = chosen(this.round, i);
    item.p = bars ? p?.[i] ?? null : null;
    this.frame(item.box, item, 0);
    const weight = last ? 0 : q?.[i] ?? 0.3;
    attr(item.edge, "stroke-width", (pills ? 1.2 + 8 * weight : Math.max(0.4, Math.min(1 + 5 * weight, dy))).toFixed(2));
    attr(item.edge, "class", last ? "edge out" : "edge");
    if (pills || item.text) this.dress(item, words, bars, pills && dx - 2 * item.wide > 62);
  }

  frame(rect, { wide, high }, grow) {
    attr(rect, "x", -wide - grow);
    attr(rect, "y", -high - grow);
    attr(rect, "width", 2 * (wide + grow));
    attr(rect, "height", 2 * (high + grow));
    attr(rect, "rx", (this.at.pills ? 8 : high) + grow);
  }

  /** The parts that only pills have: bars of q and p, words, the mark of a verdict. */
  dress(item, words, bars, roomy) {
    if (!item.text) {
      for (const [bar, y] of [["q", 16], ["p", 22]]) {
        item[`${bar}Track`] = svg("rect", item.node, { class: "track", x: -BAR / 2, y, width: BAR, height: 4, rx: 2 });
        item[`${bar}Bar`] = svg("rect", item.node, { class: `bar ${bar}`, x: -BAR / 2, y, width: 0, height: 4, rx: 2 });
      }
      item.text = svg("text", item.node, { class: "label", "text-anchor": "middle", dy: "0.35em" });
      item.odds = svg("text", item.node, { class: "odds", "text-anchor": "end" });
      item.mark = svg("use", item.node, { class: "mark", width: 16, height: 16 });
    }
    item.text.textContent = words;
    item.odds.textContent = roomy && item.q !== null && !item.chosen ? `q ${prob(item.q)}` : "";
    attr(item.odds, "x", -item.wide - 7);
    attr(item.odds, "y", -(5 + 4 * (item.q ?? 0)));
    attr(item.mark, "x", item.wide - 9);
    attr(item.mark, "y", -item.high - 9);
    for (const bar of ["q", "p"]) {
      attr(item[`${bar}Track`], "display", bars ? "inline" : "none");
      attr(item[`${bar}Bar`], "display", item[bar] === null ? "none" : "inline");
    }
  }

  /** Standing of every node: what does not move but changes at once. */
  stand(state) {
    const put = (item, status, kept) => {
      attr(item.node, "data-status", status);
      attr(item.edge, "data-status", status);
      attr(item.edge, "data-kept", String(kept));
      if (item.mark) attr(item.mark, "href", `#mark-${status}`);
    };
    state.nodes.forEach(({ status }, i) => put(this.pool[i], i === 0 && status !== "hidden" ? "root" : status, status === "accepted"));
    const last = state.nodes.length;
    put(this.pool[last], state.emission?.kind ?? "hidden", true);
    const active = state.nodes.findIndex((node) => node.active);
    this.active = state.kind === "emit" ? last : active;
    attr(this.ring, "display", this.active < 0 ? "none" : "inline");
    if (this.active >= 0) this.frame(this.ring, this.pool[this.active], this.at.pills ? 4 : 3);
    this.follow();
    this.tag(0, this.at.pills ? -1 : this.active);
  }

  /** The ring stays with the node it marks. */
  follow() {
    if (this.active >= 0) attr(this.ring, "transform", this.spotOf(this.active));
  }

  spotOf(i) {
    return `translate(${this.drawn[i * FIELDS].toFixed(2)} ${this.drawn[i * FIELDS + 1].toFixed(2)})`;
  }

  /** Words over a node: over the active one where nodes are dots, and over the one under the pointer everywhere. */
  tag(which, i) {
    const { group, back, text } = this.tags[which];
    const shown = i >= 0 && i < (this.used ?? 0) && this.drawn[i * FIELDS + 2] > 0;
    attr(group, "display", shown ? "inline" : "none");
    if (!shown) return;
    const { token, q, p, parent } = this.round.nodes;
    const last = i === parent.length;
    const numbers = last || !i ? "" : `  q ${prob(q?.[i])}  p ${prob(p?.[i])}`;
    const words = `${label(this.trace, last ? this.round.emitted?.token : token?.[i], which ? 40 : 18)}${which ? numbers : ""}`;
    text.textContent = words;
    const wide = Array.from(words).length * CHAR + 14;
    const x = Math.max(wide / 2 + 2, Math.min(this.width - wide / 2 - 2, this.drawn[i * FIELDS]));
    attr(back, "x", -wide / 2);
    attr(back, "width", wide);
    attr(group, "transform", `translate(${x.toFixed(1)} ${Math.max(34, this.drawn[i * FIELDS + 1] - this.pool[i].high + 8).toFixed(1)})`);
  }

  /** Draw the poses `share` of the way from `from` to `to`. */
  move(from, to, share) {
    const { drawn, pool } = this;
    const count = to.length / FIELDS;
    const moved = new Uint8Array(count);
    for (let i = 0; i < count; i++) {
      const item = pool[i];
      const k = i * FIELDS;
      const mix = (f) => (share >= 1 ? to[k + f] : from[k + f] + (to[k + f] - from[k + f]) * share);
      const [x, y, o, q, p] = [mix(0), mix(1), mix(2), mix(3), mix(4)];
      if (x !== drawn[k] || y !== drawn[k + 1]) {
        item.node.setAttribute("transform", `translate(${x.toFixed(2)} ${y.toFixed(2)})`);
        moved[i] = 1;
      }
      if (o !== drawn[k + 2]) {
        item.node.setAttribute("opacity", o.toFixed(3));
        item.edge.setAttribute("opacity", o.toFixed(3));
      }
      if (item.q !== null && q !== drawn[k + 3]) item.qBar.setAttribute("width", (BAR * item.q * q).toFixed(2));
      if (item.p !== null && p !== drawn[k + 4]) item.pBar.setAttribute("width", (BAR * item.p * p).toFixed(2));
      drawn[k] = x;
      drawn[k + 1] = y;
      drawn[k + 2] = o;
      drawn[k + 3] = q;
      drawn[k + 4] = p;
    }
    for (let i = 0; i < count; i++) {
      const parent = pool[i].from;
      if (parent < 0) attr(pool[i].edge, "display", "none");
      else if (moved[i] || moved[parent]) {
        const [a, b] = [parent * FIELDS, i * FIELDS];
        pool[i].edge.setAttribute("d", bend(drawn[a] + pool[parent].wide, drawn[a + 1], drawn[b] - pool[i].wide, drawn[b + 1]));
      }
    }
    if (moved[this.active]) this.follow();
  }

  /** The target's single pass: a light that crosses the tree while all bars of p grow together. */
  sweep(share) {
    attr(this.band, "opacity", share > 0 && share < 1 ? Math.sin(Math.PI * share).toFixed(3) : "0");
    attr(this.band, "x", (share * (this.width + 90) - 90).toFixed(1));
  }

  /** Where a node stands on the page, for the token that flies from there into the text. */
  spot(node) {
    return this.pool[node ?? this.round.nodes.parent.length].box.getBoundingClientRect();
  }
}

/** The height the tree wants: room for a label a row over the widest round of the trace, within what a screen can give. */
export function wantedHeight(trace) {
  let rows = 1;
  for (const round of trace.rounds.slice(0, 400)) rows = Math.max(rows, layout(round).rows);
  return Math.max(190, Math.min(420, 64 + 40 * rows));
}
