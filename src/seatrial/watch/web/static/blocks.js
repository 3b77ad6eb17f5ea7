// Draws the blocks that pages are made of (blocks.py).
import { cell, clock, h } from "./dom.js";
import { chart } from "./chart.js";

const heading = (block) => (block.title ? h("h2", {}, block.title) : "");
const noted = (block) => (block.note ? h("p", { class: "dim" }, block.note) : "");

function facts(block) {
  if (!block.rows.length) return h("div");
  return h("section", {}, heading(block), h("dl", { class: "facts" }, block.rows.map(([label, value]) => h("div", {}, h("dt", {}, label), h("dd", {}, cell(value))))));
}

function table(block) {
  const numeric = block.columns.map((name) => name.startsWith("#"));
  const names = block.columns.map((name) => name.replace(/^#/, ""));
  const head = h("tr", {}, names.map((name, i) => (name ? h("th", { scope: "col", class: numeric[i] ? "num" : null }, name) : h("td"))));
  const body = block.rows.map((row) => h("tr", {}, row.map((value, i) => h("td", { class: numeric[i] ? "num" : null }, cell(value)))));
  if (!block.rows.length) return h("div");
  const scroll = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": block.title || names.join(", ") }, h("table", {}, h("thead", {}, head), h("tbody", {}, body)));
  return h("section", {}, heading(block), scroll, noted(block));
}

export function bars(block) {
  const most = Math.max(...block.rows.flatMap((row) => [row.value ?? 0, row.planned ?? 0]), 1e-12);
  const bar = (value, tone) => h("span", { class: `bar ${tone}`, width: `${(100 * value) / most}%`, "aria-hidden": "true" });
  const rows = block.rows.map((row) => h("div", { class: "barrow" },
    h("dt", {}, row.label),
    h("dd", {},
      h("span", { class: "track" }, bar(row.value ?? 0, row.tone ?? ""), row.planned === undefined ? "" : bar(row.planned, "planned")),
      h("span", { class: "figure" }, row.text, row.planned_text ? h("span", { class: "dim" }, ` plan ${row.planned_text}`) : "", row.ratio ? h("span", {}, ` ${row.ratio}`) : ""))));
  return h("section", {}, heading(block), h("dl", { class: "bars" }, rows), noted(block));
}

export function eventRow(event) {
  const who = [event.node === null ? "" : `node ${event.node}`, event.rank === null ? "" : `rank ${event.rank}`].filter(Boolean).join(", ");
  const line = [h("time", {}, clock(event.time)), h("span", { class: `kind ${event.tone || ""}` }, event.kind), h("span", { class: "what" }, event.text), h("span", { class: "dim who" }, who)];
  if (!event.evidence) return h("li", { class: "event" }, line);
  return h("li", {}, h("details", {}, h("summary", { class: "event" }, line), h("pre", { tabindex: "0" }, event.evidence)));
}

function events(block) {
  const list = h("ol", { class: "events" });
  const filter = h("input", { type: "search", id: "filter", placeholder: "kind, text, node" });
  const major = h("input", { type: "checkbox", id: "major" });
  const count = h("p", { class: "dim", role: "status" });
  const draw = () => {
    const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = block.rows.filter((row) => (!major.checked || row.major) && words.every((word) => `${row.kind} ${row.text} node ${row.node} rank ${row.rank}`.toLowerCase().includes(word)));
    count.textContent = `${found.length.toLocaleString("en")} of ${block.rows.length.toLocaleString("en")}${found.length > 300 ? ", showing the latest 300" : ""}`;
    list.replaceChildren(...found.slice(0, 300).map(eventRow));
  };
  filter.addEventListener("input", draw);
  major.addEventListener("change", draw);
  draw();
  return h("section", {}, heading(block), h("p", { class: "tools" }, h("label", { for: "filter" }, "Filter"), filter, h("label", { for: "major" }, major, " only failures, recoveries and starts")), count, list, noted(block));
}

const text = (block) => h("section", {}, heading(block), h("pre", { tabindex: "0", role: "region", "aria-label": block.title }, block.text));
const note = (block) => h("p", { class: block.tone || "dim" }, block.text);
const KINDS = { facts, table, bars, events, text, note, chart };

export function missing(list) {
  if (!list?.length) return "";
  return h("section", { class: "missing" }, h("h2", {}, "Missing"), h("ul", {}, list.map((item) => h("li", {}, item))));
}

export const blocks = (page) => [...page.blocks.map((block) => KINDS[block.kind](block)), missing(page.missing)];
