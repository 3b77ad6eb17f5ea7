// Line charts by uPlot.
import { h, short } from "./dom.js";

const charts = new Set();
const COLORS = ["--s0", "--s1", "--s2", "--s3", "--s4", "--s5", "--s6", "--s7"];

export function chart(block) {
  const box = h("div", { class: "chart" });
  let plot = null;
  const draw = () => {
    if (!box.isConnected && plot) {
      charts.delete(draw);
      observer.disconnect();
      plot.destroy();
      return;
    }
    const width = box.clientWidth, style = getComputedStyle(document.documentElement);
    if (!width || !window.uPlot) return;
    const color = (name) => style.getPropertyValue(name).trim();
    const axis = { stroke: color("--dim"), grid: { stroke: color("--line"), width: 1 }, ticks: { stroke: color("--line"), width: 1 }, font: `12px ${color("--sans")}` };
    plot?.destroy();
    box.replaceChildren();
    plot = new window.uPlot({
      width, height: block.height ?? 220,
      scales: { x: { time: Boolean(block.time) } },
      cursor: { y: false },
      legend: { live: true },
      axes: [{ ...axis, values: block.time ? undefined : (_, ticks) => ticks.map(short) }, { ...axis, size: 62, values: (_, ticks) => ticks.map(short) }],
      series: [
        { label: block.time ? "time" : "step" },
        ...block.series.map((series, i) => ({
          label: series.name,
          stroke: color(block.band ? "--s0" : COLORS[i % COLORS.length]),
          width: block.band && i ? 0.5 : 1.5,
          dash: block.band || i < 4 ? undefined : [6, 3],
          spanGaps: block.gaps === false,
          points: { show: block.x.length < 40 },
          value: (_, value) => (value === null ? "" : short(value)),
        })),
      ],
      bands: block.band ? [{ series: [3, 2], fill: color("--band") }] : undefined,
    }, [block.x, ...block.series.map((series) => series.y)], box);
  };
  const observer = new ResizeObserver(draw);
  observer.observe(box);
  charts.add(draw);
  const unit = block.unit ? `, ${block.unit}` : "";
  return h("section", {}, h("h2", {}, block.title, unit), box);
}

export const redraw = () => charts.forEach((draw) => draw());
