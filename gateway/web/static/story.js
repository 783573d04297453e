// What the server does with batch work, and why, in words. Pure functions of snapshots.

import { count, percent, seconds } from "./format.js";

const FULL = 0.995; // share of the room from which on it is called whole
const FELL = 0.9; // part of its highest share at which batch work counts as reduced
const RETURNED = 0.95; // part of it at which batch work counts as restored
const FOLDED = 60; // seconds between two changes that are shown as one
const CAUSES = { slo: "chats missed their limits", predictor: "steps took longer than predicted" };

function cause(snapshot) {
  const kept = snapshot.attainment === null ? "" : ` (${percent(snapshot.attainment)} of the last chats within them)`;
  return snapshot.breaker_cause === "slo" ? CAUSES.slo + kept : CAUSES[snapshot.breaker_cause] || `the objective ${snapshot.breaker_cause} was missed`;
}

/** One sentence on batch work now: {text, state}. */
export function batchSentence(snapshot) {
  if (!snapshot.running.offline && !snapshot.waiting.offline) return { text: "No batch work.", state: "" };
  if (!snapshot.running.online && !snapshot.waiting.online) return { text: "Running on the whole machine: no chat now.", state: "good" };
  if (snapshot.breaker === "open") return { text: `Paused beside chats: ${cause(snapshot)}.`, state: "bad" };
  if (snapshot.held) return { text: `Paused beside chats: ${snapshot.held}.`, state: "bad" };
  const share = snapshot.offline_share;
  if (typeof share === "number" && share < FULL) return { text: `Running beside chats with ${percent(share, 0)} of its room, which grows with each chat within its limits.`, state: "warn" };
  const budget = snapshot.latency_budget === null ? "" : `: steps may take ${seconds(snapshot.latency_budget)}`;
  const noise = typeof snapshot.noise === "number" ? ` Without batch work the chats vary by ± ${percent(snapshot.noise, 0)}.` : "";
  return { text: `Running beside chats${budget}.${noise}`, state: "good" };
}

/** Falls and returns of the share of the room that batch work has beside chats: a function of snapshots in order. */
function shareWatch() {
  let highest = 0;
  let reduced = false;
  return ({ breaker, held, offline_share: share }, add) => {
    if (breaker !== "closed" || held || typeof share !== "number") return;
    if (!reduced && share < FELL * highest) {
      reduced = true;
      add(`Batch work beside chats reduced from ${percent(highest, 0)} to ${percent(share, 0)} of its room: a chat missed its limits or came near them.`, "warn");
    } else if (reduced && share >= RETURNED * highest) {
      reduced = false;
      add(`Batch work has ${share < FULL ? percent(share, 0) : "all"} of its room beside chats again.`, "good");
    }
    highest = Math.max(highest, share);
  };
}

function counted({ mechanisms }, name) {
  return (mechanisms && mechanisms.drops && mechanisms.drops[name]) || 0;
}

/** Changes between snapshots in order: [{time, text, state}]. */
export function eventsOf(snapshots) {
  const found = [];
  const watch = shareWatch();
  if (snapshots.length) watch(snapshots[0]);
  for (let at = 1; at < snapshots.length; at += 1) {
    const [before, after] = [snapshots[at - 1], snapshots[at]];
    const add = (text, state) => found.push({ time: after.time, text, state });
    if (before.ready && !after.ready) add(`The server is not ready: ${after.reason}.`, "bad");
    if (!before.ready && after.ready) add("The server is ready.", "good");
    watch(after, add);
    if (before.breaker !== after.breaker) {
      if (after.breaker === "open") add(`Batch work paused beside chats: ${cause(after)}.`, "bad");
      if (after.breaker === "half_open") add(`Batch work resumed beside chats with ${percent(after.offline_share, 0)} of its room.`, "warn");
      if (after.breaker === "closed") add("Batch work resumed beside chats; its room grows with each chat within its limits.", "good");
    }
    if (!before.held && after.held) add(`Batch work paused beside chats: ${after.held}.`, "bad");
    if (before.held && !after.held) add("Batch work resumed beside chats.", "good");
    const more = (name) => counted(after, name) > counted(before, name);
    if (more("drops")) add("Memory is short: two engines dropped layers and run as one pipeline.", "warn");
    if (more("restores")) add("Two engines have all layers again.", "good");
    if (after.refused > before.refused) add(`${after.refused - before.refused} chats refused: their wait would have been too long.`, "bad");
  }
  return found;
}

/** Events in order, with pauses and resumptions of batch work that follow within a minute as one event. */
export function folded(events) {
  const found = [];
  for (const event of events) {
    const last = found[found.length - 1];
    const change = /^Batch work (paused|resumed) beside chats/.exec(event.text);
    if (!change || !last || !last.changes || event.time - last.time > FOLDED) {
      found.push({ ...event, changes: change ? [event] : null });
      continue;
    }
    last.changes.push(event);
    const pauses = last.changes.filter(({ text }) => text.startsWith("Batch work paused"));
    const span = Math.round(event.time - last.changes[0].time);
    if (pauses.length > 1) {
      const why = pauses[pauses.length - 1].text.replace(/^[^:]*: /, "");
      Object.assign(last, { text: `Batch work paused ${pauses.length} times beside chats in ${span} s: ${why}`, state: "bad" });
    } else Object.assign(last, { text: event.text, state: event.state });
    last.time = event.time;
  }
  return found;
}

/** Worth of tokens at prices per million, or null without a price. */
export function worth(promptTokens, outputTokens, priceIn, priceOut) {
  if (!(priceIn > 0) && !(priceOut > 0)) return null;
  return (promptTokens * (priceIn || 0) + outputTokens * (priceOut || 0)) / 1e6;
}

/** The service classes of a server with several: {name, text, kept, state}. */
export function classesOf({ classes }) {
  if (!classes || classes.length < 2) return [];
  return classes.map(({ name, promise, attainment, target }) => {
    const kept = target === null || attainment === null || attainment >= target;
    return { name, text: percent(attainment), kept: promise, state: attainment === null ? "" : kept ? "good" : "bad" };
  });
}

const MECHANISMS = {
  plans: ["plans of batch work", ({ made, continued, late }) => `${count(made || 0)} made, ${count(continued || 0)} continued, ${count(late || 0)} late`],
  searches: ["budget searches", ({ made, failed }) => `${count(made)} made, ${count(failed)} failed`],
  refits: ["refits of the latency model", ({ adopted, refused }) => `${count(adopted)} adopted, ${count(refused)} refused`],
  knapsack: ["knapsack, when memory is short", ({ kv, compact, passed_over: passed }) => `${count(kv || 0)} started, ${count(compact || 0)} from hidden state, ${count(passed || 0)} passed over`],
  drafts: ["drafted tokens", ({ verified, right }) => `${percent(right / verified, 0)} of ${count(verified)} right`],
  drops: ["layers dropped", ({ drops, restores, failed }) => `${count(drops)} times, restored ${count(restores)}, failed ${count(failed)}`],
};

/** What the methods of the server did: [[name, text]]. */
export function mechanismsOf({ mechanisms }) {
  const shown = Object.entries(MECHANISMS).filter(([key]) => mechanisms && mechanisms[key]);
  return shown.map(([key, [name, text]]) => [name, text(mechanisms[key])]);
}
