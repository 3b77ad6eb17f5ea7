// The first screen.
import { ago, command, duration, h, number, short } from "./dom.js";
import { bars, eventRow, missing } from "./blocks.js";
import { heatMap } from "./heat.js";

const stat = (label, value) => (value === null || value === undefined ? "" : h("div", {}, h("dt", {}, label), h("dd", {}, value)));

function moving(m, state) {
  const left = m.steps ? Math.min(100, (100 * m.step) / m.steps) : null;
  const runs = state.state === "running";
  const age = m.time ? ago(m.time, m.late_s) : h("span", { class: "dim" }, "no step yet");
  const eta = m.eta_s === null || m.eta_s === undefined ? (runs ? "unknown" : null) : duration(m.eta_s);
  const plan = m.planned_s === null || m.planned_s === undefined ? null : h("span", {}, duration(m.planned_s), h("span", { class: m.eta_s > 1.1 * m.planned_s ? "warn" : "dim" }, ` (${(m.eta_s / m.planned_s).toFixed(2)} x plan)`));
  return [
    h("h2", {}, "Progress"),
    h("div", { class: "big" },
      h("dl", {}, stat("last step", age), stat("step", h("span", {}, number(m.step), m.steps ? h("span", { class: "dim" }, ` / ${number(m.steps)}`) : "")), stat("ETA", eta), runs ? stat("ETA by the plan", plan ?? h("span", { class: "dim small" }, m.why_no_plan ? `unknown: ${m.why_no_plan}` : "unknown")) : "")),
    left === null ? "" : h("progress", { max: 100, value: left, "aria-label": "steps done" }),
    m.underway ? h("p", { class: "warn", role: "status" }, m.underway) : "",
    runs ? "" : h("p", { class: state.state === "failed" ? "bad" : "dim" }, `${state.state}: ${state.reason}`),
    m.time ? h("dl", { class: "stats" }, stat("loss", number(m.loss, 4)), m.validation ? stat(`validation loss, step ${number(m.validation.step)}`, number(m.validation.loss, 4)) : "", stat("gradient norm", short(m.grad_norm)), stat("experts", m.experts), stat("step time", duration(m.step_s)), stat("tokens/s", short(m.tokens_per_s)), stat(`tokens/s per ${m.unit}`, short(m.each)), stat("MFU", typeof m.mfu === "number" ? `${number(100 * m.mfu, 1)} %` : "unknown"), stat("memory", m.memory), stat("tokens", short(m.tokens))) : "",
  ];
}

function attention(items) {
  if (!items.length) return [h("h2", {}, "Needs attention"), h("p", { class: "good" }, "Nothing.")];
  const row = (item) => h("li", { class: item.severity },
    h("p", { class: "what" }, h("strong", { class: item.severity === "error" ? "bad" : "warn" }, item.severity), " ", item.what),
    h("p", { class: "dim" }, [item.node === null ? "" : `node ${item.node}`, item.rank === null ? "" : `rank ${item.rank}`].filter(Boolean).join(", "), item.since ? [" for ", ago(item.since, null, "")] : "", item.hint ? ` ${item.hint}` : ""),
    item.command ? command(item.command) : "");
  return [h("h2", {}, `Needs attention (${items.length})`), h("ul", { class: "attention" }, items.map(row))];
}

function lost(l) {
  if (!l) return [h("h2", {}, "Time lost today"), h("p", { class: "dim" }, "not read yet")];
  if (l.why) return [h("h2", {}, "Time lost today"), h("p", { class: "dim" }, l.why), l.mtbf ? h("p", { class: "dim" }, l.mtbf) : ""];
  const ettr = l.ettr === null ? "unknown" : `${number(100 * l.ettr, 1)} %`;
  const known = l.rows.filter((row) => row.value > 0), rest = known.slice(6).reduce((sum, row) => sum + row.value, 0);
  const rows = rest ? [...known.slice(0, 6), { label: "other causes", value: rest }] : known;
  return [
    h("h2", {}, "Time lost today"),
    h("p", {}, h("strong", {}, duration(l.lost_s)), ` of ${duration(l.wall_s)}; ETTR today ${ettr}, of the whole run ${l.ettr_all === null ? "unknown" : `${number(100 * l.ettr_all, 1)} %`}`),
    rows.length ? bars({ rows: rows.map((row) => ({ ...row, text: duration(row.value) })) }) : h("p", { class: "good" }, "None."),
    l.mtbf ? h("p", { class: "dim" }, l.mtbf) : "",
  ];
}

function reserve(r) {
  if (!r.known) return [h("h2", {}, "Spares and idle nodes"), h("p", { class: "dim" }, "unknown: no generation has started")];
  const list = (nodes) => (nodes.length ? "node " + nodes.slice(0, 24).join(", ") + (nodes.length > 24 ? ` and ${nodes.length - 24} more` : "") : "none");
  return [
    h("h2", {}, "Spares and idle nodes"),
    h("dl", { class: "stats" }, stat("with ranks", number(r.training)), stat("spares, held without ranks", list(r.spares)), stat("gone", r.gone.length ? r.gone.slice(0, 12).map((g) => `node ${g.node} ${g.how}`).join(", ") : "none"), stat("idle node time", r.idle_s === null || r.idle_s === undefined ? null : duration(r.idle_s))),
  ];
}

function checkpoint(c) {
  if (!c) return [h("h2", {}, "Latest checkpoint"), h("p", { class: "dim" }, "none yet")];
  return [
    h("h2", {}, "Latest checkpoint"),
    h("dl", { class: "stats" }, stat("step", number(c.step)), stat("age", ago(c.time)), stat("steps since", number(c.at_risk)), stat("kept", number(c.kept)), stat("verified", c.verified === true ? h("span", { class: "good" }, "yes, when the run resumed from it") : c.verified === false ? h("span", { class: "bad" }, "damaged") : h("span", {}, "not since it was written"))),
    h("p", { class: "dim path" }, c.where),
    c.verified ? "" : command(c.command),
  ];
}

export function nowPage(run) {
  const parts = Object.fromEntries(["moving", "attention", "lost", "heat", "reserve", "checkpoint", "events", "missing"].map((id) => [id, h("section", { id, class: `card ${id}` }, id === "moving" ? h("p", { class: "dim" }, "Reading the run ...") : "")]));
  const map = heatMap();
  parts.heat.append(h("h2", {}, "Own work of each rank against its stage peers", " ", h("a", { class: "small", href: `#/run/${encodeURIComponent(run)}/ranks` }, "other metrics")), map.element);
  for (const part of Object.values(parts)) part.hidden = part !== parts.moving;
  const element = h("div", { class: "now" }, Object.values(parts));
  const fill = (id, content) => parts[id].replaceChildren(...content.flat(9).filter((c) => c !== "" && c !== null));
  return {
    element,
    redraw: map.draw,
    update(changed, all) {
      if ((changed.moving || changed.state) && all.moving) fill("moving", moving(all.moving, all.state));
      if (changed.attention) fill("attention", attention(changed.attention));
      if ("lost" in changed) fill("lost", lost(all.lost));
      if (changed.heat) map.show(changed.heat, "own work against stage peers");
      if (changed.reserve) fill("reserve", reserve(changed.reserve));
      if ("checkpoint" in changed) fill("checkpoint", checkpoint(changed.checkpoint));
      if (changed.events) fill("events", [h("h2", {}, "Latest events"), h("ol", { class: "events" }, changed.events.map((event) => eventRow({ ...event, tone: { error: "bad", warning: "warn" }[event.severity] })))]);
      if ("missing" in changed || changed.broken) fill("missing", [missing([...(all.broken ? [all.broken] : []), ...(all.missing ?? [])])]);
      for (const part of Object.values(parts)) part.hidden = !part.childNodes.length;
      parts.missing.hidden = !all.missing?.length && !all.broken;
    },
  };
}
