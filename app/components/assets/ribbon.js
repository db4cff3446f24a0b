// Goodput ribbon: where the wall time went, as one bar whose parts add up, with seconds and share.
import { fill, h, root } from "./theme.js";

const CSS = `
.bar { display: flex; height: 22px; border: 1px solid var(--line); border-radius: 3px; overflow: hidden; gap: 1px; }
.part { min-width: 2px; }
.keys { display: grid; grid-template-columns: repeat(auto-fill, minmax(205px, 1fr)); gap: 2px 18px; margin-top: 8px; font-size: 12.5px; }
.key { display: grid; grid-template-columns: 12px 1fr auto 4.2em; gap: 7px; align-items: center; }
.swatch { width: 12px; height: 12px; border-radius: 2px; border: 1px solid var(--line); }
.bar.low { height: 12px; margin-bottom: 2px; }
.sum { margin-top: 6px; font-size: 12.5px; }
`;

export default function ({ data, parentElement }) {
  const paint = (part) => `background-color:${part.colour}`;
  const bar = h("div", { class: data.compact ? "bar low" : "bar", role: "img", "aria-label": data.label }, data.parts.filter((part) => part.share > 0)
    .map((part) => h("span", { class: part.hatch ? "part hatch" : "part", style: `${paint(part)};flex:${part.share} 1 0`, title: `${part.word}: ${part.text}` })));
  const keys = data.compact ? null : h("div", { class: "keys" }, data.parts.map((part) => h("div", { class: "key", title: part.title },
    h("span", { class: part.hatch ? "swatch hatch" : "swatch", style: paint(part) }),
    h("span", {}, part.word), h("span", { class: "num" }, part.text), h("span", { class: "num muted" }, part.percent))));
  fill(root(parentElement, CSS), [bar, keys, data.sum && h("div", { class: "sum muted" }, data.sum)]);
}
