// Where you are: the last motion of a round. Accepted tokens and the one after them leave the tree and fly to their places
// in the text. Copies do the flying, over everything else; the tokens of the text appear when their copies have landed.

/** Slow, fast, slow: from a share of the time to a share of the way. */
export const ease = (t) => (t < 0.5 ? 4 * t * t * t : 1 - (2 - 2 * t) ** 3 / 2);

/** Make the copies; returns what puts them where they are at a share of the time. */
export function takeOff(board, layer, tree, chips, emitted) {
  const frame = board.getBoundingClientRect();
  const flyers = emitted.flatMap(({ node }, i) => {
    if (!chips[i]) return [];
    const [a, b] = [tree.spot(node), chips[i].getBoundingClientRect()];
    const flyer = chips[i].cloneNode(true);
    flyer.className += " flyer";
    layer.append(flyer);
    const start = [a.left + a.width / 2 - frame.left - b.width / 2, a.top + a.height / 2 - frame.top - b.height / 2];
    return [{ flyer, chip: chips[i], start, end: [b.left - frame.left, b.top - frame.top], late: Math.min(0.4, 0.08 * i) }];
  });
  for (const { chip } of flyers) chip.classList.add("arriving");
  return (share) => {
    for (const { flyer, start, end, late } of flyers) {
      const t = ease(Math.min(1, Math.max(0, (share - late) / (1 - late - 0.05))));
      const at = (axis) => (start[axis] + (end[axis] - start[axis]) * t).toFixed(1);
      flyer.style.transform = `translate(${at(0)}px, ${at(1)}px)`;
    }
  };
}
