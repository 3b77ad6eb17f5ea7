// Which page is shown, the stream of changes, keys, and the colour scheme.
import { ago, h, number, setClock } from "./dom.js";
import { blocks, missing } from "./blocks.js";
import { redraw } from "./chart.js";
import { heatMap } from "./heat.js";
import { logsPage } from "./logs.js";
import { nowPage } from "./now.js";

const PAGES = [["now", "Now", "1"], ["ranks", "Ranks", "2"], ["step", "Step", "3"], ["curves", "Curves", "4"], ["events", "Events", "5"], ["checkpoints", "Checkpoints", "6"], ["data", "Data", "7"], ["checks", "Checks", "8"], ["scaling", "Scaling", "9"], ["drills", "Drills", "0"], ["plan", "Plan", "p"], ["logs", "Logs", "l"]];
const REFRESH_S = 5;
const main = document.getElementById("main"), nav = document.getElementById("nav"), top_ = document.getElementById("top"), keys = document.getElementById("keys");
let stream = null, watched = null, state = {}, shown = null, turn = 0;

async function get(path) {
  const answer = await fetch(path, { headers: { accept: "application/json" } });
  setClock(answer.headers.get("date"));
  if (answer.status === 401) location.reload();
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}
const base = (run) => `/api/run/${encodeURIComponent(run)}`;

function route() {
  const [, kind, name, page] = location.hash.split("?")[0].split("/").map(decodeURIComponent);
  return { kind: kind || "", run: kind === "run" ? name : null, page: page || "now", query: new URLSearchParams(location.hash.split("?")[1] ?? "") };
}

// --- the stream: one for the run that is shown
function follow(run) {
  if (watched === run) return;
  stream?.close();
  stream = null;
  watched = run;
  state = {};
  if (run === null) return;
  stream = new EventSource(`${base(run)}/stream`);
  stream.onmessage = (message) => {
    const changed = JSON.parse(message.data);
    if (!("broken" in changed)) delete state.broken;
    Object.assign(state, changed);
    document.body.classList.remove("offline");
    header();
    shown?.update?.(changed, state);
  };
  stream.onerror = () => {
    document.body.classList.add("offline");
    header();
    // Refused, as by a server that was started again and knows no session: the browser does not try again by itself.
    if (stream?.readyState === EventSource.CLOSED)
      setTimeout(() => {
        if (watched !== run) return;
        watched = undefined;
        get("/api/runs").catch(() => {}).finally(() => follow(run));
      }, 3000);
  };
}

function header() {
  const { run } = route();
  const offline = document.body.classList.contains("offline");
  const word = state.state?.state;
  const left = run === null ? h("span", { class: "name" }, "Seatrial") : h("span", { class: "name" }, run);
  const need = state.attention?.length ?? 0;
  document.title = run === null ? "Seatrial" : `${need ? `(${need}) ` : ""}${run}${word ? `: ${word}` : ""}`;
  const parts = [
    h("a", { href: "#/runs", class: "home", title: "All runs (r)" }, h("img", { src: "/static/icon.svg", alt: "All runs", width: null })),
    left,
    run !== null && word ? h("span", { class: `state ${word.replace(" ", "-")}` }, word) : "",
    run !== null && state.state?.generation ? h("span", { class: "dim wide" }, `generation ${number(state.state.generation)}`) : "",
    run !== null && state.moving?.time ? h("span", { class: "dim wide" }, "last step ", ago(state.moving.time, state.moving.late_s)) : "",
    run !== null && need ? h("a", { class: "need", href: `#/run/${encodeURIComponent(run)}/now` }, `${need} need${need === 1 ? "s" : ""} attention`) : "",
    offline ? h("span", { class: "bad", role: "status" }, "server not reachable: data is stale") : "",
    h("span", { class: "right" },
      h("button", { type: "button", onclick: theme, title: "Light or dark (t)" }, "light/dark"),
      h("button", { type: "button", onclick: help, class: "wide", title: "Keys (?)" }, "keys")),
  ];
  top_.replaceChildren(...parts.filter((part) => part !== ""));
}

function links(run, page) {
  nav.hidden = run === null;
  const made = run === null ? [] : PAGES.map(([id, name, key]) => h("a", { href: `#/run/${encodeURIComponent(run)}/${id}`, "aria-current": id === page ? "page" : null }, name, h("kbd", { "aria-hidden": "true" }, key)));
  nav.replaceChildren(...made);
  nav.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "nearest" });
}

// --- pages
function generic(run, page) {
  const element = h("div", {}, h("p", { class: "dim" }, "Reading ...")), path = `${base(run)}/page/${page}`;
  let at = 0, events = -1, text = "";
  async function load() {
    at = Date.now();
    const found = await get(path), now = JSON.stringify(found);
    if (now === text) return;
    // A page in use keeps its filter, open details and place.
    if (text && (element.contains(document.activeElement) || element.querySelector("details[open]"))) return;
    text = now;
    element.replaceChildren(h("h1", {}, found.title), ...blocks(found));
  }
  return {
    element, load,
    update(changed, all) {
      const more = all.counts && all.counts.events !== events;
      events = all.counts?.events ?? events;
      if (!document.hidden && changed.counts && Date.now() - at > (more ? 1000 : 1000 * REFRESH_S)) load().catch(() => {});
    },
  };
}

function ranksPage(run) {
  const select = h("select", { id: "metric" }), rest = h("div"), series = h("div", { "aria-live": "polite" });
  const overTime = async (node) => {
    if (!select.value.startsWith("telemetry:")) return;
    series.replaceChildren(...blocks(await get(`${base(run)}/series?node=${node}&metric=${encodeURIComponent(select.value)}`)));
  };
  const map = heatMap((node) => overTime(node).catch(fail));
  const hint = h("p", { class: "dim" }, "Click a cell, or press Enter, to see the node's last 24 hours.");
  const element = h("div", {}, h("h1", {}, "Ranks"), h("section", { class: "card" }, h("p", { class: "tools" }, h("label", { for: "metric" }, "Metric"), select), map.element, hint), series, rest);
  let at = 0;
  const name = () => select.selectedOptions[0]?.textContent ?? "";
  const draw = async () => {
    hint.hidden = !select.value.startsWith("telemetry:");
    map.show(await get(`${base(run)}/heat?metric=${encodeURIComponent(select.value)}`), name());
  };
  async function load() {
    at = Date.now();
    const found = await get(`${base(run)}/page/ranks`), before = select.value;
    const groups = Map.groupBy ? Map.groupBy(found.metrics, (m) => m.group) : new Map([["all", found.metrics]]);
    if (document.activeElement !== select) {
      select.replaceChildren(...[...groups].map(([group, list]) => h("optgroup", { label: group }, list.map((m) => h("option", { value: m.id }, m.name)))));
      if (before) select.value = before;
      if (!select.value) select.selectedIndex = 0;
    }
    rest.replaceChildren(...blocks(found));
    await draw();
  }
  select.addEventListener("change", () => {
    series.replaceChildren();
    draw().catch(fail);
  });
  return { element, load, redraw: map.draw, update: (changed) => !document.hidden && changed.counts && Date.now() - at > 1000 * REFRESH_S && load().catch(() => {}) };
}

function runsPage() {
  const element = h("div", {}, h("p", { class: "dim" }, "Reading ..."));
  let timer = null;
  async function load() {
    const found = await get("/api/runs"), chosen = new Set([...element.querySelectorAll("input:checked")].map((box) => box.value));
    if (found.one && location.hash.length < 3) return location.replace(`#/run/${encodeURIComponent(found.one)}/now`);
    const row = (run) => h("tr", {},
      h("td", {}, h("input", { type: "checkbox", value: run.name, "aria-label": `compare ${run.name}`, checked: chosen.has(run.name) })),
      h("td", {}, h("a", { href: `#/run/${encodeURIComponent(run.name)}/now` }, run.name)),
      h("td", {}, h("span", { class: `state ${run.state.replace(" ", "-")}` }, run.state)),
      h("td", { class: "num" }, run.step ? number(run.step) : "", run.step && run.steps ? h("span", { class: "dim" }, ` / ${number(run.steps)}`) : ""),
      h("td", { class: "num" }, run.loss === null ? "" : number(run.loss, 4)),
      h("td", { class: "num" }, run.tokens_per_s === null ? "" : number(run.tokens_per_s)),
      h("td", { class: "num" }, run.time === null ? "" : ago(run.time)),
      h("td", { class: "dim" }, run.why));
    const compare = h("button", { type: "button", onclick: () => {
      const names = [...element.querySelectorAll("input:checked")].map((box) => `run=${encodeURIComponent(box.value)}`);
      if (names.length) location.hash = `#/compare?${names.join("&")}`;
    } }, "Compare selected");
    const head = h("tr", {}, h("td"), ["run", "state"].map((n) => h("th", { scope: "col" }, n)), ["step", "loss", "tokens/s", "age"].map((n) => h("th", { scope: "col", class: "num" }, n)), h("th", { scope: "col" }, "why"));
    const problems = found.runs.flatMap((run) => run.problems.map((problem) => `${run.name}: ${problem}`));
    element.replaceChildren(h("h1", {}, "Runs"), found.folder ? h("p", { class: "dim path" }, found.folder) : "", found.runs.length ? h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Runs" }, h("table", {}, h("thead", {}, head), h("tbody", {}, found.runs.map(row)))) : h("p", { class: "dim" }, "No runs in this folder yet."), found.runs.length > 1 ? compare : "", missing(problems.slice(0, 50)));
  }
  timer = setInterval(() => document.hidden || load().catch(() => {}), 1000 * REFRESH_S);
  return { element, load, leave: () => clearInterval(timer) };
}

function comparePage(query) {
  const element = h("div");
  return { element, load: async () => {
    const found = await get(`/api/compare?${query}`);
    element.replaceChildren(h("h1", {}, found.title), ...blocks(found));
  } };
}

function fail(error) {
  main.replaceChildren(h("h1", {}, "Error"), h("p", { class: "bad", role: "alert" }, error.message));
}

async function go() {
  const mine = ++turn, { kind, run, page, query } = route();
  shown?.leave?.();
  follow(run);
  header();
  links(run, page);
  const api = (path) => get(`${base(run)}/${path}`);
  if (kind === "compare") shown = comparePage(query);
  else if (run === null) shown = runsPage();
  else if (page === "now") shown = nowPage(run);
  else if (page === "ranks") shown = ranksPage(run);
  else if (page === "logs") shown = logsPage(run, api);
  else shown = generic(run, page);
  main.replaceChildren(shown.element);
  if (state.state) shown.update?.(state, state);
  try {
    await shown.load?.(query.get("generation"));
  } catch (error) {
    if (mine === turn) fail(error);
  }
  redraw();
}

function theme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
  redraw();
  shown?.redraw?.();
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  redraw();
  shown?.redraw?.();
});

function help() {
  const rows = [...PAGES.map(([, name, key]) => [key, name]), ["r", "All runs"], ["[ ]", "previous, next page"], ["t", "light or dark"], ["?", "this list"]];
  keys.replaceChildren(h("h2", {}, "Keys"), h("dl", { class: "keys" }, rows.map(([key, name]) => h("div", {}, h("dt", {}, h("kbd", {}, key)), h("dd", {}, name)))), h("button", { type: "button", onclick: () => keys.close() }, "Close"));
  keys.showModal();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) || keys.open) return;
  const { run, page } = route(), at = PAGES.findIndex(([id]) => id === page);
  const to = (id) => (location.hash = `#/run/${encodeURIComponent(run)}/${id}`);
  if (event.key === "t") theme();
  else if (event.key === "?") help();
  else if (event.key === "r") location.hash = "#/runs";
  else if (run !== null && (event.key === "]" || event.key === "[")) to(PAGES[(at + (event.key === "]" ? 1 : PAGES.length - 1)) % PAGES.length][0]);
  else if (run !== null) {
    const found = PAGES.find(([, , key]) => key === event.key);
    if (found) to(found[0]);
  }
});
addEventListener("hashchange", () => go().then(() => main.focus({ preventScroll: true })));
addEventListener("pagehide", () => stream?.close());
if (location.hash === "#main") location.hash = "";
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
go();
