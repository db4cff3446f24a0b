// Head of a proposal: what, why, on what evidence, for which generation, how long it may be decided and by
// whom, and how far it has come. The countdown and the ages run in the browser.
import { anchor, duration, fill, h, mark, moment, root, utc } from "./theme.js";

const CSS = `
.top { display: flex; flex-wrap: wrap; gap: 4px 12px; align-items: center; }
.left { margin-left: auto; }
.title { font-size: 16px; font-weight: 650; } .cause { margin: 2px 0 6px; overflow-wrap: anywhere; }
.left { border: 1px solid var(--line); border-radius: 3px; padding: 1px 8px; white-space: nowrap; }
.left b { display: inline-block; min-width: 5.2em; text-align: right; font-weight: 600; }
.life { display: flex; flex-wrap: wrap; gap: 3px 6px; font-size: 12px; margin: 6px 0; padding: 0; list-style: none; }
.life li { border: 1px solid var(--line); border-radius: 3px; padding: 0 7px; color: var(--muted); }
.life li.past { border-style: solid; background: var(--soft); }
.life li.now { color: var(--st-text-color); font-weight: 650; border-color: var(--st-text-color); }
.facts { font-size: 12.5px; display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: 1px 12px; }
.facts dt { color: var(--muted); } .facts dd { margin: 0; overflow-wrap: anywhere; }
.old { font-weight: 650; }
.why { border-left: 4px solid var(--tone); padding: 4px 10px; margin: 6px 0; background: var(--soft); overflow-wrap: anywhere; }
`;
const CLOSE_S = 120;
const states = new WeakMap();

// Close to the age at which the runtime would look again before anything is approved, and beyond it.
function ageing(data, at) {
  if (!data.evidence_until) return null;
  const left = -at.since(data.evidence_until);
  if (left <= 0) return h("div", { class: "old" }, `too old by ${duration(-left)}: to approve it makes the runtime look again first`);
  return left < CLOSE_S ? h("div", { class: "old" }, `too old to approve on in ${duration(left)}`) : null;
}

function draw(state) {
  const { data, node, at } = state;
  const left = data.expires_at ? -at.since(data.expires_at) : null;
  const countdown = left === null ? null : h("span", { class: "left", role: "timer", title: `until ${utc(data.expires_at)}` },
    left > 0 ? h("span", {}, "expires in ", h("b", {}, duration(left))) : "expired: it can no longer be approved");
  const auto = data.auto_at && at.since(data.auto_at) < 0 ? `approved by policy in ${duration(-at.since(data.auto_at))}` : null;
  const evidence = data.evidence.map(([when, what]) => h("div", { title: utc(when) }, `${what} `, h("span", { class: "muted" }, `${duration(at.since(when))} ago`)));
  const given = data.approvals && [h("b", {}, data.approvals.count), ...data.approvals.given.map(([when, what]) => h("div", { title: utc(when) }, `${what} `, h("span", { class: "muted" }, moment(when), `, ${duration(at.since(when))} ago`)))];
  const facts = data.compact ? data.facts : [["evidence", [evidence.length ? evidence : "none recorded", ageing(data, at)]], given && ["approvals", given], ["proposed", h("span", { title: utc(data.created_at) }, moment(data.created_at), `, ${duration(at.since(data.created_at))} ago`)],
    ...data.facts, auto && ["unasked", auto]].filter(Boolean);
  fill(node, [
    h("div", { class: "top" }, h("span", { class: "title" }, data.title), h("span", { class: "chip" }, mark(data.look), data.look.word), countdown),
    h("div", { class: "cause muted" }, data.cause),
    !data.compact && h("ol", { class: "life", "aria-label": "life of the proposal" }, data.life.map(([word, place]) => h("li", { class: place, "aria-current": place === "now" ? "step" : null }, word))),
    data.why && h("div", { class: "why", role: "status", style: `--tone:${data.look.colour}` }, data.why),
    h("dl", { class: "facts" }, facts.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]))]);
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
