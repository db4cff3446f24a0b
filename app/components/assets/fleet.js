// The fleet as drawn hardware on one canvas: a frame a rack, a line a tray, a cell a GPU. One packed blob
// comes in (see app/components/fleet.py for its format); a click or arrow keys and Enter hand a GPU id out.
import { colours, fill, h, ink, mark, rgb, root } from "./theme.js";

const CSS = `
.scroll { overflow: auto; max-height: 72vh; }
canvas { display: block; cursor: pointer; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 8px 0 2px; font-size: 12.5px; }
.legend > span { display: inline-flex; gap: 6px; align-items: center; }
.legend b { font-weight: 600; }
.scale { width: 120px; height: 10px; border: 1px solid var(--line); border-radius: 2px; }
canvas:focus-visible { outline: 2px solid var(--st-primary-color); outline-offset: 2px; }
`;
const SIZES = [64, 52, 44, 36, 30, 24, 20, 16, 13, 11, 9];
const NO_VALUE = 65535;
const states = new WeakMap();

function unpack(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const length = view.getUint32(0, true);
  const head = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length)));
  const gpus = head.racks.reduce((sum, rack) => sum + rack.gpus, 0);
  const raw8 = bytes.subarray(4 + length, 4 + length + gpus);
  const looks = raw8.map((code) => code & 0x7f);
  const dim = raw8.map((code) => code >> 7);
  const raw = bytes.slice(4 + length + gpus, 4 + length + 3 * gpus);
  return { ...head, looks, dim, values: new Uint16Array(raw.buffer) };
}

/** Where everything goes at cell size `size`; racks fill lines from the left in a stable order. */
function place(data, width, size) {
  const gap = size > 16 ? 3 : 1;
  const pad = size > 16 ? 8 : 4;
  const head = size > 30 ? 40 : size > 16 ? 34 : 22;
  const racks = [];
  let x = 0, y = 0, line = 0, first = 0;
  for (const rack of data.racks) {
    const columns = Math.min(data.tray, rack.gpus);
    const w = Math.max(columns * (size + gap) - gap + 2 * pad, size > 16 ? 150 : 46);
    const tall = Math.ceil(rack.gpus / columns) * (size + gap) - gap + head + 2 * pad;
    if (x > 0 && x + w > width) { x = 0; y += line + 10; line = 0; }
    racks.push({ ...rack, x, y, w, h: tall, columns, pad, head, gap, size, first });
    x += w + 10;
    line = Math.max(line, tall);
    first += rack.gpus;
  }
  return { racks, height: y + line, size };
}

function layout(data, width) {
  for (const size of SIZES) {
    const placed = place(data, width, size);
    const widest = Math.max(...placed.racks.map((rack) => rack.w));
    if (placed.height <= Math.max(620, window.innerHeight * 0.68) && widest <= width) return placed;
  }
  return place(data, width, SIZES.at(-1));
}

function cellAt(rack, slot) {
  const step = rack.size + rack.gap;
  return [rack.x + rack.pad + (slot % rack.columns) * step, rack.y + rack.head + rack.pad + Math.floor(slot / rack.columns) * step];
}

function blend(a, b, t) {
  const [from, to] = [rgb(a), rgb(b)];
  return "#" + from.map((v, i) => Math.round(v + (to[i] - v) * t).toString(16).padStart(2, "0")).join("");
}

function drawHead(ctx, rack, theme, state) {
  ctx.strokeStyle = theme.dark ? "rgba(255,255,255,0.28)" : "rgba(0,0,0,0.26)";
  ctx.fillStyle = theme.surface;
  ctx.beginPath();
  ctx.roundRect(rack.x + 0.5, rack.y + 0.5, rack.w - 1, rack.h - 1, 4);
  ctx.fill();
  ctx.stroke();
  ctx.fillStyle = theme.text;
  ctx.textBaseline = "top";
  ctx.textAlign = "left";
  const small = rack.size <= 16;
  ctx.font = `600 ${small ? 10 : 12}px ${theme.font}`;
  ctx.fillText(rack.name, rack.x + rack.pad, rack.y + 5, rack.w - 2 * rack.pad);
  if (!small) {
    ctx.font = `11px ${theme.font}`;
    ctx.textAlign = "right";
    ctx.fillText(rack.power, rack.x + rack.w - rack.pad, rack.y + 6, rack.w * 0.72);
  }
  const barY = rack.y + (small ? 17 : 23);
  const barW = rack.w - 2 * rack.pad;
  const barH = small ? 3 : 5;
  ctx.fillStyle = theme.dark ? "rgba(255,255,255,0.16)" : "rgba(0,0,0,0.12)";
  ctx.fillRect(rack.x + rack.pad, barY, barW, barH);
  ctx.fillStyle = rack.share > 1 ? state.data.over : theme.text;
  ctx.globalAlpha = rack.share > 1 ? 1 : 0.55;
  ctx.fillRect(rack.x + rack.pad, barY, barW * Math.min(1, rack.share), barH);
  ctx.globalAlpha = 1;
}

function hatch(ctx, x, y, s, theme) {
  ctx.save();
  ctx.beginPath();
  ctx.rect(x, y, s, s);
  ctx.clip();
  ctx.strokeStyle = theme.dark ? "rgba(255,255,255,0.3)" : "rgba(0,0,0,0.28)";
  ctx.beginPath();
  for (let d = -s; d < s; d += 5) { ctx.moveTo(x + d, y + s); ctx.lineTo(x + d + s, y); }
  ctx.stroke();
  ctx.strokeRect(x + 0.5, y + 0.5, s - 1, s - 1);
  ctx.restore();
}

function drawCell(ctx, rack, slot, theme, state) {
  const { data } = state;
  const [x, y] = cellAt(rack, slot);
  const s = rack.size;
  const look = data.palette[data.looks[rack.first + slot]];
  const raw = data.values[rack.first + slot];
  const byState = data.lens.id === "state";
  const small = s < 20;
  // 64 shades are enough for the eye, and a cache of them for the clock
  const shade = byState || raw === NO_VALUE ? -1 - data.looks[rack.first + slot] : raw >> 10;
  let face = state.faces.get(shade);
  if (face === undefined) {
    face = shade >= 0 ? blend(theme.surface, data.lens.colour, 0.08 + 0.92 * (shade / 63))
      : look.quiet ? blend(theme.surface, look.colour, small ? 0.5 : 0.3) : look.hatch ? theme.surface : look.colour;
    state.faces.set(shade, face);
  }
  ctx.globalAlpha = data.dim[rack.first + slot] ? 0.22 : 1;
  ctx.fillStyle = face;
  ctx.fillRect(x, y, s, s);
  if (look.hatch) hatch(ctx, x, y, s, theme);
  else if ((look.quiet && !small) || (!byState && !look.quiet)) {
    ctx.strokeStyle = look.colour;
    ctx.lineWidth = byState || look.quiet ? 1 : 2;
    ctx.strokeRect(x + 0.5, y + 0.5, s - 1, s - 1);
    ctx.lineWidth = 1;
  }
  const text = byState ? look.mark : raw === NO_VALUE ? look.mark : s >= 30 ? label(data.lens, raw) : look.quiet ? "" : look.mark;
  if (s >= 9 && text && !(look.quiet && small)) {
    ctx.fillStyle = ink(face);
    ctx.textAlign = "center";
    ctx.textBaseline = "middle";
    ctx.font = `${byState ? 700 : 500} ${Math.min(byState ? 15 : 12, Math.round(s * 0.6))}px ${theme.font}`;
    ctx.fillText(text, x + s / 2, y + s / 2 + (s >= 44 ? 4 : 0.5), s - 2);
    if (s >= 44) {
      ctx.font = `9px ${theme.font}`;
      ctx.textAlign = "left";
      ctx.textBaseline = "top";
      ctx.fillText(String(slot) + (!byState && !look.quiet ? ` ${look.mark}` : ""), x + 3, y + 3);
    }
  }
  ctx.globalAlpha = 1;
}

function label(lens, raw) {
  return (lens.low + (raw / (NO_VALUE - 1)) * (lens.high - lens.low)).toFixed(lens.digits);
}

function ring(ctx, state, slotIndex, colour, dash) {
  const rack = state.placed.racks.findLast((one) => one.first <= slotIndex);
  if (!rack || slotIndex < 0) return;
  const [x, y] = cellAt(rack, slotIndex - rack.first);
  ctx.strokeStyle = colour;
  ctx.lineWidth = 2;
  ctx.setLineDash(dash);
  ctx.strokeRect(x - 2, y - 2, rack.size + 4, rack.size + 4);
  ctx.setLineDash([]);
  ctx.lineWidth = 1;
}

function draw(state) {
  const { data, canvas, parent } = state;
  const theme = colours(parent);
  const width = Math.floor(state.scroll.clientWidth) - 2;
  if (width < 40) return;
  state.placed = layout(data, width);
  const ratio = window.devicePixelRatio || 1;
  const need = Math.max(width, ...state.placed.racks.map((rack) => rack.x + rack.w)) + 2;
  const tall = state.placed.height + 6;
  if (canvas.width !== Math.round(need * ratio) || canvas.height !== Math.round(tall * ratio)) {
    canvas.width = Math.round(need * ratio);
    canvas.height = Math.round(tall * ratio);
    canvas.style.width = `${need}px`;
    canvas.style.height = `${tall}px`;
  }
  const ctx = canvas.getContext("2d");
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  ctx.clearRect(0, 0, need, tall);
  state.faces = new Map();
  for (const rack of state.placed.racks) {
    drawHead(ctx, rack, theme, state);
    for (let slot = 0; slot < rack.gpus; slot += 1) drawCell(ctx, rack, slot, theme, state);
  }
  legend(state, theme);
  ring(ctx, state, indexOf(data, data.selected), theme.text, []);
  if (state.focused) ring(ctx, state, state.cursor, theme.accent, [3, 2]);
}

/** States with their counts, and the scale of the lens: the map in words. */
function legend(state, theme) {
  const { data } = state;
  const counts = new Array(data.palette.length).fill(0);
  data.looks.forEach((code, index) => { if (!data.dim[index]) counts[code] += 1; });
  const parts = data.palette.map((look, code) => counts[code] > 0 && h("span", {}, mark(look), `${look.word} `, h("b", {}, String(counts[code]))));
  const { lens } = data;
  const scale = lens.none ? h("span", {}, lens.none) : lens.id !== "state" && h("span", { class: "muted" }, `${lens.low.toFixed(lens.digits ? 1 : 0)}`,
    h("span", { class: "scale", style: `background:linear-gradient(90deg, ${blend(theme.surface, lens.colour, 0.08)}, ${lens.colour})` }),
    `${lens.high.toFixed(lens.digits ? 1 : 0)} ${lens.unit}`);
  fill(state.legend, [...parts, scale]);
}

function indexOf(data, gpu) {
  let first = 0;
  for (const rack of data.racks) {
    if (gpu && gpu.startsWith(rack.name + "/")) return first + Number(gpu.slice(rack.name.length + 1));
    first += rack.gpus;
  }
  return -1;
}

function idOf(state, index) {
  const rack = state.placed.racks.findLast((one) => one.first <= index);
  return rack ? `${rack.name}/${index - rack.first}` : null;
}

function hit(state, event) {
  const box = state.canvas.getBoundingClientRect();
  const [px, py] = [event.clientX - box.left, event.clientY - box.top];
  for (const rack of state.placed?.racks ?? []) {
    if (px < rack.x || px > rack.x + rack.w || py < rack.y || py > rack.y + rack.h) continue;
    const step = rack.size + rack.gap;
    const column = Math.floor((px - rack.x - rack.pad + rack.gap / 2) / step);
    const row = Math.floor((py - rack.y - rack.head - rack.pad + rack.gap / 2) / step);
    const slot = row * rack.columns + column;
    if (column >= 0 && column < rack.columns && row >= 0 && slot < rack.gpus) return rack.first + slot;
  }
  return -1;
}

function title(state, index) {
  const { data } = state;
  const value = data.lens.id === "state" || data.values[index] === NO_VALUE ? "" : `, ${label(data.lens, data.values[index])} ${data.lens.unit}`;
  return `${idOf(state, index)}: ${data.palette[data.looks[index]].word}${value}`;
}

function keys(state, event) {
  const tray = state.data.tray;
  const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -tray, ArrowDown: tray };
  if (event.key in moves) {
    state.cursor = Math.min(state.data.looks.length - 1, Math.max(0, state.cursor + moves[event.key]));
    state.canvas.setAttribute("aria-label", title(state, state.cursor));
  } else if (event.key === "Enter") state.select("gpu", idOf(state, state.cursor));
  else return;
  event.preventDefault();
  draw(state);
}

function start(parent) {
  const node = root(parent, CSS);
  fill(node, [h("div", { class: "scroll" }, h("canvas", { tabindex: "0", role: "application", "aria-label": "Racks and their GPUs: arrow keys move, Enter shows a GPU" })),
    h("div", { class: "legend" })]);
  const state = { parent, legend: node.lastChild, scroll: node.firstChild, canvas: node.querySelector("canvas"), cursor: 0, focused: false };
  state.canvas.addEventListener("click", (event) => {
    const index = hit(state, event);
    if (index >= 0) { state.cursor = index; state.select("gpu", idOf(state, index)); }
  });
  state.canvas.addEventListener("mousemove", (event) => {
    const index = hit(state, event);
    state.canvas.title = index >= 0 ? title(state, index) : "";
  });
  state.canvas.addEventListener("keydown", (event) => keys(state, event));
  state.canvas.addEventListener("focus", () => { state.focused = state.canvas.matches(":focus-visible"); draw(state); });
  state.canvas.addEventListener("blur", () => { state.focused = false; draw(state); });
  state.resizer = new ResizeObserver(() => state.data && draw(state));
  state.resizer.observe(state.scroll);
  return state;
}

export default function ({ data, parentElement, setStateValue }) {
  let state = states.get(parentElement);
  if (!state) states.set(parentElement, (state = start(parentElement)));
  state.select = setStateValue;
  state.data = unpack(data);
  const began = performance.now();
  draw(state);
  state.canvas.dataset.drawMs = (performance.now() - began).toFixed(2);
  return () => state.resizer.disconnect();
}
