// The page: three tabs, what is being counted with, and when to look again.

import { $, get } from "./api.js";
import * as count from "./count.js";
import * as mark from "./mark.js";
import * as train from "./train.js";

const TABS = ["count", "mark", "train"];
let status = null;
let tab = null;
let timer = null;

function show(name) {
  tab = name;
  for (const each of TABS) {
    $(each).hidden = each !== name;
    $(`tab-${each}`).setAttribute("aria-selected", each === name);
  }
  history.replaceState(null, "", `#${name}`);
  look();
}

// Ask how things stand, more often while something goes on.
async function look() {
  clearTimeout(timer);
  let lively = false;
  try {
    const before = status?.model?.name;
    status = await get("status");
    const { model, folder } = status;
    $("model").textContent = model
      ? `counting with ${model.name}${model.mae === null ? "" : `, MAE ${model.mae.toFixed(1)}`}`
      : "no model yet";
    $("model").dataset.state = model ? "there" : "none";
    for (const each of ["mark", "train"]) $(`tab-${each}`).hidden = !folder;
    $("draft").hidden = !model;
    count.setStatus(status);
    train.setStatus(status);
    lively = status.training !== null;
    if (tab === "mark") lively = (await mark.propose()) || lively;
    if (tab === "train") lively = (await train.refresh()) || lively;
    if (before !== undefined && before !== model?.name) document.title = `p3net · ${model?.name ?? ""}`;
  } catch (error) {
    $("model").textContent = error.status === 401 ? error.message : "the server does not answer";
    $("model").dataset.state = "gone";
  }
  timer = setTimeout(look, lively ? 1500 : 10_000);
}

for (const name of TABS) {
  $(`tab-${name}`).addEventListener("click", async () => {
    show(name);
    if (name === "mark") await mark.refresh().catch(() => {});
  });
}

document.addEventListener("look", look);
document.addEventListener("keydown", (event) => {
  if (tab === "mark") mark.onKey(event);
  if (tab === "count") count.onKey(event);
});
document.addEventListener("paste", (event) => {
  const files = [...(event.clipboardData?.files ?? [])];
  if (files.length) {
    show("count");
    count.take(files);
  }
});
document.addEventListener("dragover", (event) => {
  event.preventDefault();
  document.body.classList.add("dropping");
});
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("dropping");
});
document.addEventListener("drop", (event) => {
  event.preventDefault();
  document.body.classList.remove("dropping");
  show("count");
  count.take([...event.dataTransfer.files]);
});

const start = await get("status").catch(() => null);
const wanted = location.hash.slice(1);
show(TABS.includes(wanted) && (start?.folder || wanted === "count") ? wanted : start?.folder ? "mark" : "count");
if (start?.folder) await mark.refresh();
document.body.dataset.ready = "true";
