// Elements, and numbers in words. Whatever comes from a run is inserted as text, never as HTML.

export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key === "class") element.className = value;
    else if (key === "width") element.style.width = value; // by the object model: no style attribute, which the CSP forbids
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false && child !== ""));
  return element;
}

let skew = 0; // milliseconds by which the server's clock is ahead
export function setClock(date) {
  const there = Date.parse(date);
  if (Number.isFinite(there) && Math.abs(there - Date.now()) > 2000) skew = there - Date.now();
}
export const now = () => (Date.now() + skew) / 1000;

export const number = (value, digits = 0) =>
  typeof value !== "number" ? String(value ?? "unknown") : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

export function short(value) {
  if (typeof value !== "number") return value === null || value === undefined ? "" : String(value);
  const size = Math.abs(value);
  for (const [limit, suffix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]])
    if (size >= limit) return `${(value / (suffix === "k" ? 1e3 : limit)).toPrecision(3)} ${suffix}`;
  return size !== 0 && size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(4)));
}

export function duration(seconds) {
  if (typeof seconds !== "number" || !Number.isFinite(seconds)) return "unknown";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const whole = Math.round(seconds), d = Math.floor(whole / 86400), hours = Math.floor((whole % 86400) / 3600), min = Math.floor((whole % 3600) / 60);
  if (d) return `${d} d ${hours} h`;
  return hours ? `${hours} h ${min} min` : `${min} min ${whole % 60} s`;
}

export function ageOf(time) {
  const seconds = Math.max(0, now() - time);
  return seconds < 60 ? `${Math.floor(seconds)} s` : duration(seconds);
}

export const clock = (time) => {
  const date = new Date(time * 1000), two = (n) => String(n).padStart(2, "0");
  return `${two(date.getMonth() + 1)}-${two(date.getDate())} ${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
};

// An age that counts on by itself; `late`: from so many seconds on it is marked.
export function ago(time, late = null, suffix = " ago") {
  const element = h("span", { class: "ago", title: clock(time) });
  Object.assign(element, { since: time, late, suffix });
  tick(element);
  return element;
}
function tick(element) {
  const text = ageOf(element.since) + element.suffix;
  if (element.textContent !== text) element.textContent = text;
  element.classList.toggle("late", element.late !== null && now() - element.since > element.late);
}
setInterval(() => document.querySelectorAll(".ago").forEach(tick), 1000);

export function command(text) {
  const button = h("button", { type: "button", class: "copy", title: "Copy the command" }, "copy");
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      button.textContent = "copied";
    } catch {
      button.textContent = "select it";
    }
    setTimeout(() => (button.textContent = "copy"), 1500);
  });
  return h("span", { class: "command" }, h("code", {}, text), button);
}

// A value of a block: text, number, time, command, or one of these in a tone.
export function cell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value !== "object") return String(value);
  if ("ago" in value) return ago(value.ago);
  if ("at" in value) return h("time", {}, clock(value.at));
  if ("code" in value) return command(value.code);
  return h("span", { class: value.tone || null }, cell(value.v));
}
