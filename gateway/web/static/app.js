// Main module: follow the server's snapshots and draw them once a second while the page is visible.

import { call, events, getJson, hasKey, setKey } from "./api.js";
import { Batches, outlook, totals } from "./batches.js";
import { DotChart, NightChart, RateChart } from "./charts.js";
import { Chat } from "./chat.js";
import { count, duration, limitOf, money, percent, rangeText, seconds, standingText } from "./format.js";
import { History, partsOf, percentile } from "./series.js";
import { batchSentence, classesOf, eventsOf, folded, mechanismsOf, worth } from "./story.js";
import { TableForm } from "./table.js";
import { Teams } from "./teams.js";

const RETRY = 2000;
const BATCHES_EVERY = 2;
const NIGHT_EVERY = 60000;
const SHOWN_EVENTS = 12;
const JUDGED = { chats: 200, seconds: 600 }; // as in predictor/judge.py
const PRICES = "tidemill-prices";
const byId = (id) => document.getElementById(id);

const history = new History();
const charts = {
  online: new RateChart(byId("chat-rate"), "online", "Tokens per second of chats"),
  offline: new RateChart(byId("work-rate"), "offline", "Tokens per second of batch work"),
};
const ttft = new DotChart(byId("ttft"), "ttft", "Time to first token of each chat and its limit");
const tbt = new DotChart(byId("tbt"), "gap", "Time between tokens of each chat, P99, and its limit");
const night = new NightChart(byId("night"), "Chats within their limits, batch output and pauses of the last day or week");
const batches = new Batches({
  rows: byId("batch-rows"), file: byId("file"), drop: byId("drop"), problem: byId("batch-error"),
  onlyRunning: byId("only-running"), window: byId("window"), changed: drawBatchTotals, prices,
  table: new TableForm({
    form: byId("table"), models: byId("models"), window: byId("window"), prices, outlook, started: () => batches.refresh(),
  }),
});
const teams = new Teams({ card: byId("teams"), head: byId("team-head"), rows: byId("team-rows"), note: byId("teams-note"), prices });
const chat = new Chat({
  column: byId("column"), form: byId("ask"), prompt: byId("prompt"), send: byId("send"), copy: byId("copy"), clear: byId("clear"), beside: byId("beside"),
});

function show(id, text, state = "") {
  const element = byId(id);
  if (element.textContent !== text) element.textContent = text;
  if (element.dataset.state !== state) element.dataset.state = state;
}

function drawPromise(now) {
  const { slo, attainment, objectives: each, refused, attainment_target: target } = now;
  const goal = target ?? 0.99;
  show("attainment", percent(attainment), attainment === null ? "" : attainment >= goal ? "good" : "bad");
  const judged = history.chats.filter(({ time }) => time > now.time - JUDGED.seconds).slice(-JUDGED.chats).length;
  show("judged", slo ? `${judged ? `of the last ${count(judged)} chats` : "no chat yet"}; goal ${percent(goal)}` : "No SLO is set.");
  byId("objectives").replaceChildren(...standings((each || []).map(standingText)));
  byId("classes").replaceChildren(...standings(classesOf(now)));
  show("refused", refused ? `${count(refused)} refused since the start` : "");
}

/** List items of objectives or classes: {name, text, kept, state}. */
function standings(each) {
  return each.map(({ name, text, kept, state }) => {
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
}

function prices() {
  return { in: Number(byId("price-in").value), out: Number(byId("price-out").value) };
}

function drawWork(now) {
  const { text, state } = batchSentence(now);
  show("batch-state", text, state);
  const { prompt_tokens: prompt, output_tokens: output, answers } = now.batch;
  const rate = (name) => {
    const change = history.batchChange(name, 60);
    return change === null ? null : change.value / change.seconds;
  };
  const [answerRate, outputRate, promptRate] = [rate("answers"), rate("output_tokens"), rate("prompt_tokens")];
  show("batch-rate", answerRate ? `${count(answerRate)} answers/s: ${count(outputRate)} output, ${count(promptRate)} prompt tokens/s` : "–");
  show("batch-done", answers ? `${count(answers)} answers: ${count(output)} output, ${count(prompt)} prompt tokens` : "–");
  const price = prices();
  const value = worth(prompt, output, price.in, price.out);
  show("batch-worth", value === null ? "–" : money(value));
}

function drawBatchTotals(all) {
  const { left, eta, atRisk } = totals(all);
  const now = Date.now() / 1000;
  show("batch-left", left ? count(left) : "–");
  const risk = atRisk ? `; ${count(atRisk)} at risk` : "";
  show("batch-eta", eta === null ? "–" : `${rangeText(eta, now)}${risk}`, atRisk ? "bad" : "");
  byId("start").hidden = all.length > 0;
}

function drawEvents() {
  const found = folded(eventsOf(history.snapshots)).slice(-SHOWN_EVENTS).reverse();
  const text = found.map(({ time, text: words }) => `${time} ${words}`).join();
  const host = byId("events");
  if (!found.length || host.dataset.drawn === text) return;
  host.dataset.drawn = text;
  host.replaceChildren(...found.map(({ time, text: words, state }) => {
    const item = document.createElement("li");
    const when = document.createElement("time");
    when.textContent = new Date(time * 1000).toLocaleTimeString();
    item.dataset.state = state;
    item.append(when, words);
    return item;
  }));
}

function span() {
  return Number(byId("span").value);
}

function drawLatency(id, chart, name, now) {
  const limit = limitOf(now.slo, name === "gap" ? "tbt" : "ttft");
  const shown = history.chats.filter((each) => each.time > now.time - span());
  chart.draw(shown, now.time, span(), limit);
  const values = shown.map((each) => each[name]).filter((value) => value !== null);
  show(`${id}-note`, values.length ? `P50 ${seconds(percentile(values, 50))}, P99 ${seconds(percentile(values, 99))} of ${count(values.length)} chats` : "");
}

async function drawNight() {
  if (document.hidden || !history.latest) return;
  const nightSpan = Number(byId("night-span").value);
  const { minutes } = await getJson(`/dashboard/timeline?hours=${nightSpan / 3600}`);
  const now = Date.now() / 1000;
  night.draw(partsOf(minutes, now, nightSpan), now, nightSpan);
}

function drawEngine(now) {
  const steps = history.change("steps", 10);
  const per = (name) => (steps ? history.change(name, 10) / steps : null);
  show("step-measured", seconds(per("step_seconds")));
  show("step-planned", seconds(per("predicted_seconds")));
  show("mape", percent(now.mape));
  show("budget", now.latency_budget === null ? "–" : seconds(now.latency_budget));
  const leftover = history.change("leftover_seconds", 10);
  show("leftover", leftover ? percent(history.change("leftover_used_seconds", 10) / leftover, 0) : "–");
  for (const kind of ["online", "offline"]) {
    show(`${kind}-running`, count(now.running[kind]));
    show(`${kind}-waiting`, count(now.waiting[kind]));
  }
  const terms = mechanismsOf(now).flatMap(([name, text]) => [["dt", name], ["dd", text]]);
  byId("mechanisms").replaceChildren(...terms.map(([tag, textContent]) => Object.assign(document.createElement(tag), { textContent })));
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
  for (const kind of ["online", "offline"]) {
    show(`${kind}-rate`, count(last ? last[kind] : 0));
    charts[kind].draw(rates, now.time, span());
  }
  document.title = now.attainment === null ? "tidemill" : `${percent(now.attainment)} within limits · tidemill`;
  drawPromise(now);
  drawWork(now);
  drawLatency("ttft", ttft, "ttft", now);
  drawLatency("tbt", tbt, "gap", now);
  drawEvents();
  drawEngine(now);
  drawPool(now);
  drawEngines();
  const [state, text] = now.ready ? ["good", readiness(now.engines || [])] : ["bad", now.reason || "not ready"];
  document.body.dataset.stale = "";
  show("status", text, state);
}

/** Dim the figures of a server that does not answer any more, and say how old they are. */
function lost(text) {
  const { latest } = history;
  document.body.dataset.stale = latest ? "yes" : "";
  show("status", latest ? `${text}; last seen ${duration(Date.now() / 1000 - latest.time)} ago` : text, "bad");
}

function readiness(engines) {
  const ready = engines.filter((engine) => engine.state === "ready").length;
  return engines.length ? `ready: ${ready} of ${engines.length} engines` : "ready";
}

async function askForKey(note, state) {
  const dialog = byId("key-dialog");
  show("key-note", note, state);
  dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  const entered = byId("key").value.trim();
  byId("key").value = "";
  if (entered) setKey(entered);
}

async function describe() {
  const models = (await getJson("/v1/models")).data;
  chat.offer(models);
  show("model", models[0].id);
  const { version } = await getJson("/version");
  show("version", `tidemill ${version}`);
}

async function follow() {
  await describe();
  try {
    for (const snapshot of (await getJson("/dashboard/history")).snapshots) history.add(snapshot);
    drawNight().catch(() => {});
  } catch (error) {
    if (error.status !== 403) throw error;
    show("status", "this key can read its own batches only, not the metrics of the server", "warn");
    await new Promise((resolve) => setTimeout(resolve, 1000 * BATCHES_EVERY));
    if (!document.hidden) await Promise.all([batches.refresh(), teams.refresh()]);
    return;
  }
  draw();
  await Promise.all([batches.refresh(), teams.refresh()]);
  let ticks = 0;
  for await (const data of events(await call("/dashboard/events"))) {
    history.add(JSON.parse(data));
    draw();
    ticks += 1;
    if (ticks % BATCHES_EVERY !== 0 || document.hidden) continue;
    batches.refresh();
    teams.refresh();
  }
}

async function run() {
  for (;;) {
    try {
      await follow();
      if (history.latest) lost("connection lost, reconnecting");
    } catch (error) {
      if (error.status === 401) {
        await (hasKey() ? askForKey("That key was not accepted.", "bad") : askForKey("Stored in this tab only.", ""));
        continue;
      }
      if (error.status) show("status", error.message, "bad");
      else lost("the server does not answer");
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY));
  }
}

/** A snapshot comes every second: without one for some seconds the figures are old. */
function watch() {
  const { latest } = history;
  if (latest && Date.now() / 1000 - latest.time > 5) lost("the server does not answer");
}

/** Show the view that the address names; other anchors leave it. */
function view() {
  const { hash } = location;
  if (hash !== "#chat" && hash !== "#live" && hash !== "") return;
  document.body.dataset.view = hash === "#chat" ? "chat" : "live";
  if (hash === "#chat") byId("prompt").focus();
  else draw();
}

/** A batch of short questions, for somebody without a file. */
function sample() {
  const countries = ["France", "Italy", "Spain", "Japan"];
  const line = (i) => ({
    custom_id: `line-${i}`, method: "POST", url: "/v1/chat/completions",
    body: { model: byId("models").value, messages: [{ role: "user", content: `What is the capital of ${countries[i % 4]}?` }], max_tokens: 200 },
  });
  const text = [...Array(20).keys()].map((i) => JSON.stringify(line(i))).join("\n");
  batches.upload(new File([text], "sample.jsonl"));
}

function rememberPrices() {
  localStorage.setItem(PRICES, JSON.stringify(prices()));
  draw();
}

const remembered = JSON.parse(localStorage.getItem(PRICES) || "{}");
for (const side of ["in", "out"]) {
  byId(`price-${side}`).value = remembered[side] || "";
  byId(`price-${side}`).addEventListener("input", rememberPrices);
}
byId("sample").addEventListener("click", sample);
byId("base-url").textContent = `${location.origin}/v1`;
byId("copy-url").addEventListener("click", () => navigator.clipboard && navigator.clipboard.writeText(`${location.origin}/v1`));
byId("span").addEventListener("change", draw);
byId("night-span").addEventListener("change", () => drawNight().catch(() => {}));
setInterval(() => drawNight().catch(() => {}), NIGHT_EVERY);
document.addEventListener("visibilitychange", () => { draw(); if (!document.hidden) batches.refresh(); });
addEventListener("resize", () => { draw(); drawNight().catch(() => {}); });
addEventListener("hashchange", view);
setInterval(watch, 2000);
view();
run();
