// What all components share: theme colours from Streamlit's CSS variables, one style sheet, and a
// small DOM builder whose updates keep nodes (so that selection, hover and focus survive a tick).
// Text goes in as text, never as HTML.

const SHEET = `
:host { display: block; }
.cp { font-family: var(--st-font); color: var(--st-text-color); font-size: 13px; line-height: 1.45;
  font-variant-numeric: tabular-nums; --line: color-mix(in srgb, var(--st-text-color) 18%, transparent);
  --soft: color-mix(in srgb, var(--st-text-color) 6%, transparent);
  --muted: color-mix(in srgb, var(--st-text-color) 68%, var(--st-background-color)); }
.cp * { box-sizing: border-box; }
.muted { color: var(--muted); }
.zone { font-size: 11px; margin-left: 5px; }
.num { text-align: right; white-space: nowrap; }
.chip { display: inline-flex; align-items: center; gap: 5px; border: 1px solid var(--line);
  border-radius: 3px; padding: 0 6px; white-space: nowrap; }
.mark { display: inline-flex; align-items: center; justify-content: center; min-width: 16px; height: 16px;
  border-radius: 3px; font-size: 11px; font-weight: 700; padding: 0 3px; flex: none; }
.hatch { background-image: repeating-linear-gradient(135deg, var(--line) 0 2px, transparent 2px 6px); }
.sr { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
`;

const sheets = new Map();

function sheet(css) {
  if (!sheets.has(css)) {
    const made = new CSSStyleSheet();
    made.replaceSync(css);
    sheets.set(css, made);
  }
  return sheets.get(css);
}

/** The component's own root element inside its shadow root, with the shared and its own styles. */
export function root(parent, css = "") {
  // Not querySelector(":scope > .cp"): in a shadow root :scope matches nothing
  let node = [...parent.children].find((child) => child.className === "cp");
  if (!node) {
    parent.adoptedStyleSheets = [sheet(SHEET), sheet(css)];
    node = document.createElement("div");
    node.className = "cp";
    parent.appendChild(node);
  }
  return node;
}

/** h("div", {class: "x", title: "y"}, child, "text", [more]); null children are left out. */
export function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat(2)) {
    if (child !== null && child !== undefined && child !== false) node.append(child);
  }
  return node;
}

function morph(from, to) {
  if (from.nodeType !== to.nodeType || from.nodeName !== to.nodeName) {
    from.replaceWith(to);
    return;
  }
  if (from.nodeType === Node.TEXT_NODE) {
    if (from.data !== to.data) from.data = to.data;
    return;
  }
  for (const { name } of [...from.attributes]) if (!to.hasAttribute(name)) from.removeAttribute(name);
  for (const { name, value } of [...to.attributes]) {
    if (from.getAttribute(name) !== value) from.setAttribute(name, value);
  }
  fill(from, [...to.childNodes]);
}

/** Make `node` hold `children`, touching only what differs. */
export function fill(node, children) {
  const wanted = children.flat(2).filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (typeof child === "string" ? document.createTextNode(child) : child));
  const have = [...node.childNodes];
  wanted.forEach((child, index) => {
    if (index < have.length) morph(have[index], child);
    else node.append(child);
  });
  have.slice(wanted.length).forEach((extra) => extra.remove());
}

/** Resolved colours of the current theme, for canvas and charts. */
export function colours(parent) {
  const style = getComputedStyle(parent.host ?? parent);
  const get = (name) => style.getPropertyValue(name).trim();
  const background = get("--st-background-color") || "#ffffff";
  return { background, surface: get("--st-secondary-background-color"), text: get("--st-text-color"),
    accent: get("--st-primary-color"), font: get("--st-font"), dark: luminance(background) < 0.2 };
}

export function rgb(hex) {
  const text = hex.replace("#", "");
  const full = text.length === 3 ? [...text].map((c) => c + c).join("") : text;
  return [0, 2, 4].map((at) => parseInt(full.slice(at, at + 2), 16) || 0);
}

export function luminance(hex) {
  const [r, g, b] = rgb(hex).map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

/** Black or white, whichever reads better on `hex`. */
export function ink(hex) {
  return luminance(hex) > 0.18 ? "#000000" : "#ffffff";
}

/** A state mark: colour and letter together. `look` is {mark, colour, hatch, quiet, word}. */
export function mark(look) {
  if (!look) return null;
  const style = look.quiet
    ? `color:inherit;border:1px solid ${look.colour}`
    : look.hatch ? "border:1px solid var(--line)" : `background:${look.colour};color:${ink(look.colour)}`;
  return h("span", { class: look.hatch ? "mark hatch" : "mark", style, title: look.word, "aria-hidden": "true" }, look.mark);
}

/** "4 s", "3 min 05 s", "2 h 10 min": fixed shapes so that nothing jumps. */
export function duration(seconds) {
  const s = Math.max(0, Math.floor(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${String(s % 60).padStart(2, "0")} s`;
  return `${Math.floor(s / 3600)} h ${String(Math.floor((s % 3600) / 60)).padStart(2, "0")} min`;
}

export function clock(epoch) {
  const date = new Date(epoch * 1000);
  const today = new Date().toDateString() === date.toDateString();
  const time = date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
  return today ? time : `${date.toLocaleDateString([], { month: "short", day: "2-digit" })} ${time}`;
}

export function utc(epoch) {
  return new Date(epoch * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC";
}

/** A moment in the viewer's zone, with UTC beside where that is another. */
export function moment(epoch) {
  const away = new Date(epoch * 1000).getTimezoneOffset() !== 0;
  return [clock(epoch), h("small", { class: "zone muted" }, away ? `${utc(epoch).slice(11, 19)} UTC` : "UTC")];
}

/**
 * Remember when data arrived, so that ages and countdowns go on when the server is silent.
 * `since(epoch)` is the server's age of that moment plus what the browser's clock added.
 */
export function anchor(serverNow) {
  const received = performance.now();
  return { silent: () => (performance.now() - received) / 1000,
    since: (epoch) => serverNow - epoch + (performance.now() - received) / 1000 };
}
