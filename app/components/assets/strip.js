// Header strip: what runs, how it is, how old the numbers are. The age is counted here, so it goes on
// when the dashboard's server dies.
import { anchor, duration, fill, h, mark, root } from "./theme.js";

const CSS = `
.strip { display: flex; flex-wrap: wrap; align-items: center; gap: 4px 14px; padding: 6px 10px;
  border: 1px solid var(--line); border-radius: 4px; background: var(--st-secondary-background-color); }
.name { font-weight: 650; font-size: 14px; overflow-wrap: anywhere; }
.pair { white-space: nowrap; } .pair b { font-weight: 600; display: inline-block; text-align: right; }
.pair.policy, .pair.policy b { white-space: normal; overflow-wrap: anywhere; text-align: left; }
.age b { min-width: 3.2em; } .step b { min-width: 3.4em; }
.banner { margin-top: 6px; padding: 6px 10px; border-radius: 4px; border: 1px solid var(--line); border-left: 4px solid var(--tone, #cb9700); }
.emulated { border-style: dashed; font-weight: 600; }
.local { margin-top: 4px; font-size: 12px; }
`;
const SILENT_AFTER_S = 6;
const OLD_AFTER_S = 8;
const states = new WeakMap();

function draw(state) {
  const { data, at, node } = state;
  const age = data.updated_at ? at.since(data.updated_at) : null;
  const silent = at.silent() > SILENT_AFTER_S;
  const pair = (label, value, cls = "") => h("span", { class: `pair ${cls}` }, h("span", { class: "muted" }, label + " "), h("b", {}, value));
  const parts = [
    h("span", { class: "name" }, data.name),
    data.status && h("span", { class: "chip", role: "status" }, mark(data.status), data.status.word),
    data.emulated && h("span", { class: "chip emulated", title: "Pace, power and temperature come from a model, not from a device" }, "emulated"),
    ...data.pairs.map(([label, value]) => pair(label, value, label)),
    age !== null && pair(data.ended ? "ended, last data" : "data age", duration(age), "age"),
  ];
  const banners = [];
  if (silent) banners.push(h("div", { class: "banner", role: "alert" }, `The dashboard has not answered for ${duration(at.silent())}. The numbers below are old; the run does not depend on the dashboard. It reconnects by itself.`));
  else if (data.down) banners.push(h("div", { class: "banner", role: "alert" },
    age === null ? "Live data is away; reconnecting." : `Live data is ${duration(age)} old; the run goes on; reconnecting.`,
    h("div", { class: "muted" }, data.down.replaceAll("`", ""))));
  else if (age !== null && age > OLD_AFTER_S && !data.ended) banners.push(h("div", { class: "banner", role: "alert" }, `Live data is ${duration(age)} old: the store answers, but the run has written nothing since.`));
  if (data.reason) banners.push(h("div", { class: "banner", style: `--tone:${data.status ? data.status.colour : "#cb9700"}` }, data.reason));
  fill(node, [h("div", { class: "strip" }, ...parts), ...banners, data.note && h("div", { class: "local muted" }, data.note)]);
}

export default function ({ data, parentElement }) {
  let state = states.get(parentElement);
  if (!state) {
    state = { node: root(parentElement, CSS) };
    states.set(parentElement, state);
    state.timer = setInterval(() => draw(state), 500);
  }
  state.data = data;
  state.at = anchor(data.now);
  draw(state);
  return () => clearInterval(state.timer);
}
