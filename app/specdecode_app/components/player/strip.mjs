// Where you are: the scrubber. Above the slider every round is a column as high as the tokens it gave, so that the shape
// of a whole generation shows at a glance: tall columns are good guesses, short ones rejections.

import { emits } from "./replay.mjs";
import { svg } from "./tree.mjs";

export class Strip {
  constructor(picture, slider, seek) {
    Object.assign(this, { picture, slider });
    slider.addEventListener("input", () => seek(Number(slider.value), false));
    slider.addEventListener("change", () => seek(Number(slider.value), true));
  }

  build(trace, line) {
    const most = trace.rounds.reduce((high, round) => Math.max(high, emits(round).length), 1);
    const [accepted, last] = ["", ""].map(() => []);
    trace.rounds.forEach((round, i) => {
      const x = (1000 * line.starts[i]) / line.total;
      const wide = Math.max(0.4, (1000 * ((line.starts[i + 1] ?? line.total) - line.starts[i])) / line.total - Math.min(2, 200 / trace.rounds.length));
      const unit = 22 / most;
      const made = emits(round).length;
      const drafted = emits(round).filter(({ kind }) => kind === "draft").length;
      const column = (from, to) => `M${x.toFixed(2)} ${(24 - unit * from).toFixed(2)}h${wide.toFixed(2)}V${(24 - unit * to).toFixed(2)}h${(-wide).toFixed(2)}z`;
      if (drafted) accepted.push(column(0, drafted));
      if (made > drafted) last.push(column(drafted, made));
    });
    this.picture.replaceChildren();
    svg("path", this.picture, { class: "col-draft", d: accepted.join("") });
    svg("path", this.picture, { class: "col-last", d: last.join("") });
    this.needle = svg("rect", this.picture, { class: "needle", y: 0, width: 1.5, height: 26 });
    this.slider.max = String(line.total - 1);
    this.total = line.total;
  }

  show(place, words) {
    this.slider.value = String(place);
    this.slider.setAttribute("aria-valuetext", words);
    this.needle.setAttribute("x", String((1000 * place) / Math.max(1, this.total)));
  }
}
