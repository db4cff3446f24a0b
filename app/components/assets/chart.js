// Live chart: Plotly.react on one lasting node, so zoom, pan and legend survive every tick.
// Plotly itself is served from the installed plotly package; nothing comes from the network.
import { colours } from "./theme.js";

const PLOTLY = new URL("../counterpoise-plotly.asset/plotly.min.js", import.meta.url).href;

function plotly() {
  window.__counterpoisePlotly ??= new Promise((resolve, reject) => {
    if (window.Plotly) return resolve(window.Plotly);
    const script = document.createElement("script");
    script.src = PLOTLY;
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => reject(new Error("The chart library could not be loaded from the dashboard's server."));
    document.head.appendChild(script);
  });
  return window.__counterpoisePlotly;
}

function axis(theme, own) {
  const line = theme.dark ? "rgba(255,255,255,0.14)" : "rgba(0,0,0,0.12)";
  return { gridcolor: line, zerolinecolor: line, linecolor: line, tickcolor: line, automargin: true, ...own };
}

export default function ({ data, parentElement }) {
  let node = [...parentElement.children].find((child) => child.classList.contains("cp-chart"));
  if (!node) {
    node = document.createElement("div");
    node.className = "cp-chart";
    node.style.width = "100%";
    parentElement.appendChild(node);
    // Also called when the page hides the node, which Plotly refuses to resize
    node.resizer = new ResizeObserver(() => {
      if (node.data && node.isConnected && node.clientWidth > 0) window.Plotly.Plots.resize(node).catch(() => {});
    });
    node.resizer.observe(node);
  }
  node.style.height = `${data.height}px`;
  node.setAttribute("role", "figure");
  node.setAttribute("aria-label", data.label);
  const theme = colours(parentElement);
  const layout = { uirevision: "keep", paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 8, r: 8, t: 8, b: 8 }, hovermode: "x unified", showlegend: false, dragmode: "zoom",
    font: { family: theme.font, size: 12, color: theme.text },
    hoverlabel: { bgcolor: theme.background, bordercolor: theme.text, font: { color: theme.text } }, ...data.layout };
  for (const name of Object.keys(layout)) if (/^[xy]axis\d*$/.test(name)) layout[name] = axis(theme, layout[name]);
  const config = { responsive: false, displaylogo: false, displayModeBar: data.toolbar ? "hover" : false,
    plotlyServerURL: "",
    modeBarButtonsToRemove: ["select2d", "lasso2d", "toImage", "sendChartToCloud"], doubleClick: "reset" };
  plotly().then((lib) => node.isConnected && lib.react(node, data.traces, layout, config))
    .then(() => { node.dataset.draws = String(Number(node.dataset.draws ?? 0) + 1); })
    .catch((error) => { node.textContent = error.message; });
  return () => {
    node.resizer.disconnect();
    if (window.Plotly && node.data) window.Plotly.purge(node);
  };
}
