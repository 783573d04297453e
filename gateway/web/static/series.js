// Bounded history of snapshots, with the rates and points for the charts. Pure.

export const WINDOW = 900; // seconds that charts show
const MAX_CHATS = 4000;
const SMOOTHED = 3; // the tokens of a step arrive at once, so single seconds are noisy

export class History {
  constructor() {
    this.snapshots = [];
    this.chats = [];
  }

  add(snapshot) {
    const last = this.snapshots[this.snapshots.length - 1];
    if (last && snapshot.time <= last.time) return;
    if (last && snapshot.computed_tokens < last.computed_tokens) this.snapshots = []; // the server was restarted
    this.snapshots.push(snapshot);
    for (const chat of snapshot.chats || []) this.chats.push(chat);
    const oldest = snapshot.time - WINDOW;
    while (this.snapshots.length > 1 && this.snapshots[1].time < oldest) this.snapshots.shift();
    if (this.chats.length > MAX_CHATS) this.chats.splice(0, this.chats.length - MAX_CHATS);
    while (this.chats.length && this.chats[0].time < oldest) this.chats.shift();
  }

  get latest() {
    return this.snapshots[this.snapshots.length - 1] || null;
  }

  /** Tokens per second: [{time, online, offline}], at most about `points` entries, each over `SMOOTHED` snapshots or more. */
  rates(points = 240) {
    const all = this.snapshots;
    const stride = Math.max(1, Math.ceil(all.length / points));
    const result = [];
    for (let end = (all.length - 1) % stride || stride; end < all.length; end += stride) {
      const before = all[Math.max(0, end - Math.max(stride, SMOOTHED))];
      const after = all[end];
      const passed = after.time - before.time;
      if (!(passed > 0)) continue;
      const offline = Math.max(0, after.offline_tokens - before.offline_tokens) / passed;
      const total = Math.max(0, after.computed_tokens - before.computed_tokens) / passed;
      result.push({ time: after.time, online: Math.max(0, total - offline), offline });
    }
    return result;
  }

  /** Rates of each engine over the last `span` seconds: [{engine, state, ..., online, offline}], tokens per second. */
  engines(span = 10) {
    const latest = this.latest;
    const before = latest && this.snapshots.find((snapshot) => snapshot.time >= latest.time - span - 0.5);
    return ((latest && latest.engines) || []).map((engine) => {
      const then = (before.engines || []).find((other) => other.engine === engine.engine);
      const passed = latest.time - before.time;
      const rate = (name) => (then && passed > 0 ? Math.max(0, engine[name] - then[name]) / passed : null);
      const [all, offline] = [rate("computed_tokens"), rate("offline_tokens")];
      return { ...engine, online: all === null ? null : Math.max(0, all - offline), offline };
    });
  }

  /** The change of a counter of ended batch lines over the last `span` seconds: {value, seconds}, or null. */
  batchChange(name, span) {
    const { latest } = this;
    const before = latest && this.snapshots.find(({ time }) => time >= latest.time - span - 0.5);
    const passed = before ? latest.time - before.time : 0;
    return passed > 0 ? { value: Math.max(0, latest.batch[name] - before.batch[name]), seconds: passed } : null;
  }

  /** The difference of a counter over the last `span` seconds, or null without two snapshots. */
  change(name, span) {
    const latest = this.latest;
    if (!latest) return null;
    let before = null;
    for (const snapshot of this.snapshots) {
      if (snapshot.time >= latest.time - span - 0.5 && snapshot !== latest) { before = snapshot; break; }
    }
    return before ? latest[name] - before[name] : null;
  }
}

/** Nearest-rank percentile of numbers, or null. */
export function percentile(values, rank) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.max(0, Math.ceil((rank / 100) * sorted.length) - 1)];
}

/** Minutes of the server's timeline, summed over `count` equal parts of the last `span` seconds. */
export function partsOf(minutes, now, span, count = 144) {
  const width = span / count;
  const parts = Array.from({ length: count }, (_, at) => ({
    from: now - span + at * width, seconds: width, good: 0, bad: 0, refused: 0, answers: 0, prompt: 0, output: 0, paused: 0, why: "",
  }));
  for (const minute of minutes) {
    const part = parts[Math.min(count - 1, Math.floor((minute.time + 30 - (now - span)) / width))];
    if (!part) continue;
    for (const name of ["good", "bad", "refused", "answers", "prompt", "output", "paused"]) part[name] += minute[name];
    part.why = minute.why || part.why;
  }
  return parts;
}
