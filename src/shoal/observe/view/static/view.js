"use strict";
// Draws the charts and follows a run that is written. Texts of a run only ever become text nodes.
const EVERY_MS = 3000, WINDOWS_PER_LINE = 12;
const COLORS = ["#2f6fd6", "#e0762b", "#2c9c69", "#b054c4", "#c9433f", "#8a7a1f", "#2a9db0", "#7a6be0"];
const DASHES = ["solid", "dot", "dash", "dashdot"];
const holder = document.getElementById("charts");
let stamp = "", charts = [], bars = [];

function smoothed(y, span) {
  const window = [];
  let sum = 0;
  return y.map((value) => {
    if (value === null) return null;
    window.push(value);
    sum += value;
    if (window.length > span) sum -= window.shift();
    return sum / window.length;
  });
}

function trace(line, chart, span) {
  const runs = [...new Set(charts.flatMap((one) => one.lines.map((other) => other.run)))];
  const names = [...new Set(chart.lines.map((other) => other.name))];
  const several = runs.length > 1;
  const color = COLORS[(several ? runs.indexOf(line.run) : names.indexOf(line.name)) % COLORS.length];
  const label = several ? (names.length > 1 ? `${line.run} ${line.label}` : line.run) : line.label;
  const main = {
    x: line.x, y: smoothed(line.y, span), name: label.replaceAll("<", "\u2039"), type: "scatter", mode: line.x.length < 60 ? "lines+markers" : "lines",
    line: { color, width: 2, dash: several ? DASHES[names.indexOf(line.name) % DASHES.length] : "solid" },
    marker: { size: 4 }, connectgaps: true, hovertemplate: chart.is_share ? "%{y:.1%}" : "%{y:.4~g}",
  };
  return span > 1 ? [main, { ...main, y: line.y, mode: "lines", line: { color, width: 1 }, opacity: 0.3, zorder: -1, showlegend: false, hoverinfo: "skip", hovertemplate: undefined }] : [main];
}

function draw(chart, index, span) {
  let box = holder.children[index];
  if (!box || box.dataset.title !== chart.title) {
    box = document.createElement("section");
    box.className = "chart";
    box.dataset.title = chart.title;
    const title = document.createElement("h2"), plot = document.createElement("div");
    title.textContent = chart.title;
    title.title = [...new Set(chart.lines.map((line) => `${line.label}: ${line.means}`))].join("\n");
    plot.className = "plot";
    box.append(title, plot);
    holder.children[index] ? holder.children[index].replaceWith(box) : holder.append(box);
  }
  const { axis, ...look } = theme();
  const longest = Math.max(...chart.lines.map((line) => line.x.length));
  const window = span || Math.max(1, Math.round(longest / WINDOWS_PER_LINE));
  const layout = {
    ...look, margin: { l: 44, r: 12, t: 6, b: 30 }, hovermode: "x unified", uirevision: "kept", dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    xaxis: { ...axis, title: { text: "step", standoff: 4 } }, yaxis: { ...axis, tickformat: chart.is_share ? ".0%" : "", rangemode: "tozero", type: chart.is_log ? "log" : "linear" },
    showlegend: chart.lines.length > 1, legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 11 } },
  };
  Plotly.react(box.querySelector(".plot"), chart.lines.flatMap((line) => trace(line, chart, window)), layout, { responsive: true, displayModeBar: false });
}

function theme() {
  const style = getComputedStyle(document.documentElement), of = (name) => style.getPropertyValue(name).trim();
  return {
    paper_bgcolor: "transparent", plot_bgcolor: "transparent", font: { family: "system-ui, sans-serif", size: 12, color: of("--ink") },
    hoverlabel: { bgcolor: of("--paper"), bordercolor: of("--line"), font: { color: of("--ink") } },
    axis: { gridcolor: of("--line"), zerolinecolor: of("--line"), color: of("--muted"), automargin: true },
  };
}

function drawTimeline() {
  const box = document.getElementById("timeline");
  if (!box || !bars.length) return;
  box.hidden = false;
  const { axis, ...look } = theme();
  const kinds = [...new Set(bars.map((one) => `${one.lane}: ${one.does}`))];
  const traces = kinds.map((kind, at) => {
    const own = bars.filter((one) => `${one.lane}: ${one.does}` === kind);
    return {
      type: "bar", orientation: "h", name: kind, y: own.map((one) => one.lane), x: own.map((one) => one.took_s), base: own.map((one) => one.start_s),
      text: own.map((one) => `step ${one.step}: ${one.does}, ${one.took_s.toPrecision(3)} s`), textposition: "none", hovertemplate: "%{text}<extra></extra>",
      marker: { color: COLORS[at % COLORS.length], pattern: { shape: own[0].is_wait ? "/" : "" } },
    };
  });
  const layout = {
    ...look, barmode: "overlay", bargap: 0.25, margin: { l: 70, r: 12, t: 6, b: 36 }, uirevision: "kept", showlegend: true,
    legend: { orientation: "h", y: -0.2, yanchor: "top", x: 0, font: { size: 11 } }, dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    xaxis: { ...axis, title: { text: "seconds of the run", standoff: 4 } }, yaxis: { ...axis, autorange: "reversed", fixedrange: true },
  };
  Plotly.react(box.querySelector(".plot"), traces, layout, { responsive: true, displayModeBar: false });
}

function drawAll() {
  drawTimeline();
  if (!charts.length) return;
  const span = Number(document.getElementById("smooth").value);
  holder.querySelectorAll(":scope > p").forEach((one) => one.remove());
  charts.forEach((chart, index) => draw(chart, index, span));
  while (holder.children.length > charts.length) holder.lastElementChild.remove();
  holder.dataset.drawn = charts.length;
}

async function refreshed() {
  const live = document.getElementById("live");
  const answer = live && (await fetch(location.href));
  if (!answer || !answer.ok) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html").getElementById("live");
  if (page) live.replaceWith(document.adoptNode(page));
}

async function follow() {
  try {
    const at = new URL(holder.dataset.source, location.href);
    at.searchParams.set("since", stamp);
    const answer = await fetch(at);
    if (answer.status === 200) {
      const first = stamp === "";
      ({ stamp, charts, timeline: bars } = await answer.json());
      drawAll();
      if (!first) await refreshed();
    }
    document.body.classList.remove("lost");
  } catch {
    document.body.classList.add("lost"); // shoal view was stopped; what is drawn stays
  }
  setTimeout(follow, document.hidden ? 5 * EVERY_MS : EVERY_MS);
}

for (const select of document.querySelectorAll("[data-submit]")) select.addEventListener("change", () => select.form.submit());
if (holder) {
  document.getElementById("smooth").addEventListener("change", drawAll);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  follow();
}
const steps = document.getElementById("steps");
if (steps) {
  steps.hidden = false;
  steps.form.action = "/rollouts#steps"; // which has the focus again on the next page, for the next key
  steps.addEventListener("input", () => { steps.form.elements.step.value = steps.value; });
  steps.addEventListener("change", () => steps.form.submit());
}
const by = document.getElementById("by");
if (by) by.addEventListener("change", () => {
  for (const token of document.querySelectorAll(".tokens span")) token.classList.replace(token.classList[0], `t${token.dataset.shades[by.selectedIndex]}`);
  document.getElementById("scale").textContent = by.selectedOptions[0].dataset.scale;
  for (const link of document.querySelectorAll("a[data-by]")) {
    const to = new URL(link.href);
    to.searchParams.set("by", by.value);
    link.href = to;
  }
  const here = new URL(location.href);
  here.searchParams.set("by", by.value);
  history.replaceState(null, "", here);
});
const asked = document.querySelector(".asked");
if (asked) { // jumps to an answer stop below the question, which stays in sight
  document.documentElement.style.scrollPaddingTop = `${asked.offsetHeight + 8}px`;
  document.querySelector(":target")?.scrollIntoView();
}
const says = document.getElementById("token");
if (says) {
  const show = ({ target }) => {
    if (!target.dataset.says) return;
    document.querySelector(".tokens .on")?.classList.remove("on");
    target.classList.add("on");
    says.textContent = `${JSON.stringify(target.textContent)} ${target.dataset.says}`;
  };
  const tokens = document.querySelector(".tokens");
  tokens.addEventListener("pointerover", show);
  tokens.addEventListener("click", show);
  tokens.addEventListener("keydown", (event) => {
    const steps = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }, way = steps[event.key];
    if (!way) return;
    event.preventDefault();
    const target = tokens.querySelector(".on")?.[way] ?? tokens.firstElementChild;
    show({ target });
    target.scrollIntoView({ block: "nearest" });
  });
}
