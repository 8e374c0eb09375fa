"use strict";
const at = (id) => document.getElementById(id);
const token = new URLSearchParams(location.search).get("token");
const page = crypto.randomUUID();
const fields = ["model", "batch", "seq", "for", "budget_gib"];
const groups = ["", "-2"];
const parts = ["answer", "plan", "memory"];
const kept = new Map(); // settings of an answer, and its row: null until it is known
let events = null, waiting = 0, row = null;

// The settings of the form, as the address has them.
function settings() {
  const given = new URLSearchParams();
  for (const id of fields) if (at(id).value.trim()) given.set(id, at(id).value.trim());
  const gpus = groups.filter((group) => at("device" + group).value)
    .map((group) => `${at("nodes" + group).value}x${at("each" + group).value}:${at("device" + group).value}`);
  if (gpus.length) given.set("gpus", gpus.join("+"));
  return given;
}

// Fill the form from the settings of an address.
function fill(given) {
  for (const id of fields) if (given.has(id)) at(id).value = given.get(id);
  (given.get("gpus") || "").split("+").slice(0, 2).forEach((text, number) => {
    const found = /^(?:(\d+)x)?(\d+):(.+)$/.exec(text);
    if (!found) return;
    at("nodes" + groups[number]).value = found[1] || 1;
    at("each" + groups[number]).value = found[2];
    at("device" + groups[number]).value = found[3];
  });
}

// Write the settings and the kept answers into the address, which can be shared.
function remember() {
  const given = settings();
  for (const each of kept.keys()) given.append("keep", each);
  history.replaceState(null, "", `?token=${token}&${given}`);
}

function say(words) { at("status").textContent = words; }

function stale(is) {
  for (const each of document.querySelectorAll("[data-found]")) each.classList.toggle("stale", is);
}

// Listen to one search, whose page's last one the server ends.
function listen(given, more, take) {
  const source = new EventSource(`search?token=${token}&${more}&${given}`);
  source.onmessage = (message) => take(JSON.parse(message.data), source);
  source.onerror = () => { source.close(); take({ kind: "error", words: "the server does not answer" }, source); };
  return source;
}

function start() {
  remember();
  if (events) events.close();
  const given = settings();
  at("status").dataset.kind = "searching";
  at("launch").hidden = true;
  at("notes").replaceChildren();
  if (!given.has("model") || !given.has("gpus")) { say("Choose a model and a device."); stale(true); return; }
  say("searching …");
  stale(true);
  row = null;
  for (const id of ["memory_front", "price_front"]) at(id).textContent = "searching …";
  events = listen(given, `page=${page}`, (event, source) => take(event, source, String(given)));
}

function take(event, source, given) {
  if (source !== events && events) { source.close(); return; }
  if (event.kind === "progress") say(event.words);
  if (event.kind === "error" || event.kind === "none") { say(event.words); at("status").dataset.kind = event.kind; }
  if (event.kind === "answer") {
    for (const each of document.querySelectorAll("[data-found]")) each.hidden = false;
    stale(false);
    for (const id of parts) at(id).innerHTML = event[id];
    at("sentence").textContent = event.sentence;
    row = [given, event.row];
    say(event.so_far ? "the best plan so far; searching on …" : "the answer; looking at other sizes …");
    at("status").dataset.kind = event.so_far ? "so far" : "answer";
  }
  if (event.kind === "launch") {
    at("launch").hidden = !event.key;
    at("launch").href = `launch.zip?token=${token}&key=${event.key}`;
    at("notes").replaceChildren(...event.notes.map((note) => {
      const item = document.createElement("li");
      item.textContent = note;
      return item;
    }));
  }
  if (event.kind.endsWith("_front") && event.html) at(event.kind).innerHTML = event.html;
  if (event.kind === "end") {
    source.close();
    if (row) { say("done"); at("status").dataset.kind = "done"; }
  }
}

// Show the kept answers, each with what it yields.
function draw() {
  at("kept").hidden = !kept.size;
  at("cards").replaceChildren(...[...kept].map(([given, cells]) => {
    const card = document.createElement("div"), list = document.createElement("dl"), button = document.createElement("button");
    const title = document.createElement("h3");
    title.textContent = new URLSearchParams(given).get("model");
    for (const [name, value] of cells || [["searching", "…"]]) {
      const term = document.createElement("dt"), text = document.createElement("dd");
      term.textContent = name;
      text.textContent = value;
      list.append(term, text);
    }
    button.type = "button";
    button.textContent = "Remove";
    button.addEventListener("click", () => { kept.delete(given); draw(); remember(); at("keep").focus(); });
    card.append(title, list, button);
    card.className = "card";
    return card;
  }));
}

// Search the kept answers of a shared address, one after the other.
function recall() {
  const next = [...kept].find(([, cells]) => !cells);
  if (!next) return;
  listen(next[0], `page=${page}-kept&brief=1`, (event, source) => {
    if (event.kind === "answer") kept.set(next[0], event.row);
    if (event.kind === "error" || event.kind === "none") kept.set(next[0], [["no answer", event.words]]);
    draw();
    if (event.kind === "end") { source.close(); recall(); }
  });
}

at("form").addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(start, 300); });
at("form").addEventListener("submit", (event) => event.preventDefault());
at("keep").addEventListener("click", () => { if (row) { kept.set(...row); draw(); remember(); } });
const given = new URLSearchParams(location.search);
fill(given);
for (const each of given.getAll("keep").slice(0, 8)) kept.set(each, null);
draw();
recall();
start();
