"use strict";

// Tables sort by their headings: ascending, descending, then the order of the file.
const UNITS = {
  ns: 1e-9, us: 1e-6, ms: 1e-3, s: 1, min: 60, h: 3600,
  B: 1, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30,
};
const NUMBER = /^([-+±]?)([\d,]+(?:\.\d+)?(?:e[-+]?\d+)?) ?(\w*)(?: (\d+) s$)?/;

// The value of a cell such as "1.2 ms", in base units; NaN without one. Words need a sign.
function valueOf(text, words) {
  const found = NUMBER.exec(text);
  if (!found || (words && !found[1])) return NaN;
  const [, sign, digits, unit, seconds] = found;
  const size = Number(digits.replaceAll(",", "")) * (UNITS[unit] ?? 1) + Number(seconds ?? 0);
  return sign === "-" ? -size : size;
}

function sortBy(table, rows, column, direction) {
  const words = table.tHead.rows[0].cells[column].className === "words";
  const keyed = rows.map((row) => {
    const text = row.cells[column].textContent;
    return { row, text, value: valueOf(text, words) };
  });
  // Cells without a value stay at the end, whatever the direction.
  if (direction) keyed.sort((a, b) => {
    if (isNaN(a.value) || isNaN(b.value)) {
      if (isNaN(a.value) !== isNaN(b.value)) return isNaN(a.value) - isNaN(b.value);
      return direction * a.text.localeCompare(b.text, "en", { numeric: true });
    }
    return direction * (a.value - b.value);
  });
  table.tBodies[0].append(...keyed.map((each) => each.row));
}

for (const table of document.querySelectorAll("table[data-sorts]")) {
  const heads = [...table.tHead.rows[0].cells], rows = [...table.tBodies[0].rows];
  for (const [column, head] of heads.entries()) {
    if (!head.textContent) continue;
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const next = { ascending: "descending", descending: "" }[head.ariaSort] ?? "ascending";
      for (const each of heads) each.removeAttribute("aria-sort");
      if (next) head.ariaSort = next;
      sortBy(table, rows, column, { ascending: 1, descending: -1 }[next]);
    });
  }
}

// A link to something inside closed details opens them.
function reveal() {
  const place = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const closed = place?.closest("details");
  if (closed) closed.open = true;
}
addEventListener("hashchange", reveal);
reveal();

// Charts. The figures have the colours of light pages.
const LIGHT = { ink: "#24292f", grid: "#e4e8ee", axis: "#c3cad3", paper: "#ffffff" };
const DARK = { ink: "#e6edf3", grid: "#2b323b", axis: "#4a535e", paper: "#14181e" };
const IN_THE_DARK = {
  "#2b6cb0": "#6ea8e8", "#63a4dc": "#3d7cbf", "#173f6b": "#bcd8f5", "#7a5bb5": "#ab92e4", "#8a5a44": "#c08f78",
  "#c53d3d": "#f07a76", "#2f8f5b": "#52b881", "#a9c6e3": "#35577c", "#b5651d": "#d58a45",
  "#a04000": "#cf7437", "rgba(43,108,176,0.18)": "rgba(110,168,232,0.28)",
  "rgba(43,108,176,0.2)": "rgba(110,168,232,0.3)",
};
const PAPER_WIDTH = 640;
const prefersDark = matchMedia("(prefers-color-scheme: dark)");

function draw(place, onPaper = false) {
  let text = place.nextElementSibling.textContent;
  const dark = prefersDark.matches && !onPaper;
  const { ink, grid, axis, paper } = dark ? DARK : LIGHT;
  if (dark) for (const [from, to] of Object.entries(IN_THE_DARK)) {
    text = text.replaceAll(`"${from}"`, `"${to}"`);
  }
  const { data, layout } = JSON.parse(text);
  const lines = { gridcolor: grid, zerolinecolor: axis, linecolor: axis };
  layout.template = {
    layout: {
      font: { color: ink }, paper_bgcolor: paper, plot_bgcolor: paper, xaxis: lines, yaxis: lines,
      annotationdefaults: { bgcolor: `${paper}cc` },
    },
  };
  // Charts do not adapt to the width of paper by themselves.
  if (onPaper) layout.width = PAPER_WIDTH;
  // Dragging zooms and a double click resets; the mode bar would hide data.
  Plotly.react(place, data, layout, { responsive: true, displayModeBar: false });
}

// A click on a point goes to its row or its step, if the page has one.
function follow(place, { points: [point] }) {
  const number = parseInt(typeof point.y === "string" ? point.y : point.x);
  const id = `${place.dataset.rows}-${number}`;
  if (!document.getElementById(id)) return;
  location.hash = id;
  reveal();
}

function drawAll(onPaper = false) {
  for (const place of document.querySelectorAll(".chart")) draw(place, onPaper);
}

function start() {
  for (const place of document.querySelectorAll(".chart")) {
    place.closest("figure").hidden = false;
    try {
      draw(place);
      if (place.dataset.rows) place.on("plotly_click", (event) => follow(place, event));
    } catch (error) {
      // The other charts and the tables stay as they are.
      place.removeAttribute("role");
      place.textContent = `This chart cannot be drawn: ${error.message}`;
      place.classList.remove("chart");
    }
  }
  prefersDark.addEventListener("change", () => drawAll());
  addEventListener("beforeprint", () => drawAll(true));
  addEventListener("afterprint", () => drawAll());
}

// Plotly is in the page, compressed, or in a file beside it.
async function load(source) {
  const script = document.createElement("script");
  if (source.textContent) {
    const packed = Uint8Array.from(atob(source.textContent), (char) => char.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    script.textContent = await new Response(stream).text();
    document.head.append(script);
    return;
  }
  const file = source.dataset.plotly;
  script.src = file;
  await new Promise((resolve, reject) => {
    script.onload = resolve;
    script.onerror = () => reject(new Error(`the file ${file} is not beside this page`));
    document.head.append(script);
  });
}

const source = document.getElementById("plotly");
if (source) load(source).then(start).catch((error) => {
  const line = document.getElementById("no-charts");
  line.hidden = false;
  line.textContent = `No charts: ${error.message}. The headline and the tables need none.`;
});
