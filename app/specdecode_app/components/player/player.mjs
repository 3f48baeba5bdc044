// Where you are: the component itself. It owns the cursor and the clock, listens to the controls and the keyboard, and
// asks the pure half for two states and the drawing half to show what lies between them.
// Streamlit calls the default export again on every change of data; what must survive is kept per place on the page.

import { PHASES, emits, events, join, stateAt, tellingCursor, testsOf } from "./replay.mjs";
import { caption } from "./words.mjs";
import { Tree, poses, wantedHeight } from "./tree.mjs";
import { Stream, element } from "./stream.mjs";
import { showCache, showPanel } from "./panel.mjs";
import { Strip } from "./strip.mjs";
import { ease, takeOff } from "./flight.mjs";

const LASTS = { root: 600, grow: 650, sweep: 1300, test: 1500, emit: 1500, commit: 1500 };
const MOVES = { root: 0.5, grow: 0.7, sweep: 0.75, test: 0.55, emit: 0.5, commit: 0.7 };
const MOVING = 300; // larger trees change at once instead of moving
const players = new WeakMap();

class Player {
  constructor(root, emit) {
    const find = (name) => root.querySelector(`[data-part="${name}"]`);
    Object.assign(this, { root, emit, find, frame: 0, playing: false, follow: false, cursor: null, costs: [] });
    this.board = find("board");
    this.tree = new Tree(find("tree"));
    this.stream = new Stream(find("stream"), (round, node) => this.visit(round, node));
    this.strip = new Strip(find("strip"), find("scrub"), (place, done) => this.seek(this.line.at(place), { report: done }));
    this.still = matchMedia("(prefers-reduced-motion: reduce)");
    this.listen();
  }

  listen() {
    const acts = {
      home: () => this.seek({ round: 0, event: 0 }), back: () => this.step(-1), play: () => this.toggle(), step: () => this.step(1),
      round: () => this.stepRound(1), unround: () => this.stepRound(-1), end: () => this.seek(this.line.at(this.line.total - 1)),
    };
    const keys = { ArrowRight: acts.step, ArrowLeft: acts.back, ArrowDown: acts.round, ArrowUp: acts.unround, " ": acts.play, Home: acts.home, End: acts.end };
    this.abort = new AbortController();
    const { signal } = this.abort;
    this.board.addEventListener("click", (event) => acts[event.target.closest("[data-act]")?.dataset.act]?.(), { signal });
    this.board.addEventListener("keydown", (event) => {
      const inside = event.composedPath()[0];
      if (event.ctrlKey || event.metaKey || event.altKey || inside.matches("select, input[type=checkbox]")) return;
      if (event.key === " " && inside.matches("button")) return;
      if (!keys[event.key] || !this.trace) return;
      event.preventDefault();
      keys[event.key]();
    }, { signal });
    this.resizes = new ResizeObserver(() => this.trace && this.settle());
    this.resizes.observe(this.find("pane"));
  }

  /** Take what Python sent: a whole trace, or a window of the rounds of one that is still being made. */
  take(data) {
    const same = this.trace?.id === data.id;
    const rounds = join(same ? this.trace.rounds : [], data.first, data.rounds);
    if (rounds === null) return this.emit("resend", data.id);
    const grew = rounds.length > (same ? this.trace.rounds.length : 0);
    const vocab = same ? { ...this.trace.vocab, ...data.vocab } : data.vocab;
    this.dark();
    this.running = data.live;
    if (same && !grew) return undefined;
    if (!same) {
      this.stop();
      this.cursor = null;
    }
    this.trace = { id: data.id, header: data.header, prompt: data.prompt, vocab, rounds };
    this.line = events(this.trace);
    this.board.hidden = rounds.length === 0;
    if (!rounds.length) return undefined;
    this.height = wantedHeight(this.trace);
    this.find("pane").style.height = `${this.height}px`;
    this.strip.build(this.trace, this.line);
    if (same && this.cursor) return this.live();
    this.follow = data.live;
    const start = data.live ? { round: 0, event: 0 } : data.at ?? tellingCursor(this.trace);
    this.cursor = this.line.at(this.line.place(start));
    this.settle();
    if (data.live) this.play();
    return undefined;
  }

  /** More rounds came: the film goes on if it was waiting for them, and is left alone otherwise. */
  live() {
    if (this.follow && !this.playing) this.play();
    else if (!this.frame) this.settle();
  }

  /** The colours follow Streamlit's theme: dark when its background is darker than its text. */
  dark() {
    const style = getComputedStyle(this.board);
    const light = (name) => {
      const hex = style.getPropertyValue(name).trim();
      const match = /^#(..)(..)(..)/.exec(hex);
      const parts = match ? match.slice(1).map((h) => parseInt(h, 16)) : (hex.match(/[\d.]+/g) ?? [255, 255, 255]).map(Number);
      return 0.3 * parts[0] + 0.6 * parts[1] + 0.1 * parts[2];
    };
    this.board.dataset.theme = light("--st-background-color") < 128 ? "dark" : "light";
  }

  state(cursor = this.cursor) {
    return stateAt(this.trace, cursor);
  }

  /** Draw the cursor's state as it stands, without motion. */
  settle() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.clear();
    if (!this.cursor) return;
    const state = this.state();
    const pose = this.pose(state);
    this.tree.move(pose, pose, 1);
    this.tree.stand(state);
    this.tree.sweep(0);
    this.write(state);
  }

  pose(state) {
    const round = this.trace.rounds[state.round];
    this.tree.prepare(this.trace, round, this.find("pane").clientWidth, this.height);
    return poses(round, state, this.tree.at);
  }

  /** Everything but the tree: text, numbers, words, buttons. */
  write(state) {
    const round = this.trace.rounds[state.round];
    const made = emits(round).length;
    const words = caption(this.trace, state, round, testsOf(round), made);
    Object.assign(this.board.dataset, { phase: state.phase, kind: state.kind, cursor: `${state.round}.${state.event}` });
    this.find("caption").textContent = words;
    if (!this.playing || state.phase === "decide") this.find("speech").textContent = words;
    this.find("where").textContent = `Round ${state.round + 1} of ${this.trace.rounds.length}`;
    for (const item of this.board.querySelectorAll("[data-step]")) {
      const order = PHASES.indexOf(item.dataset.step) - PHASES.indexOf(state.phase);
      item.dataset.when = order < 0 ? "past" : order ? "future" : "now";
      if (order) item.removeAttribute("aria-current");
      else item.setAttribute("aria-current", "step");
    }
    this.stream.show(this.trace, state);
    showPanel(this.find("panel"), this.trace, state);
    showCache(this.find("kv"), state);
    this.strip.show(this.line.place(this.cursor), words);
    this.find("play").dataset.on = String(this.playing);
    this.find("play").setAttribute("aria-label", this.playing ? "Pause" : "Play");
  }

  /** Go on by one event with motion that takes `time` milliseconds, then call `done`. */
  glide(next, time, done) {
    const before = this.state();
    const state = this.state(next);
    const round = this.trace.rounds[next.round];
    const calm = next.round !== this.cursor.round || state.nodes.length > MOVING;
    cancelAnimationFrame(this.frame);
    this.clear();
    const from = calm ? null : this.pose(before);
    this.cursor = next;
    const to = this.pose(state);
    this.tree.move(from ?? to, from ?? to, 1);
    const verdict = state.phase === "decide";
    if (!verdict) this.tree.stand(state);
    this.board.style.setProperty("--verdict", `${time}ms`);
    this.board.dataset.moving = "true";
    this.write(state);
    const begin = performance.now();
    const flight = state.kind === "commit" ? takeOff(this.board, this.find("flight"), this.tree, this.stream.chips(state.round), emits(round)) : null;
    const draw = (now) => {
      const share = Math.min(1, Math.max(0, (now - begin) / time));
      const start = performance.now();
      if (verdict && share > 0.5) this.tree.stand(state);
      this.tree.move(from ?? to, to, from ? ease(share) : 1);
      if (state.kind === "sweep") this.tree.sweep(share);
      flight?.(share);
      this.cost(performance.now() - start);
      if (share < 1) this.frame = requestAnimationFrame(draw);
      else {
        this.frame = 0;
        this.clear();
        this.tree.stand(state);
        done();
      }
    };
    this.frame = requestAnimationFrame(draw);
  }

  cost(ms) {
    this.costs.push(ms);
    if (this.costs.length > 600) this.costs.shift();
    const sorted = this.costs.length % 20 ? null : [...this.costs].sort((a, b) => a - b);
    if (sorted) this.board.dataset.frameCost = sorted[Math.floor(0.95 * (sorted.length - 1))].toFixed(2);
  }

  clear() {
    this.find("flight").replaceChildren();
    for (const chip of this.board.querySelectorAll(".arriving")) chip.classList.remove("arriving");
    delete this.board.dataset.moving;
  }

  play() {
    if (this.playing) return;
    if (this.line.place(this.cursor) === this.line.total - 1 && !this.follow) this.cursor = { round: 0, event: 0 };
    this.playing = true;
    this.settle();
    this.next();
  }

  /** The next event of a film: move, rest, and stop where a phase ends if that was asked for. */
  next() {
    const place = this.line.place(this.cursor) + 1;
    if (place >= this.line.total) return this.wait();
    const cursor = this.catchUp(this.line.at(place));
    const { kind } = this.state(cursor);
    const busy = this.trace.rounds[cursor.round].nodes.parent.length / 12;
    const hurry = this.follow ? Math.max(1, (this.trace.rounds.length - cursor.round) / 1.5) : 1;
    const time = LASTS[kind] / Number(this.find("speed").value) / Math.max(1, busy * (kind === "test" || kind === "grow")) / hurry;
    const rest = () => {
      if (!this.playing) return;
      if (this.state().ends && this.find("autopause").checked && !this.follow) this.stop(true);
      else this.next();
    };
    const pause = (ms) => (this.timer = setTimeout(rest, ms));
    if (!this.still.matches && time > 40) return this.glide(cursor, time * MOVES[kind], () => pause(time * (1 - MOVES[kind])));
    this.cursor = cursor;
    this.settle();
    return pause(this.still.matches ? Math.max(time, 700) : time);
  }

  /** The film is at its end: of the run, or only of what has been decoded so far. */
  wait() {
    if (!(this.follow && this.running)) {
      this.follow = false;
      return this.stop(true);
    }
    this.playing = false;
    return this.settle();
  }

  /** While a run is live the film may not fall far behind: it jumps to the last rounds instead. */
  catchUp(cursor) {
    const newest = this.trace.rounds.length - 1;
    return this.follow && newest - cursor.round > 6 ? { round: newest - 2, event: 0 } : cursor;
  }

  stop(report = false) {
    clearTimeout(this.timer);
    const was = this.playing;
    this.playing = false;
    this.settle();
    if (was && report) this.report();
  }

  toggle() {
    if (!this.playing) return this.play();
    this.follow = false;
    return this.stop(true);
  }

  step(by) {
    this.halt();
    const place = this.line.place(this.cursor) + by;
    if (place < 0 || place >= this.line.total) return;
    const next = this.line.at(place);
    if (by < 0 || this.still.matches) return this.seek(next);
    this.glide(next, LASTS[this.state(next).kind] * 0.4, () => this.report());
  }

  stepRound(by) {
    const { round, event } = this.cursor;
    const to = by < 0 && event > 0 ? round : round + by;
    if (to < this.trace.rounds.length) this.seek({ round: Math.max(0, to), event: 0 });
    else this.seek(this.line.at(this.line.total - 1));
  }

  halt() {
    clearTimeout(this.timer);
    [this.playing, this.follow] = [false, false];
    this.settle();
  }

  seek(cursor, { report = true } = {}) {
    clearTimeout(this.timer);
    [this.playing, this.follow] = [false, false];
    this.cursor = this.line.at(this.line.place(cursor));
    this.settle();
    if (report) this.report();
  }

  /** Go to the event that decided a token of the text. */
  visit(round, node) {
    const tests = testsOf(this.trace.rounds[round]);
    for (let place = this.line.starts[round]; place < this.line.total; place++) {
      const cursor = this.line.at(place);
      const state = this.state(cursor);
      if (state.kind === "emit" || (state.kind === "test" && String(tests[state.test].node) === node)) return this.seek(cursor);
    }
    return undefined;
  }

  report() {
    this.emit("cursor", { ...this.cursor });
  }

  leave() {
    this.stop();
    this.abort.abort();
    this.resizes.disconnect();
  }
}

export default function ({ data, parentElement, setStateValue, setTriggerValue }) {
  const emit = (name, value) => (name === "cursor" ? setStateValue(name, value) : setTriggerValue(name, value));
  let player = players.get(parentElement);
  if (!player || !parentElement.contains(player.board)) {
    player?.leave();
    player = new Player(parentElement, emit);
    players.set(parentElement, player);
  }
  player.emit = emit;
  player.take(data);
  return () => {
    player.leave();
    players.delete(parentElement);
  };
}
