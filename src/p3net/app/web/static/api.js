// Requests to the server, and the few words the page says while they run.

export class Refused extends Error {
  constructor(status, detail, body) {
    super(detail);
    this.status = status;
    this.body = body;
  }
}

export const wait = (seconds) => new Promise((done) => setTimeout(done, seconds * 1000));

// A busy server is asked again, after the time it names; everything else is an answer.
export async function request(path, options = {}, onBusy = () => {}) {
  for (;;) {
    const answer = await fetch(`/api/${path}`, options);
    if (answer.ok) return answer;
    if (answer.status === 503) {
      onBusy();
      await wait(Number(answer.headers.get("Retry-After")) || 2);
      continue;
    }
    const body = await answer.json().catch(() => ({}));
    const detail = typeof body.detail === "string" ? body.detail : `error ${answer.status}`;
    throw new Refused(answer.status, detail, body);
  }
}

export const get = async (path) => (await request(path)).json();

export async function send(method, path, body, headers = {}) {
  const options = { method, headers: { "Content-Type": "application/json", ...headers } };
  if (body !== undefined) options.body = JSON.stringify(body);
  return (await request(path, options)).json();
}

// A map of numbers with its shape: {rows, columns, cell: [x, y] in pixels, values}.
export async function grid(path) {
  const answer = await request(path);
  const [rows, columns] = answer.headers.get("X-Grid").split(" ").map(Number);
  const cell = answer.headers.get("X-Cell").split(" ").map(Number);
  return { rows, columns, cell, values: new Float32Array(await answer.arrayBuffer()) };
}

export const $ = (id) => document.getElementById(id);

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null));
  return made;
}

export function toast(place, words, seconds = 4) {
  const at = $(place);
  at.textContent = words;
  at.hidden = !words;
  clearTimeout(at.timer);
  if (words && seconds) at.timer = setTimeout(() => (at.hidden = true), seconds * 1000);
}

export function download(name, blob) {
  const link = element("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

export const whole = (value) => Math.round(value).toLocaleString("en");
