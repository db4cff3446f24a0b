// One incident in time: its parts to scale as a bar, then every moment with its time, how long after the
// first evidence it was, and a mark. The end of an open incident moves on in the browser.
import { duration, fill, h, mark, moment, root, utc } from "./theme.js";

const CSS = `
.bar { display: flex; height: 26px; border: 1px solid var(--line); border-radius: 3px; overflow: hidden; gap: 1px; }
.part { min-width: 5px; display: flex; align-items: center; justify-content: center; font-size: 12px; font-weight: 600; overflow: hidden; white-space: nowrap; }
.part span { padding: 0 4px; overflow: hidden; text-overflow: ellipsis; }
.ends { display: flex; justify-content: space-between; gap: 12px; font-size: 12px; margin: 3px 0 10px; flex-wrap: wrap; }
ol { list-style: none; margin: 0; padding: 0; }
li { display: grid; grid-template-columns: max-content 6.2em 18px minmax(0, 1fr); gap: 8px; padding: 3px 0; border-bottom: 1px solid var(--line); align-items: start; }
li .after { text-align: right; } li .text { overflow-wrap: anywhere; }
li.recovery .text, li.decision .text { font-weight: 600; }
.scroll { max-height: 420px; overflow-y: auto; }
@media (max-width: 520px) { li { grid-template-columns: 5.2em 18px minmax(0, 1fr); } li .when { grid-column: 1 / -1; font-size: 12px; text-align: left; } }
`;

function after(seconds) {
  return seconds < 60 ? `+${seconds.toFixed(1)} s` : `+${duration(seconds)}`;
}

export default function ({ data, parentElement }) {
  const bar = h("div", { class: "bar", role: "img", "aria-label": data.label }, data.stretches.map((part) =>
    h("span", { class: "part", style: `flex:${Math.max(part.share, 0.001)} 1 0;background:${part.colour};color:${part.ink}`, title: `${part.word}: ${part.text}` },
      part.share > 0.09 ? h("span", {}, part.word) : null)));
  const ends = h("div", { class: "ends muted" }, h("span", { title: utc(data.begin) }, "first evidence ", moment(data.begin)),
    h("span", {}, data.end ? ["recovered ", moment(data.end)] : "open: not recovered yet"));
  const rows = data.moments.map((one) => h("li", { class: one.kind },
    h("span", { class: "when num", title: utc(one.at) }, moment(one.at)),
    h("span", { class: "after muted" }, after(one.at - data.begin)), mark(one.look), h("span", { class: "text" }, one.text)));
  fill(root(parentElement, CSS), [bar, ends, h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Timeline" }, h("ol", {}, rows))]);
}
