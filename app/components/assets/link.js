// Copies the address that leads to what it stands by, wherever the dashboard was opened from.
import { fill, h, root } from "./theme.js";

const CSS = `
.link { display: flex; justify-content: flex-end; align-items: baseline; gap: 8px; }
button { font: inherit; font-size: 12.5px; color: inherit; background: none; border: 1px solid var(--line); border-radius: 4px; padding: 2px 9px; cursor: pointer; white-space: nowrap; }
button:hover { background: var(--soft); }
button:focus-visible { outline: 2px solid var(--st-primary-color); outline-offset: 1px; }
.url { overflow-wrap: anywhere; user-select: all; font-size: 12px; }
`;
const states = new WeakMap();

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // No clipboard without https: the older way, through a field
    const field = document.body.appendChild(h("textarea", { style: "position:fixed;opacity:0" }));
    field.value = text;
    field.select();
    const done = document.execCommand("copy");
    field.remove();
    return done;
  }
}

function draw(state) {
  const { node, url, said } = state;
  fill(node, [h("div", { class: "link" },
    said === "failed" && h("span", { class: "url" }, url),
    h("button", { type: "button", title: url }, said === "copied" ? "Copied" : "Copy link"),
    h("span", { class: "sr", role: "status" }, said === "copied" ? "The link is copied" : ""))]);
}

export default function ({ data, parentElement }) {
  let state = states.get(parentElement);
  if (!state) {
    state = { node: root(parentElement, CSS), said: "" };
    states.set(parentElement, state);
    state.node.addEventListener("click", async (event) => {
      if (!event.target.closest("button")) return;
      state.said = (await copy(state.url)) ? "copied" : "failed";
      draw(state);
      if (state.said === "copied") setTimeout(() => { state.said = ""; draw(state); }, 2500);
    });
  }
  const url = `${location.origin}${location.pathname}?${new URLSearchParams(data)}`;
  if (url !== state.url) state.said = "";
  state.url = url;
  draw(state);
}
