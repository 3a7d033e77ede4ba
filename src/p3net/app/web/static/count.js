// The Count tab: images dropped, pasted or chosen; maps over them; regions; downloads.

import { $, download, element, get, grid, request, send, toast, whole } from "./api.js";
import { Dots } from "./dots.js";
import { PointList, rounded } from "./points.js";
import { View } from "./view.js";

// Few to many: every step is lighter, so that it also reads without colour.
const HEAT = [[6, 4, 20], [52, 16, 92], [116, 28, 110], [188, 54, 84], [236, 108, 44], [250, 178, 66], [252, 244, 176]];

const counts = []; // {file, data, maps, regions, points}
let shown = null;
let overlay = null; // {picture, cell} of the map on show
let corners = null; // of a region being drawn
let limits = { upload_bytes: Infinity };

const dots = new Dots();
const view = new View($("count-canvas"), paint);

export function setStatus(status) {
  limits = status.limits;
  $("count-note").textContent = status.model ? "" : status.folder
    ? "There is no model yet: mark a few images and train one."
    : "There is no model: start the server with one.";
}

// --- from a file to a count -----------------------------------------------------------------

export async function take(files) {
  for (const file of files) {
    if (file.size > limits.upload_bytes) {
      toast("count-toast", `${file.name}: more than ${whole(limits.upload_bytes / 1e6)} MB`, 8);
      continue;
    }
    try {
      toast("count-toast", `Counting ${file.name}…`, 0);
      const form = new FormData();
      form.append("image", file);
      const busy = () => toast("count-toast", "The server is busy; waiting…", 0);
      const data = await (await request("count", { method: "POST", body: form }, busy)).json();
      toast("count-toast", "");
      counts.push({ file, data, maps: new Map(), regions: [], points: null });
      await show(counts.at(-1));
    } catch (error) {
      toast("count-toast", `${file.name}: ${error.message}`, 8);
    }
  }
}

async function show(count) {
  shown = count;
  corners = null;
  const { data, file } = count;
  $("count-empty").hidden = true;
  $("result").hidden = false;
  try {
    await view.show(file, data.width, data.height);
  } catch { // a format this browser does not know, such as TIFF
    await view.show(await (await request(`count/${data.id}/picture`)).blob(), data.width, data.height);
  }
  $("result-name").textContent = file.name;
  $("result-count").textContent = data.count < 10 ? data.count.toFixed(1) : whole(data.count);
  $("result-interval").textContent = interval(data.interval);
  for (const option of $("map").options) {
    option.disabled = !data.branches && !["", "density"].includes(option.value);
  }
  $("token").max = data.tokens || 1;
  showCounted();
  showRegions();
  await showMap();
  if ($("found").checked) await showPoints();
}

function interval(found) {
  if (!found) return "no interval: this model has no distribution";
  const level = `${Math.round(100 * found.level)} %`;
  const range = `${whole(found.low)} to ${whole(found.high)}`;
  return `${range} (${level}${found.calibrated ? "" : ", not calibrated"})`;
}

function showCounted() {
  $("counted").replaceChildren(...counts.map((count) =>
    element("li", {}, element("button", { "aria-current": count === shown, onclick: () => show(count) },
      element("span", { class: "clip" }, count.file.name), element("b", {}, whole(count.data.count))))));
}

// --- maps -----------------------------------------------------------------------------------

async function showMap() {
  const which = $("map").value;
  const attends = which === "attention";
  $("attention").hidden = !attends;
  const token = `${$("branch").value === "1" ? "A" : "B"}${$("token").value}`;
  $("token-name").textContent = token;
  const count = shown;
  const name = attends ? `attention?branch=${$("branch").value}&token=${$("token").value}` : `maps/${which}`;
  overlay = null;
  try {
    if (which) {
      if (!count.maps.has(name)) count.maps.set(name, colour(await grid(`count/${count.data.id}/${name}`)));
      const current = $("map").value === which && (!attends || $("token-name").textContent === token);
      if (count !== shown || !current) return;
      overlay = count.maps.get(name);
    }
    $("scale-end").textContent = !overlay ? "" : attends ? "where it looks" : `${overlay.peak.toPrecision(2)} a cell`;
  } catch (error) {
    toast("count-toast", error.message, 8);
  }
  view.redraw();
}

const between = (share) => {
  const at = Math.min(0.999, Math.max(0, share)) * (HEAT.length - 1);
  const [from, to] = [HEAT[Math.floor(at)], HEAT[Math.floor(at) + 1]];
  return from.map((value, i) => value + (to[i] - value) * (at % 1));
};

// Numbers → a small picture, one pixel a cell: the larger, the lighter and the more opaque.
function colour({ rows, columns, cell, values }) {
  const peak = values.reduce((most, value) => Math.max(most, value), 1e-9);
  const picture = new OffscreenCanvas(columns, rows);
  const context = picture.getContext("2d");
  const pixels = context.createImageData(columns, rows);
  values.forEach((value, i) => {
    const share = Math.max(0, value) / peak;
    pixels.data.set([...between(0.25 + 0.75 * share), 255 * Math.sqrt(share)], 4 * i);
  });
  context.putImageData(pixels, 0, 0);
  return { picture, cell, peak };
}

function drawScale() {
  const context = $("scale").getContext("2d");
  for (let x = 0; x < 180; x++) {
    context.fillStyle = `rgb(${between(0.25 + (0.75 * x) / 179).map(Math.round)})`;
    context.fillRect(x, 0, 1, 8);
  }
}

async function showPoints() {
  const count = shown;
  if ($("found").checked && !count.points) {
    const { points } = await get(`count/${count.data.id}/points`);
    count.points = new PointList(points);
  }
  view.redraw();
}

function paint(context) {
  if (!shown) return;
  if (overlay) {
    const { picture, cell } = overlay;
    context.save();
    context.beginPath(); // cells may reach beyond the image
    context.rect(view.left, view.top, view.width * view.scale, view.height * view.scale);
    context.clip();
    context.globalAlpha = $("opacity").value / 100;
    context.imageSmoothingEnabled = true;
    const [width, height] = [picture.width * cell[0], picture.height * cell[1]];
    context.drawImage(picture, view.left, view.top, width * view.scale, height * view.scale);
    context.restore();
  }
  for (const region of shown.regions) outline(context, region.polygon, true);
  if (corners) outline(context, corners, false);
  if ($("found").checked && shown.points) dots.draw(context, view, [[shown.points, "#e0314f"]]);
}

function outline(context, polygon, closed) {
  context.beginPath();
  for (const point of polygon) context.lineTo(...view.toScreen(...point));
  if (closed) context.closePath();
  for (const [style, width] of [["rgba(0,0,0,.6)", 4], ["#ffe14d", 2]]) {
    context.strokeStyle = style;
    context.lineWidth = width;
    context.stroke();
  }
  if (closed) return;
  context.fillStyle = "#ffe14d";
  for (const point of polygon) {
    const [x, y] = view.toScreen(...point);
    context.fillRect(x - 3, y - 3, 6, 6);
  }
}

// --- regions --------------------------------------------------------------------------------

function showRegions() {
  $("region-hint").hidden = !corners;
  $("regions").replaceChildren(...shown.regions.map((region) =>
    element("li", { class: "row" },
      element("input", { value: region.name, "aria-label": "Name of the region", onchange: (event) => rename(region, event.target) }),
      element("b", { title: region.found ? interval(region.found.interval) : "" }, region.found ? whole(region.found.count) : "…"),
      element("button", { title: "Remove", "aria-label": `Remove ${region.name}`, onclick: () => removeRegion(region) }, "×"))));
}

function rename(region, field) {
  const taken = shown.regions.some((each) => each !== region && each.name === field.value);
  if (field.value && !taken) region.name = field.value;
  field.value = region.name;
}

function removeRegion(region) {
  shown.regions = shown.regions.filter((each) => each !== region);
  showRegions();
  view.redraw();
}

async function closeRegion() {
  const polygon = corners;
  corners = null;
  if (polygon?.length >= 3) {
    const count = shown;
    let number = count.regions.length + 1;
    while (count.regions.some(({ name }) => name === `Region ${number}`)) number++;
    const region = { name: `Region ${number}`, polygon, found: null };
    count.regions.push(region);
    try {
      const asked = { regions: [{ name: region.name, polygon }] };
      region.found = Object.values(await send("POST", `count/${count.data.id}/regions`, asked))[0];
    } catch (error) {
      count.regions.splice(count.regions.indexOf(region), 1);
      toast("count-toast", error.message, 8);
    }
  }
  showRegions();
  view.redraw();
}

// --- mouse and keyboard ---------------------------------------------------------------------

let press = null;
const canvas = $("count-canvas");

canvas.addEventListener("pointerdown", (event) => {
  canvas.setPointerCapture(event.pointerId);
  press = { start: [event.offsetX, event.offsetY], last: [event.offsetX, event.offsetY], moved: false };
});
canvas.addEventListener("pointermove", (event) => {
  if (!press) return;
  const at = [event.offsetX, event.offsetY];
  if (Math.hypot(at[0] - press.start[0], at[1] - press.start[1]) > 4) press.moved = true;
  if (press.moved) view.pan(at[0] - press.last[0], at[1] - press.last[1]);
  press.last = at;
});
canvas.addEventListener("pointerup", () => {
  const done = press;
  press = null;
  if (!done || done.moved || !corners) return;
  const [x, y] = view.toImage(...done.start);
  const point = [Math.min(view.width, Math.max(0, x)), Math.min(view.height, Math.max(0, y))].map(rounded);
  const last = corners.at(-1);
  if (!last || Math.hypot(last[0] - point[0], last[1] - point[1]) * view.scale > 3) corners.push(point);
  view.redraw();
});
canvas.addEventListener("dblclick", () => corners && closeRegion());

export function onKey(event) {
  if (event.target.closest("input, select, textarea")) return;
  if (corners && event.key === "Enter") closeRegion();
  else if (event.key === "Escape") { corners = null; if (shown) showRegions(); }
  else if (event.key === "+" || event.key === "=") view.zoom(1.25);
  else if (event.key === "-") view.zoom(0.8);
  else if (event.key === "0") view.fit();
  else return;
  event.preventDefault();
  view.redraw();
}

// --- downloads ------------------------------------------------------------------------------

const rows = () => counts.map(({ file, data, regions }) => ({
  image: file.name, count: data.count, low: data.interval?.low ?? null, high: data.interval?.high ?? null,
  level: data.interval?.level ?? null, calibrated: data.interval?.calibrated ?? null,
  width: data.width, height: data.height, model: data.model,
  regions: regions.map(({ name, polygon, found }) => ({ name, polygon, count: found?.count, interval: found?.interval })),
}));

// A name that a spreadsheet would run as a formula is made a text.
const quoted = (value) => {
  const text = String(value ?? "");
  const safe = typeof value === "string" && /^[=+\-@\t\r]/.test(text) ? `'${text}` : text;
  return /[",\n]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
};

export function csv(table = rows()) {
  const lines = [["image", "region", "count", "low", "high", "level"]];
  for (const row of table) {
    lines.push([row.image, "", row.count, row.low, row.high, row.level]);
    for (const { name, count, interval: found } of row.regions) {
      lines.push([row.image, name, count, found?.low, found?.high, found?.level]);
    }
  }
  return lines.map((line) => line.map(quoted).join(",") + "\n").join("");
}

$("save-csv").addEventListener("click", () => download("counts.csv", new Blob([csv()], { type: "text/csv" })));
$("save-json").addEventListener("click", () =>
  download("counts.json", new Blob([JSON.stringify(rows(), null, 2)], { type: "application/json" })));
$("save-overlay").addEventListener("click", async () => {
  const query = `opacity=${$("opacity").value / 100}&points=${$("found").checked}`;
  const name = shown.file.name.replace(/\.\w+$/, "");
  try {
    download(`${name}-overlay.jpg`, await (await request(`count/${shown.data.id}/overlay?${query}`)).blob());
  } catch (error) {
    toast("count-toast", error.message, 8);
  }
});

$("map").addEventListener("change", showMap);
$("branch").addEventListener("change", showMap);
$("token").addEventListener("input", showMap);
$("opacity").addEventListener("input", () => view.redraw());
$("found").addEventListener("change", showPoints);
$("draw-region").addEventListener("click", () => {
  corners = [];
  showRegions();
  canvas.focus();
});
for (const id of ["files", "more-files"]) {
  $(id).addEventListener("change", (event) => {
    take([...event.target.files]);
    event.target.value = "";
  });
}
drawScale();
