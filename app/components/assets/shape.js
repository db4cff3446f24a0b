// Shape strip: one row a replica, one cell a slot; state by colour and by mark.
import { fill, h, ink, mark, root } from "./theme.js";

const CSS = `
.rows { display: grid; grid-template-columns: minmax(84px, max-content) minmax(0, calc(var(--slots) * 46px)) max-content; gap: 4px 10px; align-items: center; }
.label { min-width: 0; } .label small { font-size: 11px; display: block; line-height: 1.2; }
.cells { display: flex; gap: 2px; flex-wrap: wrap; }
.cell { height: 22px; flex: 1 1 14px; max-width: 44px; min-width: 14px; border-radius: 3px; border: 1px solid transparent;
  display: flex; align-items: center; justify-content: center; font-size: 12px; font-weight: 700; }
.right { font-size: 12px; white-space: nowrap; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 12px; margin-top: 8px; font-size: 12px; }
.legend span { display: inline-flex; gap: 5px; align-items: center; }
.caption { font-size: 12px; margin-bottom: 4px; }
@media (max-width: 520px) { .rows { grid-template-columns: minmax(70px, max-content) minmax(0, 1fr); }
  .right { grid-column: 2; margin-bottom: 6px; } }
`;

function cell(look, title) {
  const style = look.hatch ? "border-color:var(--line)"
    : look.quiet ? `border-color:${look.colour};background:color-mix(in srgb, ${look.colour} 26%, transparent)`
      : `background:${look.colour};color:${ink(look.colour)}`;
  return h("span", { class: look.hatch ? "cell hatch" : "cell", style, title, role: "img", "aria-label": title }, look.mark);
}

export default function ({ data, parentElement }) {
  const rows = data.rows.map((row) => [
    h("div", { class: "label" }, row.label, h("small", { class: "muted" }, row.sub)),
    h("div", { class: "cells" }, row.codes.map((code, slot) => cell(data.looks[code], `slot ${slot}, GPU ${row.gpus ? row.gpus[slot] : row.prefix + slot}: ${data.looks[code].word}`))),
    h("div", { class: "right muted" }, row.right)]);
  // A row is as wide as its cells: what is said of it stands beside them, on a wall too
  const slots = Math.max(1, ...data.rows.map((row) => row.codes.length));
  const used = new Set(data.rows.flatMap((row) => row.codes));
  const legend = data.legend && h("div", { class: "legend muted" },
    data.looks.filter((_, code) => used.has(code)).map((look) => h("span", {}, mark(look), look.word)));
  fill(root(parentElement, CSS), [
    data.caption && h("div", { class: "caption muted" }, data.caption), h("div", { class: "rows", style: `--slots:${slots}` }, rows), legend]);
}
