// The page's modules that need no browser. Run by tests/test_web.py, or: node --test tests/web/
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import test from "node:test";

globalThis.sessionStorage = { getItem: () => null, setItem: () => {} };
const files = new URL("../../gateway/web/static/", import.meta.url);
const { EventSplitter } = await import(new URL("api.js", files));
const { areaPath, latencyScale } = await import(new URL("charts.js", files));
const { billText, endText, firstLine, outcome, outlook, totals } = await import(new URL("batches.js", files));
const { clock, count, duration, limitOf, objectives, percent, scale, seconds, standingText } = await import(new URL("format.js", files));
const { blocks, spans } = await import(new URL("markdown.js", files));
const { answerOf, causesOf, failedOf, rowsOf } = await import(new URL("detail.js", files));
const { History, WINDOW, partsOf, percentile } = await import(new URL("series.js", files));
const { batchSentence, classesOf, eventsOf, folded, mechanismsOf, worth } = await import(new URL("story.js", files));
const { estimateText, expectedTokens, isTable } = await import(new URL("table.js", files));
const { teamCells } = await import(new URL("teams.js", files));
const { alternativesText, chanceOf, piecesOf } = await import(new URL("tokens.js", files));

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
  assert.deepEqual(standingText(standing), { name: "TTFT P99", text: `${seconds(0.9)}, limit ${seconds(1)}`, kept: "met by 75 % of the chats", state: "good" });
  assert.equal(standingText({ ...standing, value: 1.1 }).state, "bad");
  const tolerance = { objective: "tbt_mean=5%", value: 0.05, bound: null, attainment: null };
  assert.deepEqual(standingText(tolerance), { name: "TBT mean", text: seconds(0.05), kept: "", state: "" });
  assert.equal(standingText({ ...tolerance, value: null }).text, "–");
  assert.equal(standingText({ ...tolerance, objective: "premium:tbt_p99=50ms" }).name, "premium TBT P99");
});

test("objectives of every form", () => {
  assert.deepEqual(objectives("ttft_p99=1s, tbt_mean=50ms"), [
    { metric: "ttft", statistic: "p99", limit: 1 },
    { metric: "tbt", statistic: "mean", limit: 0.05 },
  ]);
  assert.deepEqual(objectives("ttft_p99=5%,tbt_p99=5%"), []);
  assert.equal(limitOf("tbt_p99=100ms,tbt_mean=50ms;premium:tbt_p99=10ms", "tbt"), 0.05);
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
  assert.equal(areaPath([[0, 1], [2, 3]], [[0, 9], [2, 9]]), "M0.0,1.0L2.0,3.0L2.0,9.0L0.0,9.0Z");
  assert.equal(areaPath([], []), "");
});

test("blocks of Markdown", () => {
  assert.deepEqual(blocks("a\n```py\nx = 1\n```\nb"), [{ kind: "text", text: "a" }, { kind: "code", text: "x = 1" }, { kind: "text", text: "b" }]);
  assert.deepEqual(blocks("```\nx"), [{ kind: "code", text: "x" }], "a fence that is still open");
  assert.deepEqual(blocks("<img src=x>"), [{ kind: "text", text: "<img src=x>" }]);
  assert.deepEqual(blocks("## Two\ntext\nmore\n\nnext"), [{ kind: "heading", level: 2, text: "Two" }, { kind: "text", text: "text\nmore" }, { kind: "text", text: "next" }]);
  assert.deepEqual(blocks("- a\n  - b\n1. c"), [{ kind: "list", items: [{ depth: 0, number: null, text: "a" }, { depth: 1, number: null, text: "b" }, { depth: 0, number: 1, text: "c" }] }]);
  assert.deepEqual(blocks("| a | b |\n|---|:-:|\n| 1 | 2 |"), [{ kind: "table", rows: [["a", "b"], ["1", "2"]] }]);
  assert.deepEqual(blocks("> q\n> r"), [{ kind: "quote", text: "q\nr" }]);
  assert.deepEqual(blocks("a | b"), [{ kind: "text", text: "a | b" }], "a bar alone makes no table");
});

test("every line of a text is in some block, and the parser ends", () => {
  const pieces = ["", "a", "- x", "  y", "```", "# h", "> q", "a|b", "--|--", "1. z", "#"];
  for (let seed = 0; seed < 3000; seed += 1) {
    const lines = [...Array(6).keys()].map((i) => pieces[(seed * 7919 + i * i * 104729 + ((seed >> i) % 11)) % pieces.length]);
    const text = JSON.stringify(blocks(lines.join("\n")));
    for (const line of lines.filter((each) => /^[axyzh]$/.test(each))) assert.ok(text.includes(line), `${lines}`);
  }
});

test("spans of a line", () => {
  assert.deepEqual(spans("a **b** `c*d*` *e* [f](http://g) 2*3*4"), [
    { kind: "text", text: "a " }, { kind: "strong", text: "b" }, { kind: "text", text: " " }, { kind: "code", text: "c*d*" }, { kind: "text", text: " " },
    { kind: "em", text: "e" }, { kind: "text", text: " " }, { kind: "link", text: "f", href: "http://g" }, { kind: "text", text: " 2" }, { kind: "em", text: "3" }, { kind: "text", text: "4" },
  ]);
  assert.deepEqual(spans("[x](javascript:alert(1))"), [{ kind: "text", text: "[x](javascript:alert(1))" }]);
});

test("the end of a batch is the server's forecast, as a range and a clock time", () => {
  const now = 1_700_000_000;
  const batch = { status: "in_progress", metadata: { "tidemill.eta": `${now + 600}-${now + 840}`, "tidemill.at_risk": "true" } };
  assert.deepEqual(outlook(batch), { eta: [now + 600, now + 840], atRisk: true, warning: "", tokens: 0 });
  assert.equal(endText(batch, now), `done in about 10 to 14 min (${clock(now + 840, now)}); at risk`);
  assert.equal(endText({ status: "in_progress", metadata: null }, now), "");
  assert.equal(endText({ status: "completed", completed_at: now - 60 }, now), `ended ${clock(now - 60, now)}`);
  const counts = { total: 10, completed: 3, failed: 1 };
  const all = [{ ...batch, request_counts: counts }, { status: "completed", request_counts: counts }];
  assert.deepEqual(totals(all), { left: 6, eta: [now + 600, now + 840], atRisk: 1 });
});

test("lines that a stopped batch never ran are neither done nor failed", () => {
  const request_counts = { total: 10, completed: 3, failed: 2 };
  assert.deepEqual(outcome({ request_counts }), { total: 10, done: 3, failed: 2, unfinished: 5 });
  assert.deepEqual(outcome({ request_counts: null }), { total: 0, done: 0, failed: 0, unfinished: 0 });
});

test("a chart of latencies fits the values, with the limit inside if it is near", () => {
  assert.deepEqual(latencyScale([0.02], 1).near, false);
  assert.ok(latencyScale([0.02], 1).top < 0.1);
  assert.ok(latencyScale([0.5], 1).near && latencyScale([0.5], 1).top >= 1.2);
  assert.ok(latencyScale([50], 1).top <= 5, "values far above the limit are cut off");
  assert.ok(latencyScale([], 1).near && latencyScale([], 1).top >= 1);
});

const SNAPSHOT = {
  time: 0, ready: true, running: { online: 1, offline: 1 }, waiting: { online: 0, offline: 0 }, breaker: "closed", breaker_cause: null,
  held: "", offline_share: 1, latency_budget: 0.08, attainment: 0.97, refused: 0,
};

test("batch work in a sentence", () => {
  const say = (more) => batchSentence({ ...SNAPSHOT, ...more }).text;
  assert.equal(say({}), "Running beside chats: steps may take 80 ms.");
  assert.equal(say({ running: { online: 0, offline: 3 } }), "Running on the whole machine: no chat now.");
  assert.equal(say({ running: { online: 3, offline: 0 } }), "No batch work.");
  assert.equal(say({ breaker: "open", breaker_cause: "slo" }), "Paused beside chats: chats missed their limits (97 % of the last chats within them).");
  assert.match(say({ noise: 0.04 }), /\. Without batch work the chats vary by ± 4 %\.$/);
  assert.equal(say({ held: "no offline budget keeps the SLO (search)" }), "Paused beside chats: no offline budget keeps the SLO (search).");
  assert.equal(say({ offline_share: 0.12 }), "Running beside chats with 12 % of its room, which grows with each chat within its limits.");
});

test("events are the changes between snapshots", () => {
  const states = [{}, { breaker: "open", breaker_cause: "ttft_mean" }, { breaker: "open", refused: 2 }, { breaker: "half_open", offline_share: 0.1 }, { ready: false, reason: "engine starts" }, {}];
  const found = eventsOf(states.map((state, time) => ({ ...SNAPSHOT, ...state, time })));
  assert.deepEqual(found.map(({ time, text }) => [time, text.slice(0, 34)]), [
    [1, "Batch work paused beside chats: th"], [2, "2 chats refused: their wait would "], [3, "Batch work resumed beside chats wi"],
    [4, "The server is not ready: engine st"], [4, "Batch work resumed beside chats; i"], [5, "The server is ready."],
  ]);
  const changes = (...shares) => eventsOf(shares.map((offline_share, time) => ({ ...SNAPSHOT, offline_share, time }))).map(({ time, text }) => [time, text.match(/\d+ %|all/g).join()]);
  assert.deepEqual(changes(1, 0.5, 0.2, 0.6, 1), [[1, "100 %,50 %"], [4, "all"]]);
  assert.deepEqual(changes(0.25, 0.26, 0.13, 0.2, 0.26, 0.5, 0.25), [[2, "26 %,13 %"], [4, "26 %"], [6, "50 %,25 %"]], "a server that has just started");
  assert.deepEqual(changes(0.25, 0.3, 0.6, 1, 0.9, 1), [], "growth and small changes");
});

test("the bill of a batch has what the server knows", () => {
  const bill = { input_tokens: 12_345, cached_tokens: 5, output_tokens: 678, engine_seconds: 2.5, value: 0.01234 };
  assert.equal(billText(bill), "12,345 + 678 tokens, 2.50 s of the engine, worth 0.0123");
  assert.equal(billText({ ...bill, engine_seconds: null, value: null }), "12,345 + 678 tokens");
  assert.equal(billText({ ...bill, input_tokens: 0, output_tokens: 0 }), "", "nothing has run");
});

test("the row of a team has the sums of its requests and batch lines", () => {
  const used = { input_tokens: 1200, output_tokens: 30, engine_seconds: 1.5, value: 0.25 };
  const team = { tenant: "shop", requests: used, batches: { ...used, output_tokens: 7 }, running_requests: 2, waiting_requests: 1, refused_requests: 3, unfinished_lines: 4000 };
  assert.deepEqual(teamCells(team), ["shop", "1,200 + 30", "1,200 + 7", "2", "1", "3", "4,000", "3.00 s", "0.50"]);
  const unknown = { ...used, engine_seconds: null, value: null };
  assert.deepEqual(teamCells({ ...team, requests: unknown, batches: unknown }).slice(-2), ["–", "–"]);
  assert.equal(teamCells({ ...team, requests: unknown }).at(-2), "1.50 s", "only one part is known");
});

test("a chunk is shown by token, unless tokens share a character", () => {
  const token = (text, chance, bytes = [...Buffer.from(text)]) => ({ token: text, logprob: Math.log(chance), bytes, top_logprobs: [] });
  const [two, words] = [[token(" Pa", 0.5), token("ris", 0.8)], [token("\ufffd", 0.5, [226]), token("\ufffd", 0.5, [130, 172])]];
  assert.deepEqual(piecesOf(" Paris", two), [{ text: " Pa", tokens: [two[0]] }, { text: "ris", tokens: [two[1]] }]);
  assert.deepEqual(piecesOf("€", words), [{ text: "€", tokens: words }]);
  assert.deepEqual([piecesOf("", two), piecesOf("kept", [])], [[], [{ text: "kept", tokens: [] }]]);
  assert.ok(Math.abs(chanceOf(piecesOf("€", words)[0]) - 0.25) < 1e-9);
  assert.equal(chanceOf({ tokens: [] }), 1, "a text without probabilities is not shaded");
  const rivals = [token("ris", 0.8), token("\n", 0.15), token("rt", 0.04)];
  assert.equal(alternativesText({ tokens: [{ ...two[1], top_logprobs: rivals }] }), '"ris" 80 %, else "\\n" 15 %, "rt" 4 %');
  assert.equal(alternativesText({ tokens: two }), '" Pa" 50 %; "ris" 80 %');
});

test("worth of tokens", () => {
  assert.equal(worth(2e6, 1e6, 0, 0), null);
  assert.equal(worth(2e6, 1e6, 0.5, 1.5), 2.5);
});

test("texts can be read: contrast of at least 4.5 in both themes", () => {
  const css = readFileSync(new URL("style.css", files), "utf8");
  const luminance = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)).reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const themes = [...css.matchAll(/:root \{([^}]*)\}/g)].map(([, body]) => Object.fromEntries([...body.matchAll(/--([\w-]+): (#\w{6})/g)].map(([, name, value]) => [name, value])));
  assert.equal(themes.length, 2);
  for (const theme of themes) {
    for (const name of ["ink", "quiet", "faint", "good", "bad", "warn"]) {
      for (const ground of ["card", "ground"]) {
        const [low, high] = [luminance(theme[name]), luminance(theme[ground])].sort((a, b) => a - b);
        assert.ok((high + 0.05) / (low + 0.05) >= 4.5, `${name} on ${ground}: ${((high + 0.05) / (low + 0.05)).toFixed(2)}`);
      }
    }
  }
});

test("a file is a table of rows or of requests, by its name and its first line", async () => {
  assert.deepEqual(await firstLine(new Blob(['\n{"url":"/v1/completions"}\n{"url":"/x"}'])), { url: "/v1/completions" });
  assert.equal(await firstLine(new Blob(["not json"])), null);
  for (const name of ["a.csv", "A.TSV", "a.parquet", "a.json", "a.jsonl.gz"]) assert.ok(isTable(name, null), name);
  for (const first of [{ text: "good" }, { url: "https://a" }, { custom_id: "a" }]) assert.ok(isTable("a.jsonl", first));
  for (const first of [{ url: "/v1/completions", body: {} }, null]) assert.ok(!isTable("a.jsonl", first));
});

test("tokens of a table are expected from the rows that were answered", () => {
  const table = { rows: 12, requests: 10, prompt_chars: 1000 };
  const answers = [{ chars: 100, usage: { prompt_tokens: 30, completion_tokens: 5 } }, { chars: 300, usage: { prompt_tokens: 70, completion_tokens: 7 } }];
  assert.equal(expectedTokens(table, []), null);
  const tokens = expectedTokens(table, answers);
  assert.deepEqual(tokens, { prompt: 250, output: 60 });
  const text = estimateText(table, tokens, [1600, 1900], { in: 1000, out: 2000 }, 1000);
  assert.match(text, /^12 rows; 2 without a request; about 250 prompt and 60 output tokens; price 0.37; done in about 10 to 15 min/);
  assert.equal(estimateText({ rows: 3, requests: 3 }, null, null, {}), "3 rows; end unknown before the first batch work");
});

test("a drop and a restore of layers are events", () => {
  const snapshot = (time, mechanisms) => ({ time, ready: true, breaker: "closed", refused: 0, mechanisms });
  const counts = (drops, restores) => ({ drops: { drops, restores, failed: 0 } });
  const found = eventsOf([snapshot(1), snapshot(2, counts(1, 0)), snapshot(3, counts(1, 0)), snapshot(4, counts(1, 1))]);
  assert.deepEqual(found.map(({ time, state }) => [time, state]), [[2, "warn"], [4, "good"]]);
});

test("classes are shown where there are several", () => {
  const usual = { name: "default", promise: "ttft_p99=1s", attainment: null, target: 0.99 };
  const premium = { name: "premium", promise: "ttft_p90=300ms", attainment: 0.95, target: 0.9 };
  assert.deepEqual(classesOf({ classes: [usual] }), []);
  assert.deepEqual(classesOf({}), []);
  assert.deepEqual(classesOf({ classes: [usual, premium] }).map(({ state }) => state), ["", "good"]);
  const [missed] = classesOf({ classes: [{ ...premium, attainment: 0.89 }, usual] });
  assert.deepEqual([missed.name, missed.kept, missed.state], ["premium", "ttft_p90=300ms", "bad"]);
});

test("mechanisms that ran are named with their counts", () => {
  assert.deepEqual(mechanismsOf({}), []);
  const mechanisms = { drafts: { verified: 800, right: 600 }, plans: { made: 12, late: 1 }, drops: { drops: 2, restores: 1, failed: 0 } };
  assert.deepEqual(mechanismsOf({ mechanisms }).map(([, text]) => text), ["12 made, 0 continued, 1 late", "75 % of 800 right", "2 times, restored 1, failed 0"]);
});

test("pauses that follow within a minute are one event", () => {
  const paused = (time) => ({ time, text: "Batch work paused beside chats: chats missed their limits.", state: "bad" });
  const resumed = (time) => ({ time, text: "Batch work resumed beside chats with 50 % of its room.", state: "warn" });
  const other = { time: 70, text: "The server is ready.", state: "good" };
  const found = folded([paused(0), resumed(2), paused(10), resumed(15), other, paused(80), resumed(200)]);
  assert.deepEqual(found.map(({ time, text }) => [time, text]), [
    [15, "Batch work paused 2 times beside chats in 15 s: chats missed their limits."], [70, other.text], [80, paused(80).text], [200, resumed(200).text],
  ]);
});

test("minutes of a night are summed over equal parts, and none is lost", () => {
  const minute = (time, fields) => ({ time, good: 0, bad: 0, refused: 0, answers: 0, prompt: 0, output: 0, paused: 0, why: "", ...fields });
  const now = 86400 * 3 + 17;
  const minutes = Array.from({ length: 1440 }, (_, at) => minute(Math.floor((now - 86400) / 60 + at) * 60, { good: 2, bad: 1, output: 60, paused: at === 7 ? 5 : 0, why: at === 7 ? "slow" : "" }));
  const parts = partsOf(minutes, now, 86400, 144);
  assert.equal(parts.length, 144);
  assert.equal(parts.reduce((sum, part) => sum + part.good, 0), 2880);
  assert.deepEqual([parts[0].paused, parts[0].why, parts[5].why], [5, "slow", ""]);
  assert.ok(parts.every(({ output, seconds: length }) => output > 0 && length === 600));
  assert.deepEqual(partsOf([minute(now - 90000, { good: 1 })], now, 86400).filter(({ good }) => good), [], "older minutes are left out");
});

test("rows of a file that was cut are whole rows, and causes come by count", () => {
  const row = (id, message) => ({ custom_id: id, response: { status_code: 400, body: { error: { message } } } });
  const text = [row("a", "too long"), row("b", "no model"), row("c", "too long"), { custom_id: "d", error: { code: "batch_expired" } }].map((each) => JSON.stringify(each)).join("\n");
  assert.deepEqual(causesOf(rowsOf(text)), [["too long", 2], ["no model", 1], ["batch_expired", 1]]);
  assert.deepEqual(rowsOf(text, false).map((each) => each.custom_id), ["a", "b", "c"]);
  assert.deepEqual(rowsOf('{"custom_id": "a"}\n\nnonsense\n'), [{ custom_id: "a" }]);
  const input = ["a", "b", "x"].map((id) => ({ custom_id: id, body: { n: 1 } }));
  assert.equal(failedOf(rowsOf(text), input), '{"custom_id":"a","body":{"n":1}}\n{"custom_id":"b","body":{"n":1}}\n');
});

test("an answer is text, calls of functions, or the body itself", () => {
  const answer = (body) => answerOf({ response: { body } });
  assert.deepEqual(answer({ choices: [{ message: { content: "hi" } }], usage: { prompt_tokens: 3, completion_tokens: 1 } }), { text: "hi", tokens: [3, 1] });
  assert.equal(answer({ choices: [{ text: "done" }] }).text, "done");
  assert.match(answer({ choices: [{ message: { content: null, tool_calls: [1] } }] }).text, /tool_calls/);
  assert.match(answer({ data: [{ embedding: [0.5] }] }).text, /embedding/);
});
