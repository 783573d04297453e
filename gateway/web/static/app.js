// Main module: follow the server's snapshots and draw them once a second while the page is visible.

import { call, events, getJson, hasKey, setKey } from "./api.js";
import { Batches } from "./batches.js";
import { DotChart, TideChart } from "./charts.js";
import { Playground } from "./chat.js";
import { count, limitOf, percent, seconds, standingText } from "./format.js";
import { History, WINDOW, percentile } from "./series.js";

const RETRY = 2000;
const BATCHES_EVERY = 2;
const byId = (id) => document.getElementById(id);

const history = new History();
const tide = new TideChart(byId("tide"));
const ttft = new DotChart(byId("ttft"), "ttft", "Time to first token of each chat and its limit");
const tbt = new DotChart(byId("tbt"), "gap", "Longest gap between two tokens of each chat and its limit");
const batches = new Batches({ rows: byId("batch-rows"), file: byId("file"), drop: byId("drop"), problem: byId("batch-error") });
const playground = new Playground({
  turns: byId("turns"), form: byId("ask"), prompt: byId("prompt"), send: byId("send"), tier: byId("tier"),
  temperature: byId("temperature"), maxTokens: byId("max-tokens"), system: byId("system"), copy: byId("copy"), clear: byId("clear"),
});

function show(id, text, state = "") {
  const element = byId(id);
  if (element.textContent !== text) element.textContent = text;
  if (element.dataset.state !== state) element.dataset.state = state;
}

function drawPromise(now) {
  const { slo, attainment, objectives: each, refused, attainment_target: target } = now;
  show("attainment", percent(attainment), attainment === null ? "" : attainment >= (target ?? 0.99) ? "good" : "bad");
  show("slo", promiseText(slo));
  const rows = (each || []).map((standing) => {
    const { name, text, kept, state } = standingText(standing);
    const item = document.createElement("li");
    const what = document.createElement("span");
    what.textContent = name;
    const figure = document.createElement("b");
    figure.textContent = text;
    figure.dataset.state = state;
    const share = document.createElement("small");
    share.textContent = kept;
    item.append(what, figure, share);
    return item;
  });
  byId("objectives").replaceChildren(...rows);
  show("refused", refused ? `${count(refused)} refused since the start` : "");
}

function promiseText(slo) {
  if (!slo) return "No SLO is set.";
  const first = limitOf(slo, "ttft");
  const gap = limitOf(slo, "tbt");
  const parts = [];
  if (first !== null) parts.push(`their first token within ${seconds(first)}`);
  if (gap !== null) parts.push(`no gap beyond ${seconds(gap)}`);
  return parts.length ? `of the last chats had ${parts.join(" and ")}` : `of the last chats kept ${slo}`;
}

/** Time span of the charts in seconds, which grows with the history. */
function span(now) {
  const known = now.time - history.snapshots[0].time;
  return [60, 120, 300, 600].find((width) => known <= width) || WINDOW;
}

function drawLatency(id, chart, name, now) {
  const limit = limitOf(now.slo, name === "gap" ? "tbt" : "ttft");
  const width = span(now);
  chart.draw(history.chats.filter((chat) => chat.time > now.time - width), now.time, width, limit);
  const values = history.chats.map((chat) => chat[name]).filter((value) => value !== null);
  const note = values.length ? `P50 ${seconds(percentile(values, 50))}, P99 ${seconds(percentile(values, 99))} of ${count(values.length)}` : "";
  show(`${id}-note`, note);
}

function drawEngine(now) {
  const steps = history.change("steps", 10);
  const per = (name) => (steps ? history.change(name, 10) / steps : null);
  show("step-measured", seconds(per("step_seconds")));
  show("step-predicted", seconds(per("predicted_seconds")));
  show("mape", percent(now.mape));
  show("budget", now.latency_budget === null ? "–" : seconds(now.latency_budget));
  const leftover = history.change("leftover_seconds", 10);
  show("leftover", leftover ? percent(history.change("leftover_used_seconds", 10) / leftover, 0) : "–");
  const breaker = now.breaker || "–";
  show("breaker", breaker.replace("_", " "), { closed: "good", open: "bad", half_open: "warn" }[breaker] || "");
  for (const kind of ["online", "offline"]) {
    show(`${kind}-running`, count(now.running[kind]));
    show(`${kind}-waiting`, count(now.waiting[kind]));
  }
}

function drawPool(now) {
  const { units } = now;
  const total = units.total || 1;
  const parts = [["owned", "in use", units.owned], ["cached", "prefixes", units.cached], ["free", "free", units.free]];
  const legend = parts.map(([className, text, value]) => [className, `${text} ${percent(value / total, 0)}`]);
  if (units.hidden_blocks) legend.push(["hiddenstate", `${count(units.hidden_blocks)} blocks of hidden state`]);
  if (units.host_total) legend.push(["host", `host ${percent(units.host_used / units.host_total, 0)}`]);
  const bar = byId("pool");
  if (!bar.children.length) parts.slice(0, 2).forEach(([className]) => bar.append(Object.assign(document.createElement("span"), { className })));
  parts.slice(0, 2).forEach(([, , value], i) => { bar.children[i].style.flexBasis = `${(100 * value) / total}%`; });
  byId("pool-legend").replaceChildren(...legend.map(([className, text]) => Object.assign(document.createElement("li"), { className, textContent: text })));
}

function drawEngines() {
  const engines = history.engines();
  byId("engines").hidden = !engines.length;
  const table = byId("engine-rows");
  while (table.children.length > engines.length) table.lastChild.remove();
  engines.forEach((engine, number) => {
    const row = table.children[number] || table.insertRow();
    const cells = [
      `${engine.engine}`, stateOf(engine), count(engine.running), count(engine.waiting), count(engine.online), count(engine.offline),
      percent(engine.units.total ? engine.units.owned / engine.units.total : null, 0), count(engine.routed), count(engine.moved),
    ];
    cells.forEach((text, at) => { (row.cells[at] || row.insertCell()).textContent = text; });
    row.cells[1].dataset.state = engine.state === "ready" ? "good" : "bad";
    row.title = engine.trouble || "";
  });
}

function stateOf(engine) {
  return typeof engine.pipeline_with === "number" ? `one pipeline with ${engine.pipeline_with}` : engine.state;
}

function draw() {
  const now = history.latest;
  if (!now || document.hidden) return;
  const rates = history.rates();
  const last = rates[rates.length - 1];
  show("online-rate", count(last ? last.online : 0));
  show("offline-rate", count(last ? last.offline : 0));
  document.title = now.attainment === null ? "tidemill" : `${percent(now.attainment)} kept · tidemill`;
  tide.draw(rates, now.time, span(now));
  drawPromise(now);
  drawLatency("ttft", ttft, "ttft", now);
  drawLatency("tbt", tbt, "gap", now);
  drawEngine(now);
  drawPool(now);
  drawEngines();
  const [state, text] = now.ready ? ["good", readiness(now.engines || [])] : ["bad", now.reason || "not ready"];
  show("status", text, state);
}

function readiness(engines) {
  const ready = engines.filter((engine) => engine.state === "ready").length;
  return engines.length ? `ready: ${ready} of ${engines.length} engines` : "ready";
}

async function askForKey(note) {
  const dialog = byId("key-dialog");
  byId("key-note").textContent = note;
  dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  const entered = byId("key").value.trim();
  byId("key").value = "";
  if (entered) setKey(entered);
}

async function describe() {
  const models = (await getJson("/v1/models")).data;
  playground.model = models[0].id;
  show("model", models[0].id);
  byId("max-tokens").max = models[0].max_model_len;
  const { version } = await getJson("/version");
  show("version", `tidemill ${version}`);
}

async function follow() {
  await describe();
  try {
    for (const snapshot of (await getJson("/dashboard/history")).snapshots) history.add(snapshot);
  } catch (error) {
    if (error.status !== 403) throw error;
    show("status", "this key can read its own batches only, not the metrics of the server", "warn");
    await new Promise((resolve) => setTimeout(resolve, 1000 * BATCHES_EVERY));
    if (!document.hidden) await batches.refresh();
    return;
  }
  draw();
  await batches.refresh();
  let ticks = 0;
  for await (const data of events(await call("/dashboard/events"))) {
    history.add(JSON.parse(data));
    draw();
    ticks += 1;
    if (ticks % BATCHES_EVERY === 0 && !document.hidden) batches.refresh();
  }
}

async function run() {
  for (;;) {
    try {
      await follow();
      if (history.latest) show("status", "connection lost, reconnecting", "warn");
    } catch (error) {
      if (error.status === 401) {
        await askForKey(hasKey() ? "That key was not accepted." : "Stored in this tab only.");
        continue;
      }
      show("status", error.status ? error.message : "the server does not answer", "bad");
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY));
  }
}

document.addEventListener("visibilitychange", () => { draw(); if (!document.hidden) batches.refresh(); });
addEventListener("resize", draw);
run();
