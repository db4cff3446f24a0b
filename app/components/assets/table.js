// A real HTML table: numbers right-aligned, times in the viewer's zone with UTC on hover, rows keyed so
// that new ones show for a moment. With `selectable`, a click or Enter hands the row's id to Python.
import { anchor, duration, fill, h, mark, moment, root, utc } from "./theme.js";

const CSS = `
.scroll { overflow-x: auto; } .tall { max-height: var(--max); overflow-y: auto; }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; font-weight: 500; font-size: 12px; color: var(--muted); position: sticky; top: 0; background: var(--st-background-color); }
th, td { padding: 3px 14px 3px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th:last-child, td:last-child { padding-right: 2px; }
.r { text-align: right; white-space: nowrap; width: 1%; padding-left: 10px; } .n { white-space: nowrap; width: 1%; } .w { min-width: 13em; overflow-wrap: anywhere; }
td .mark { vertical-align: text-bottom; margin-right: 6px; }
tr.on td { background: color-mix(in srgb, var(--st-primary-color) 14%, transparent); }
tr.strong td { font-weight: 600; }
tr[tabindex] { cursor: pointer; } tr[tabindex]:hover td { background: var(--soft); }
tr[tabindex]:focus-visible { outline: 2px solid var(--st-primary-color); outline-offset: -2px; }
tr.fresh td { animation: fresh 6s ease-out; }
@keyframes fresh { from { background: color-mix(in srgb, var(--st-primary-color) 30%, transparent); } to { background: transparent; } }
.changed { text-decoration: underline dotted; text-underline-offset: 3px; font-weight: 600; }
.sub { display: block; font-weight: 400; font-size: 12px; line-height: 1.35; }
.empty { padding: 6px 0; }
`;
const states = new WeakMap();

function content(cell, at) {
  if (cell === null || typeof cell !== "object") return { nodes: [String(cell ?? "")] };
  if (cell.time !== undefined) return { nodes: moment(cell.time), title: utc(cell.time) };
  if (cell.age !== undefined) return { nodes: [duration(at.since(cell.age)) + " ago"], title: utc(cell.age) };
  return { changed: cell.changed, nodes: [cell.look && mark(cell.look), cell.text, cell.sub && h("small", { class: "sub muted" }, cell.sub)].filter(Boolean), title: cell.title };
}

function draw(state) {
  const { data, node, at } = state;
  if (!data.rows.length) return fill(node, [h("div", { class: "empty muted" }, data.empty)]);
  const cls = { right: "r", wide: "w", plain: "n" };
  const head = h("tr", {}, data.columns.map((column) => h("th", { class: cls[column.kind], scope: "col", title: column.title }, column.label)));
  const body = data.rows.map((row) => {
    const fresh = state.seen && !state.seen.has(row.id) ? "fresh" : state.fresh.has(row.id) ? "fresh" : "";
    if (fresh) state.fresh.add(row.id);
    const on = row.id === data.selected ? "on" : "";
    return h("tr", { class: `${fresh} ${on} ${row.strong ? "strong" : ""}`, "data-id": row.id, tabindex: data.selectable ? "0" : null,
      "aria-selected": data.selectable ? String(Boolean(on)) : null },
    row.cells.map((cell, index) => {
      const { nodes, title, changed } = content(cell, at);
      return h("td", { class: cls[data.columns[index].kind], title }, ...(changed ? [h("span", { class: "changed" }, ...nodes)] : nodes));
    }));
  });
  const attributes = data.max_height ? { class: "scroll tall", style: `--max:${data.max_height}px`, tabindex: "0" } : { class: "scroll" };
  fill(node, [h("div", attributes, h("table", { "aria-label": data.label }, h("thead", {}, head), h("tbody", {}, body)))]);
}

export default function ({ data, parentElement, setStateValue }) {
  let state = states.get(parentElement);
  if (!state) {
    state = { node: root(parentElement, CSS), fresh: new Set() };
    states.set(parentElement, state);
    const pick = (event) => {
      const row = event.target.closest("tr[data-id]");
      if (row && state.data.selectable) state.select("row", row.dataset.id);
    };
    state.node.addEventListener("click", pick);
    state.node.addEventListener("keydown", (event) => event.key === "Enter" && pick(event));
  }
  state.select = setStateValue;
  state.data = data;
  state.at = anchor(data.now ?? 0);
  draw(state);
  const ids = data.rows.map((row) => row.id);
  state.seen = new Set(ids);
  state.fresh = new Set(ids.filter((id) => state.fresh.has(id)));
}
