// The heat map: a cell for each GPU, the cells of a node beside each other, on a canvas.
import { h, number, short } from "./dom.js";

const LIMITS = [-10, -5, -2, 2, 5, 10]; // of a deviation, percent of a step
const WORDS = ["< -10", "-10 to -5", "-5 to -2", "even", "2 to 5", "5 to 10", "> 10"];
const CLASSES = 7;

export function heatMap(picked = null) {
  const canvas = h("canvas", { tabindex: "0", role: "img", class: "heat", "aria-label": "heat map" });
  const readout = h("p", { class: "readout", role: "status" });
  const legend = h("p", { class: "legend" });
  const element = h("div", { class: "heatbox" }, canvas, legend, readout);
  let data = null, place = null, chosen = null;

  function color(value) {
    const style = getComputedStyle(document.documentElement);
    const of = (name, i) => style.getPropertyValue(`--${name}${i}`).trim();
    if (value === null || value === undefined) return null;
    if (data.centred) return of("div", LIMITS.filter((limit) => value >= limit).length);
    const { low, high } = data;
    return of("seq", high > low ? Math.min(CLASSES - 1, Math.floor(((value - low) / (high - low)) * CLASSES)) : 3);
  }

  function draw() {
    const width = element.clientWidth;
    if (!data || !data.nodes?.length || !width) {
      canvas.hidden = legend.hidden = true;
      if (data?.why) readout.textContent = data.why;
      return;
    }
    canvas.hidden = legend.hidden = false;
    const columns = data.columns.length, label = 8 + 7 * Math.max(...data.nodes.map((n) => String(n).length));
    const few = data.nodes.length * columns <= 64;
    const size = few ? 22 : width < 600 ? 11 : 13, gap = few ? 3 : 2, apart = 16;
    const block = label + columns * (size + gap) + apart;
    const across = Math.max(1, Math.min(data.nodes.length, Math.floor((width + apart) / block)));
    const down = Math.ceil(data.nodes.length / across), ratio = window.devicePixelRatio || 1;
    const height = down * (size + gap);
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.width = `${width}px`;
    canvas.style.height = `${height}px`;
    const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement);
    pen.scale(ratio, ratio);
    pen.font = `${Math.min(12, size)}px ${style.getPropertyValue("--mono")}`;
    pen.textBaseline = "middle";
    pen.textAlign = "right";
    place = (row, column) => [(row % across) * block + label + column * (size + gap), Math.floor(row / across) * (size + gap), size];
    data.nodes.forEach((node, row) => {
      const [left, top] = place(row, 0);
      pen.fillStyle = style.getPropertyValue("--dim");
      pen.fillText(String(node), left - 6, top + size / 2 + 1);
      data.values[row].forEach((value, column) => {
        const [x, y] = place(row, column), fill = color(value);
        pen.fillStyle = fill ?? style.getPropertyValue("--line");
        if (fill) pen.fillRect(x, y, size, size);
        else pen.fillRect(x, y + size / 2, size, 1); // nothing recorded
      });
    });
    if (chosen) {
      const [x, y] = place(...chosen);
      pen.strokeStyle = style.getPropertyValue("--text");
      pen.lineWidth = 2;
      pen.strokeRect(x, y, size, size);
    }
    legend.replaceChildren(...(data.centred ? WORDS : [0, 1, 2, 3, 4, 5, 6]).map((words, i) => {
      const box = h("i", { "aria-hidden": "true" });
      box.style.background = style.getPropertyValue(`--${data.centred ? "div" : "seq"}${i}`);
      const edge = i === 0 ? short(data.low) : i === CLASSES - 1 ? `${short(data.high)} ${data.unit}` : "";
      return h("span", {}, box, data.centred ? words : edge);
    }), data.centred ? h("span", {}, "% of a step against the median of the stage peers; nodes in rank order") : "");
  }

  function say() {
    if (!chosen || !data.nodes[chosen[0]]) return;
    const [row, column] = chosen, value = data.values[row][column];
    const rank = data.rank ? `rank ${row * data.columns.length + column}, ` : "";
    const device = data.rank ? "" : data.columns[column] === "node" ? "" : `, ${data.columns[column]}`;
    const shown = value === null ? "not recorded" : `${data.centred && value > 0 ? "+" : ""}${data.centred ? number(value, 1) : short(value)} ${data.unit}`;
    const own = data.seconds ? ` (${short(data.seconds[row][column] * 1000)} ms)` : "";
    readout.textContent = `${rank}node ${data.nodes[row]}${device}: ${shown}${own}`;
  }

  function choose(row, column) {
    if (!data?.nodes?.length) return;
    chosen = [Math.max(0, Math.min(data.nodes.length - 1, row)), Math.max(0, Math.min(data.columns.length - 1, column))];
    draw();
    say();
  }

  canvas.addEventListener("pointermove", (event) => {
    if (!place) return;
    for (let row = 0; row < data.nodes.length; row++)
      for (let column = 0; column < data.columns.length; column++) {
        const [x, y, size] = place(row, column);
        if (event.offsetX >= x && event.offsetX < x + size + 2 && event.offsetY >= y && event.offsetY < y + size + 2) return choose(row, column);
      }
  });
  canvas.addEventListener("click", () => chosen && picked?.(data.nodes[chosen[0]]));
  canvas.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && chosen) return picked?.(data.nodes[chosen[0]]);
    const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    const [row, column] = chosen ?? [0, -1];
    choose(row + step[0], column + step[1]);
  });
  new ResizeObserver(draw).observe(element);

  function show(next, name) {
    data = next;
    if (!data.centred && data.values?.length) {
      const known = data.values.flat().filter((value) => typeof value === "number");
      data.low = Math.min(...known);
      data.high = Math.max(...known);
    }
    if (data.centred) {
      const flat = data.values.flat(), far = flat.filter((value) => value >= 2).length;
      canvas.setAttribute("aria-label", `${name}: ${flat.length} ranks, ${far} at least 2 % of a step above their peers. Arrow keys choose a rank.`);
    } else canvas.setAttribute("aria-label", `${name}: ${data.nodes?.length ?? 0} nodes, from ${short(data.low)} to ${short(data.high)} ${data.unit}. Arrow keys choose a cell.`);
    if (chosen && !(data.nodes && chosen[0] < data.nodes.length && chosen[1] < data.columns.length)) chosen = null;
    if (!chosen) readout.textContent = data.steps ? `steps ${number(data.steps[0])} to ${number(data.steps[1])}; ${data.values.flat().length} ranks; point at a cell or use the arrow keys` : "";
    draw();
    say();
  }
  return { element, show, draw };
}
