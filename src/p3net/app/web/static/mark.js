// The Mark tab: the folder's images, what to mark next, and points by mouse and keyboard.

import { $, element, get, request, send, toast, whole } from "./api.js";
import { Dots } from "./dots.js";
import { PointList, rounded } from "./points.js";
import { Sheet } from "./sheet.js";
import { View } from "./view.js";

const REACH = 10; // CSS pixels around a point that still mean it
const CLICK = 4; // and that a click may move

let images = [];
let sheet = null;
let opening = null;
let selected = []; // points, as [x, y]
let cursor = null; // the keyboard's crosshair, in pixels of the image
let box = null; // of a selection being drawn
let hidden = false;

const dots = new Dots();
const view = new View($("mark-canvas"), paint);
export const marking = { view, get sheet() { return sheet; } };

// --- the folder -----------------------------------------------------------------------------

export async function refresh() {
  images = await get("images");
  showList();
  await sheet?.refresh();
}

function showList() {
  showProgress();
  $("images").replaceChildren(...images.map(line));
}

function showProgress() {
  const marked = images.filter((image) => image.marked !== null).length;
  $("marked-count").textContent = whole(marked);
  $("image-count").textContent = whole(images.length);
  $("marked-bar").value = images.length ? marked / images.length : 0;
}

const badge = (image) => (image.fault ? "damaged" : image.marked === null ? "" : whole(image.marked));

function line(image) {
  const words = badge(image);
  return element("li", {},
    element("button", { "data-id": image.id, "aria-current": sheet?.image.id === image.id, title: image.fault || image.name, onclick: () => open(image.id) },
      element("img", { src: `/api/images/${image.id}/thumbnail`, loading: "lazy", alt: "" }),
      element("span", { class: "name" }, image.name),
      element("span", { class: "badge", hidden: !words }, words)));
}

function noteCount() {
  const image = images.find(({ id }) => id === sheet.image.id);
  if (!image) return;
  const before = image.marked;
  image.marked = sheet.marked ? sheet.points.length : null;
  const at = $("images").querySelector(`[data-id="${image.id}"] .badge`);
  at.textContent = badge(image);
  at.hidden = !at.textContent;
  if ((before === null) === (image.marked === null)) return;
  showProgress();
  propose().catch(() => {});
}

export async function open(id) {
  opening = id;
  const [image, picture] = await Promise.all([get(`images/${id}`), request(`images/${id}/picture`)])
    .catch((error) => (toast("mark-toast", error.message, 8), []));
  if (!image || opening !== id) return;
  await view.show(await picture.blob(), image.width, image.height);
  sheet = new Sheet(image, changed, showState);
  selected = [];
  cursor = box = null;
  $("mark-empty").hidden = true;
  $("tools").hidden = false;
  showState("saved");
  changed();
  for (const each of $("images").querySelectorAll("[aria-current]")) each.removeAttribute("aria-current");
  const current = $("images").querySelector(`[data-id="${id}"]`);
  current?.setAttribute("aria-current", "true");
  current?.scrollIntoView({ block: "nearest" });
  $("mark-canvas").focus({ preventScroll: true });
}

function neighbour(step) {
  const at = images.findIndex(({ id }) => id === sheet?.image.id);
  const next = images[at + step];
  if (next) open(next.id);
}

// --- what to mark next ----------------------------------------------------------------------

export async function propose() {
  if (!$("next").open) return;
  const { images: found, seen, unmarked } = await get("next?number=3");
  $("next-note").textContent = seen < unmarked ? `The model has looked at ${seen} of ${unmarked}.` : "";
  $("next-note").hidden = seen >= unmarked;
  $("proposals").replaceChildren(...found.map(({ id, name, why }) =>
    element("li", {}, element("button", { class: "proposal", onclick: () => open(id) },
      element("img", { src: `/api/images/${id}/thumbnail`, alt: "" }),
      element("span", {}, element("b", { class: "clip" }, name), element("small", {}, why))))));
  if (!found.length) $("proposals").replaceChildren(element("li", { class: "soft" }, "Everything is marked."));
  return seen < unmarked;
}

// --- drawing --------------------------------------------------------------------------------

function changed() {
  view.redraw();
  const number = sheet.points.length;
  $("point-count").textContent = sheet.marked ? whole(number) : "–";
  $("point-word").textContent = !sheet.marked ? "unmarked" : number === 1 ? "point" : number ? "points" : "nobody here";
  $("undo").disabled = !sheet.history.done.length;
  $("redo").disabled = !sheet.history.undone.length;
  $("nobody").hidden = sheet.marked;
  $("unmark").hidden = !sheet.marked;
}

function showState(state, detail) {
  const words = { saving: "saving…", saved: "saved", offline: "not saved: the server does not answer", refused: `not saved: ${detail}` };
  $("saved").textContent = words[state];
  $("saved").dataset.state = state;
  if (state === "saved" && sheet) noteCount();
}

function paint(context) {
  if (!sheet || hidden) return;
  const chosen = new PointList(selected);
  dots.draw(context, view, [[sheet.points, "#e0314f"], [chosen, "#1673e6", "#ffe14d"]]);
  context.lineWidth = 1;
  if (box) {
    context.strokeStyle = "#ffe14d";
    context.strokeRect(...box.from, box.to[0] - box.from[0], box.to[1] - box.from[1]);
  }
  if (cursor) {
    const [x, y] = view.toScreen(...cursor).map((value) => Math.round(value) + 0.5);
    for (const [style, width] of [["rgba(0,0,0,.6)", 3], ["#ffe14d", 1]]) {
      context.strokeStyle = style;
      context.lineWidth = width;
      context.beginPath();
      context.moveTo(x - 14, y); context.lineTo(x - 4, y); context.moveTo(x + 4, y); context.lineTo(x + 14, y);
      context.moveTo(x, y - 14); context.lineTo(x, y - 4); context.moveTo(x, y + 4); context.lineTo(x, y + 14);
      context.stroke();
    }
  }
}

// --- changes --------------------------------------------------------------------------------

const clamped = ([x, y]) => [
  Math.min(rounded(view.width - 0.01), Math.max(0, rounded(x))),
  Math.min(rounded(view.height - 0.01), Math.max(0, rounded(y))),
];

export function place(x, y) {
  if (view.isInside(x, y)) sheet.change({ add: [clamped([x, y])] });
}

function remove(points) {
  if (points.length) sheet.change({ remove: points });
  selected = [];
}

function shift(points, dx, dy) {
  const moved = points.map(([x, y]) => clamped([x + dx, y + dy]));
  sheet.change({ remove: points, add: moved });
  selected = moved;
}

async function takeDraft() {
  const at = sheet;
  toast("mark-toast", "The model looks…", 0);
  try {
    const { points } = await send("POST", `images/${at.image.id}/draft`);
    if (at !== sheet) return toast("mark-toast", "");
    // Where a mark stands already, the draft has nothing to add.
    const apart = 0.01 * Math.min(view.width, view.height);
    const fresh = points.filter(([x, y]) => sheet.points.nearest(x, y, apart) < 0).map(clamped);
    sheet.change({ add: fresh });
    toast("mark-toast", `${whole(fresh.length)} points drafted: correct them. Undo takes them back.`);
  } catch (error) {
    toast("mark-toast", error.message, 6);
  }
}

// --- the mouse ------------------------------------------------------------------------------

let press = null;
const canvas = $("mark-canvas");

canvas.addEventListener("contextmenu", (event) => event.preventDefault());

canvas.addEventListener("pointerdown", (event) => {
  if (!sheet || press) return;
  const at = [event.offsetX, event.offsetY];
  const point = view.toImage(...at);
  const index = hidden ? -1 : sheet.points.nearest(...point, REACH / view.scale);
  if (event.button === 2) {
    if (index >= 0) remove([sheet.points.at(index)]);
    return;
  }
  canvas.setPointerCapture(event.pointerId);
  cursor = null;
  const kind = event.button === 1 ? "pan" : event.shiftKey ? "box" : index >= 0 ? "move" : "place";
  press = { kind, at, last: at, index, start: index >= 0 ? sheet.points.at(index) : null, moved: false };
  selected = kind === "move" ? [press.start] : [];
  if (kind === "box") box = { from: at, to: at };
  view.redraw();
});

canvas.addEventListener("pointermove", (event) => {
  const at = [event.offsetX, event.offsetY];
  if (!press) {
    if (sheet) canvas.style.cursor = sheet.points.nearest(...view.toImage(...at), REACH / view.scale) >= 0 ? "grab" : "crosshair";
    return;
  }
  if (Math.hypot(at[0] - press.at[0], at[1] - press.at[1]) > CLICK) press.moved = true;
  if (press.kind === "box") box.to = at;
  else if (press.kind === "move" && press.moved) {
    const to = clamped(view.toImage(...at));
    [sheet.points.x[press.index], sheet.points.y[press.index]] = to;
    selected = [to];
  } else if (press.moved && press.kind !== "move") view.pan(at[0] - press.last[0], at[1] - press.last[1]);
  press.last = at;
  view.redraw();
});

function release(event) {
  if (!press) return;
  const { kind, at, start, index, moved } = press;
  press = null;
  if (kind === "place" && !moved && event.type === "pointerup") place(...view.toImage(...at));
  if (kind === "move" && moved) {
    const to = sheet.points.at(index);
    [sheet.points.x[index], sheet.points.y[index]] = start; // so that it is one change to undo
    sheet.change({ remove: [start], add: [to] });
    selected = [to];
  }
  if (kind === "box") {
    const [a, b] = [view.toImage(...box.from), view.toImage(...box.to)];
    selected = sheet.points.inBox(Math.min(a[0], b[0]), Math.min(a[1], b[1]), Math.max(a[0], b[0]), Math.max(a[1], b[1]));
    box = null;
  }
  view.redraw();
}
canvas.addEventListener("pointerup", release);
canvas.addEventListener("pointercancel", release);

// --- the keyboard ---------------------------------------------------------------------------

const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

const KEYS = {
  "+": () => view.zoom(1.25),
  "=": () => view.zoom(1.25),
  "-": () => view.zoom(0.8),
  0: () => view.fit(),
  "[": () => neighbour(-1),
  "]": () => neighbour(1),
  PageUp: () => neighbour(-1),
  PageDown: () => neighbour(1),
  Delete: () => remove(selected),
  Backspace: () => remove(selected),
  Enter: () => cursor && place(...cursor),
  " ": () => cursor && place(...cursor),
  Escape: () => { selected = []; cursor = null; toggleHelp(false); },
  s: selectNearest,
  h: () => { hidden = !hidden; },
  m: takeDraft,
  "?": () => toggleHelp(),
};

function selectNearest() {
  cursor ??= view.toImage(...view.size.map((side) => side / 2));
  const index = sheet.points.nearest(...cursor, Infinity);
  selected = index >= 0 ? [sheet.points.at(index)] : [];
  if (selected.length) cursor = selected[0];
}

function arrow([dx, dy], shiftKey) {
  if (selected.length) {
    shift(selected, dx * (shiftKey ? 10 : 1), dy * (shiftKey ? 10 : 1));
    cursor = selected.length === 1 ? selected[0] : cursor;
    return;
  }
  const step = (shiftKey ? 2 : 16) / view.scale;
  cursor ??= view.toImage(...view.size.map((side) => side / 2));
  cursor = clamped([cursor[0] + dx * step, cursor[1] + dy * step]);
  const [x, y] = view.toScreen(...cursor);
  const [width, height] = view.size; // the image follows a crosshair that leaves
  view.pan(Math.max(0, 30 - x) - Math.max(0, x - width + 30), Math.max(0, 30 - y) - Math.max(0, y - height + 30));
}

export function onKey(event) {
  if (!sheet || event.target.closest("input, select, textarea")) return;
  const command = event.ctrlKey || event.metaKey;
  const key = event.key.length === 1 ? event.key.toLowerCase() : event.key;
  if (event.target.closest("button, summary") && (key === "Enter" || key === " ")) return;
  if (command && (key === "z" || key === "y")) {
    selected = [];
    if (key === "y" || event.shiftKey) sheet.redo();
    else sheet.undo();
  } else if (command) return;
  else if (ARROWS[key]) arrow(ARROWS[key], event.shiftKey);
  else if (KEYS[key]) KEYS[key]();
  else return;
  event.preventDefault();
  view.redraw();
}

function toggleHelp(open = $("help").hidden) {
  $("help").hidden = !open;
  $("help-button").setAttribute("aria-expanded", open);
}

$("undo").addEventListener("click", () => { selected = []; sheet.undo(); });
$("redo").addEventListener("click", () => { selected = []; sheet.redo(); });
$("draft").addEventListener("click", takeDraft);
$("nobody").addEventListener("click", () => sheet.change({ marked: true }));
$("unmark").addEventListener("click", () => { selected = []; sheet.change({ remove: sheet.points.toList(), marked: false }); });
$("fit").addEventListener("click", () => view.fit());
$("help-button").addEventListener("click", () => toggleHelp());
$("next").addEventListener("toggle", () => propose());

window.addEventListener("beforeunload", (event) => {
  if (sheet?.dirty || sheet?.saving) event.preventDefault();
});
window.addEventListener("focus", () => sheet?.refresh().catch(() => {}));
