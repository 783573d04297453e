// The page's modules that need no browser. Run by tests/test_web.py, or: node --test tests/web/
import assert from "node:assert/strict";
import test from "node:test";

globalThis.sessionStorage = { getItem: () => null, setItem: () => {} };
const files = new URL("../../gateway/web/static/", import.meta.url);
const { EventSplitter } = await import(new URL("api.js", files));
const { areaPath, linePath } = await import(new URL("charts.js", files));
const { endpointOf, outcome, timeLeft } = await import(new URL("batches.js", files));
const { count, duration, limitOf, objectives, percent, scale, seconds, standingText } = await import(new URL("format.js", files));
const { blocks } = await import(new URL("markdown.js", files));
const { History, WINDOW, percentile } = await import(new URL("series.js", files));

test("events are the same however the stream was cut", () => {
  const whole = 'data: {"a":1}\n\n: comment\n\ndata: two\ndata: lines\r\n\r\ndata: [DONE]\n\n';
  for (let first = 0; first <= whole.length; first += 1) {
    for (const second of [first, Math.min(whole.length, first + 3)]) {
      const splitter = new EventSplitter();
      const found = [whole.slice(0, first), whole.slice(first, second), whole.slice(second)].flatMap((part) => splitter.push(part));
      assert.deepEqual(found, ['{"a":1}', "two\nlines", "[DONE]"], `cut at ${first}, ${second}`);
    }
  }
});

test("rates are differences of counters", () => {
  const history = new History();
  for (let i = 0; i < 5; i += 1) history.add({ time: 100 + 2 * i, computed_tokens: 300 * i, offline_tokens: 100 * i, steps: i, chats: [] });
  assert.deepEqual(history.rates().at(-1), { time: 108, online: 100, offline: 50 });
  assert.equal(history.change("steps", 4), 2);
  assert.ok(history.rates(2).length <= 3);
});

test("each of several engines has rates of its own", () => {
  const history = new History();
  const engine = (number, computed, offline) => ({ engine: number, state: "ready", computed_tokens: computed, offline_tokens: offline });
  const common = { computed_tokens: 0, offline_tokens: 0 };
  assert.deepEqual(history.engines(), []);
  history.add({ ...common, time: 100, engines: [engine(0, 0, 0)] });
  assert.equal(history.engines()[0].online, null, "nothing is known of one snapshot");
  history.add({ ...common, time: 104, engines: [engine(0, 400, 100), engine(1, 80, 80)] });
  const [first, second] = history.engines();
  assert.deepEqual([first.online, first.offline], [75, 25]);
  assert.equal(second.offline, null, "an engine that was not there before");
});

test("a server that was started anew begins a new history", () => {
  const history = new History();
  history.add({ time: 1, computed_tokens: 900, offline_tokens: 0 });
  history.add({ time: 2, computed_tokens: 5, offline_tokens: 0 });
  assert.equal(history.snapshots.length, 1);
  history.add({ time: 2, computed_tokens: 5, offline_tokens: 0 });
  assert.equal(history.snapshots.length, 1, "a snapshot that came twice counts once");
});

test("the history stays bounded for ever", () => {
  const history = new History();
  for (let i = 0; i < 20000; i += 1) history.add({ time: i, computed_tokens: i, offline_tokens: 0, chats: [{ time: i, ttft: 1, gap: null }] });
  assert.ok(history.snapshots.length <= WINDOW + 2 && history.chats.length <= WINDOW + 1);
});

test("percentiles are nearest ranks", () => {
  assert.equal(percentile([], 99), null);
  assert.equal(percentile([3, 1, 2], 50), 2);
  assert.equal(percentile([...Array(100).keys()], 99), 98);
});

test("an objective as the server judges it", () => {
  const standing = { objective: "ttft_p99=1s", value: 0.9, bound: 1, attainment: 0.75 };
  assert.deepEqual(standingText(standing), { name: "TTFT P99", text: `${seconds(0.9)} of ${seconds(1)}`, kept: "kept by 75 %", state: "good" });
  assert.equal(standingText({ ...standing, value: 1.1 }).state, "bad");
  const tolerance = { objective: "tbt_mean=5%", value: 0.05, bound: null, attainment: null };
  assert.deepEqual(standingText(tolerance), { name: "TBT mean", text: seconds(0.05), kept: "", state: "" });
  assert.equal(standingText({ ...tolerance, value: null }).text, "–");
});

test("objectives of every form", () => {
  assert.deepEqual(objectives("ttft_p99=1s, tbt_mean=50ms"), [
    { metric: "ttft", statistic: "p99", limit: 1 },
    { metric: "tbt", statistic: "mean", limit: 0.05 },
  ]);
  assert.deepEqual(objectives("ttft_p99=5%,tbt_p99=5%"), []);
  assert.equal(limitOf("tbt_p99=100ms,tbt_mean=50ms", "tbt"), 0.05);
  assert.equal(limitOf(null, "tbt"), null);
});

test("figures as people read them", () => {
  assert.deepEqual([seconds(0), seconds(0.0042), seconds(0.25), seconds(2), seconds(null)], ["0", "4.2 ms", "250 ms", "2.00 s", "–"]);
  assert.deepEqual([percent(1), percent(0.9876), percent(NaN)], ["100 %", "98.8 %", "–"]);
  assert.deepEqual([count(1234.4), count(2.5), count(undefined)], ["1,234", "2.5", "–"]);
  assert.deepEqual([duration(59), duration(3700), duration(200000)], ["59 s", "1 h 1 min", "2 d 7 h"]);
});

test("scales are round and above the value", () => {
  for (const value of [0.003, 0.9, 1, 7, 99, 101, 123456]) {
    const { top, step } = scale(value);
    assert.ok(top >= value * 0.999 && top / step <= 6, `${value}: ${top} by ${step}`);
  }
  assert.deepEqual(scale(0), { top: 1, step: 1 });
});

test("paths", () => {
  assert.equal(linePath([[0, 1], [2, 3]]), "M0.0,1.0L2.0,3.0");
  assert.equal(areaPath([[0, 1], [2, 3]], [[0, 9], [2, 9]]), "M0.0,1.0L2.0,3.0L2.0,9.0L0.0,9.0Z");
  assert.equal(areaPath([], []), "");
});

test("code blocks, closed and still open", () => {
  assert.deepEqual(blocks("a\n```py\nx = 1\n```\nb"), [{ code: false, text: "a" }, { code: true, text: "x = 1" }, { code: false, text: "b" }]);
  assert.deepEqual(blocks("```\nx"), [{ code: true, text: "x" }]);
  assert.deepEqual(blocks("<img src=x>"), [{ code: false, text: "<img src=x>" }]);
});

test("the time that a batch has left", () => {
  const batch = { status: "in_progress", in_progress_at: 100, request_counts: { total: 10, completed: 3, failed: 1 } };
  assert.equal(timeLeft(batch, 140), 60);
  assert.equal(timeLeft({ ...batch, status: "completed" }, 140), null);
  assert.equal(timeLeft({ ...batch, request_counts: { total: 10, completed: 0, failed: 0 } }, 140), null);
});

test("rows that a stopped batch never ran are neither done nor failed", () => {
  const request_counts = { total: 10, completed: 3, failed: 7 };
  assert.deepEqual(outcome({ status: "completed", request_counts }), { total: 10, done: 10, lost: "7", stopped: false });
  assert.deepEqual(outcome({ status: "cancelled", request_counts }), { total: 10, done: 3, lost: "7 not done", stopped: true });
  assert.equal(outcome({ status: "validating", request_counts: null }).lost, "");
});

test("the endpoint of a file is its first line's url", async () => {
  assert.equal(await endpointOf(new Blob(['\n{"url":"/v1/completions"}\n{"url":"/x"}'])), "/v1/completions");
  assert.equal(await endpointOf(new Blob(["not json"])), "/v1/chat/completions");
});
