// The answer in five seconds: is training healthy, what is lost, what waits for a person.
import { fill, h, mark, root } from "./theme.js";

const CSS = `
.verdict { display: grid; grid-template-columns: repeat(auto-fit, minmax(250px, 1fr)); border: 1px solid var(--line); border-radius: 4px; }
.part { padding: 9px 14px 10px; border-left: 4px solid var(--tone); min-width: 0; }
.part + .part { border-left-width: 4px; }
.what { font-size: 12px; } .sub { font-size: 12.5px; overflow-wrap: anywhere; }
.head { font-size: 17px; font-weight: 650; line-height: 1.3; display: flex; gap: 8px; align-items: baseline; overflow-wrap: anywhere; }
.head .mark { transform: translateY(-1px); }
`;

export default function ({ data, parentElement }) {
  const parts = data.parts.map((part) => h("div", { class: "part", role: "group", "aria-label": part.what, style: `--tone:${part.look.colour}` },
    h("div", { class: "what muted" }, part.what),
    h("div", { class: "head" }, mark(part.look), h("span", {}, part.head)),
    h("div", { class: "sub muted" }, part.sub)));
  fill(root(parentElement, CSS), [h("div", { class: "verdict" }, parts)]);
}
