// Big quiet numbers: label, value and unit right-aligned with fixed digits, one line of context.
import { fill, h, root } from "./theme.js";

const CSS = `
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(148px, 1fr)); gap: 8px; }
.tile { border: 1px solid var(--line); border-radius: 4px; padding: 8px 12px 7px; min-width: 0; }
.label { font-size: 12px; }
.value { text-align: right; font-size: 26px; font-weight: 600; line-height: 1.25; white-space: nowrap; }
.unit { font-size: 13px; font-weight: 400; margin-left: 4px; }
.sub { text-align: right; font-size: 12px; min-height: 1.45em; }
`;

export default function ({ data, parentElement }) {
  const tiles = data.tiles.map((tile) =>
    h("div", { class: "tile", role: "group", "aria-label": `${tile.label} ${tile.value} ${tile.unit}`, title: tile.title },
      h("div", { class: "label muted" }, tile.label),
      h("div", { class: "value" }, tile.value, h("span", { class: "unit muted" }, tile.unit)),
      h("div", { class: "sub muted" }, tile.sub ?? "")));
  fill(root(parentElement, CSS), [h("div", { class: "tiles" }, tiles)]);
}
