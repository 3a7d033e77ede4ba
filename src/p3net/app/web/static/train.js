// The Train tab: start, watch, stop and resume runs.

import { $, element, get, send } from "./api.js";

const STATES = { running: "training", finished: "finished", stopped: "stopped", failed: "failed" };
let used = null;

export function setStatus(status) {
  used = status.model?.run ?? null;
  $("start").disabled = status.training !== null;
}

// Whether a run goes on, so that the page asks again.
export async function refresh() {
  const runs = await get("runs");
  $("train-note").textContent = runs.length ? "" :
    "Ten marked images are a good start; the unmarked ones help too. The model is used as soon as it is finished.";
  const cards = $("runs");
  const kept = new Map([...cards.children].map((card) => [Number(card.dataset.run), card]));
  runs.forEach((run, i) => {
    const card = kept.get(run.number) ?? makeCard(run.number);
    fill(card, run);
    if (cards.children[i] !== card) cards.insertBefore(card, cards.children[i] ?? null);
  });
  return runs.some(({ state }) => state === "running");
}

function makeCard(number) {
  const card = element("article", { "data-run": number },
    element("h3", {}, `Run ${number}`, element("span", { class: "state" }), element("span", { class: "spring" }),
      element("button", { class: "stop", onclick: () => act(number, "stop") }, "Stop"),
      element("button", { class: "resume", onclick: () => act(number, "resume") }, "Resume"),
      element("button", { class: "use", onclick: () => act(number, "use") }, "Use this model")),
    element("progress", { max: 1, value: 0 }),
    element("p", { class: "soft facts" }),
    element("p", { class: "error", hidden: true }),
    element("canvas", { class: "curve", "aria-label": `Curves of run ${number}` }));
  new ResizeObserver(() => card.run && curve(card)).observe(card);
  return card;
}

function fill(card, run) {
  card.run = run;
  card.dataset.state = run.state;
  const find = (name) => card.querySelector(name);
  find(".state").textContent = run.number === used ? "in use" : STATES[run.state];
  find(".stop").hidden = run.state !== "running";
  find(".resume").hidden = run.state !== "stopped";
  find(".use").hidden = run.state !== "finished" || run.number === used;
  find("progress").value = run.steps ? run.step / run.steps : 0;
  find("progress").hidden = run.state === "finished";
  const { labelled, unlabelled, validation } = run.images;
  const last = run.validation.at(-1);
  find(".facts").textContent = [
    run.steps ? `step ${run.step} of ${run.steps}` : run.state === "running" ? "starting" : "",
    labelled === undefined ? "" : `${labelled} marked, ${unlabelled} unmarked, ${validation} validation images`,
    last ? `MAE ${last[1].toFixed(1)}` : "",
  ].filter(Boolean).join(" · ");
  find(".error").textContent = run.message;
  find(".error").hidden = !run.message;
  curve(card);
}

async function act(number, deed) {
  await attempt(() => send("POST", `runs/${number}/${deed}`));
}

async function attempt(deed) {
  $("train-error").hidden = true;
  try {
    await deed();
  } catch (error) {
    $("train-error").textContent = error.message;
    $("train-error").hidden = false;
  }
  document.dispatchEvent(new Event("look"));
}

$("train-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const settings = { steps: Number($("steps").value), seed: Number($("seed").value), validation: Number($("validation").value) };
  attempt(() => send("POST", "runs", settings));
});

// --- curves ---------------------------------------------------------------------------------

function curve(card) {
  const { loss, validation, steps } = card.run;
  const canvas = card.querySelector(".curve");
  canvas.hidden = loss.length < 2;
  if (canvas.hidden || !canvas.clientWidth) return;
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  const style = getComputedStyle(canvas);
  const ink = (name) => style.getPropertyValue(name);
  const [left, right, top, bottom] = [46, width - 46, 20, height - 22];
  const x = (step) => left + ((right - left) * step) / (steps || loss.at(-1)[0]);
  context.font = `11px ${style.fontFamily}`;
  context.strokeStyle = ink("--line");
  context.strokeRect(left + 0.5, top + 0.5, right - left, bottom - top);
  line(loss, "--soft", "left", "loss");
  if (validation.length) line(validation, "--mark", "right", "MAE on validation");
  context.fillStyle = ink("--soft");
  context.textAlign = "center";
  context.fillText(`${steps} steps`, right - 10, height - 6);
  context.fillText("0", left, height - 6);

  function line(points, colour, side, name) {
    const values = points.map(([, value]) => value).filter((value) => value > 0).sort((a, b) => a - b);
    if (!values.length) return;
    const high = values.at(-1) * 1.05;
    const low = side === "left" ? values[0] * 0.95 : 0; // losses on a logarithmic scale
    const share = side === "left"
      ? (value) => Math.log(Math.max(value, low) / low) / Math.log(high / low)
      : (value) => value / high;
    const y = (value) => bottom - (bottom - top) * share(value);
    context.strokeStyle = context.fillStyle = ink(colour);
    context.lineWidth = side === "left" ? 1.25 : 2;
    context.beginPath();
    for (const [step, value] of points) context.lineTo(x(step), y(value));
    context.stroke();
    if (side === "right") {
      for (const [step, value] of points) {
        context.beginPath();
        context.arc(x(step), y(value), 3, 0, 2 * Math.PI);
        context.fill();
      }
    }
    context.textAlign = side === "left" ? "right" : "left";
    const edge = side === "left" ? left - 6 : right + 6;
    context.fillText(high.toPrecision(2), edge, top + 8);
    context.fillText(low ? low.toPrecision(2) : "0", edge, bottom);
    context.textAlign = side === "left" ? "left" : "right";
    context.fillText(name, side === "left" ? left : right, top - 7);
  }
}
