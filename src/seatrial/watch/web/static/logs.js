// Logs: one at a time, from its end, followed; earlier parts on request.
import { h, number } from "./dom.js";

const MOST_LINES = 5000;

export function logsPage(run, api) {
  const generation = h("select", { id: "generation" }), which = h("select", { id: "which" });
  const filter = h("input", { type: "search", id: "grep", placeholder: "text in a line" });
  const follow = h("input", { type: "checkbox", id: "follow", checked: true });
  const rank = h("input", { type: "search", id: "rank", inputmode: "numeric", placeholder: "rank or node 3" });
  const said = h("p", { class: "dim", role: "status" });
  const earlier = h("button", { type: "button" }, "Earlier lines");
  const pre = h("pre", { class: "log", tabindex: "0", role: "region", "aria-label": "Log" });
  const element = h("div", {}, h("h1", {}, "Logs"),
    h("p", { class: "tools" }, h("label", { for: "generation" }, "Generation"), generation, h("label", { for: "rank" }, "Find"), rank, h("label", { for: "which" }, "Log"), which, h("label", { for: "grep" }, "Lines with"), filter, h("label", { for: "follow" }, follow, " follow")),
    said, earlier, pre);
  let lines = [], from = 0, to = 0, size = 0, all = [], busy = false, ended = false;

  const draw = () => {
    const words = filter.value.toLowerCase();
    const shown = words ? lines.filter((line) => line.toLowerCase().includes(words)) : lines;
    pre.textContent = shown.join("\n");
    said.textContent = `${number(shown.length)} lines shown; bytes ${number(from)} to ${number(to)} of ${number(size)}`;
    earlier.hidden = from === 0;
    if (follow.checked) pre.scrollTop = pre.scrollHeight;
  };
  const options = () => {
    const match = rank.value.trim().match(/^(node\s*)?(\d+)$/);
    const found = match ? all.filter((log) => log[match[1] ? "node" : "rank"] === Number(match[2])) : all;
    which.replaceChildren(...found.slice(0, 3000).map((log) => h("option", { value: log.id }, `${log.title}${log.size ? "" : " (empty)"}`)));
  };
  const get = (more) => api(`log?generation=${generation.value}&id=${encodeURIComponent(which.value)}${more}`);
  async function open() {
    lines = [];
    from = to = size = 0;
    if (!which.value) {
      pre.textContent = "";
      return;
    }
    const part = await get("");
    ({ lines, from, to, size } = part);
    draw();
    if (part.why) said.textContent = part.why;
  }
  async function more() {
    if (busy || !follow.checked || !which.value || document.hidden) return;
    busy = true;
    try {
      const part = await get(`&after=${to}`);
      if (part.from !== to) ({ lines, from, to, size } = part); // the file was replaced
      else if (part.lines.length) {
        lines = [...lines, ...part.lines].slice(-MOST_LINES);
        ({ to, size } = part);
      } else return;
      draw();
    } finally {
      busy = false;
    }
  }
  async function load(number_) {
    const found = await api(`logs${number_ ? `?generation=${number_}` : ""}`);
    generation.replaceChildren(...[...found.generations].reverse().map((n) => h("option", { value: n }, String(n))));
    generation.value = String(found.generation);
    all = found.logs;
    options();
    if (found.missing.length) said.textContent = found.missing.join("; ");
    await open();
  }
  generation.addEventListener("change", () => load(generation.value));
  which.addEventListener("change", open);
  rank.addEventListener("input", () => {
    options();
    open();
  });
  filter.addEventListener("input", draw);
  earlier.addEventListener("click", async () => {
    const part = await get(`&before=${from}`);
    follow.checked = false;
    lines = [...part.lines, ...lines].slice(0, 4 * MOST_LINES);
    from = part.from;
    draw();
  });
  const timer = setInterval(() => (ended ? clearInterval(timer) : more().catch(() => {})), 1000);
  return { element, load, leave: () => (ended = true) };
}
