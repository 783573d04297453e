// Formatting of numbers. Pure functions.

export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0";
  if (value < 0.01) return `${(value * 1000).toFixed(1)} ms`;
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 100) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return duration(value);
}

export function duration(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const whole = Math.max(0, Math.round(value));
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
  return `${Math.floor(whole / 86400)} d ${Math.floor((whole % 86400) / 3600)} h`;
}

/** A range of times from `now` on, e.g. "about 10 to 14 min (13:36)"; the clock time is the latest. In Unix seconds. */
export function rangeText([earliest, latest], now = Date.now() / 1000) {
  const units = [[60, "min"], [3600, "h"], [86400, "d"]];
  const [unit, name] = units.find(([length]) => latest - now <= 100 * length) || units[2];
  const [low, high] = [Math.max(0, Math.floor((earliest - now) / unit)), Math.max(1, Math.ceil((latest - now) / unit))];
  const text = low === 0 ? `less than ${high} ${name}` : `about ${low === high ? high : `${low} to ${high}`} ${name}`;
  return `${text} (${clock(latest, now)})`;
}

export function count(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value < 10 && value % 1 !== 0) return value.toFixed(1);
  return Math.round(value).toLocaleString("en-US");
}

export function money(value) {
  return value.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: value < 1 ? 4 : 2 });
}

export function percent(value, digits = 1) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const text = (100 * value).toFixed(digits);
  return `${text.endsWith(".0") ? text.slice(0, -2) : text} %`;
}

/** Limits of the default class of an SLO such as "ttft_p99=1s,tbt_p99=100ms": [{metric, statistic, limit}], in seconds. */
export function objectives(slo) {
  const found = [];
  for (const part of (slo || "").split(";")[0].split(",")) {
    const match = /^\s*(ttft|tbt|tpot)_(p\d+(?:\.\d+)?|mean)\s*=\s*([\d.]+)\s*(ms|s|m)\s*$/.exec(part);
    if (match) found.push({ metric: match[1], statistic: match[2], limit: Number(match[3]) * { ms: 0.001, s: 1, m: 60 }[match[4]] });
  }
  return found;
}

/** A time of day, with the day if it is another one than `now`'s; both in Unix seconds. */
export function clock(time, now = Date.now() / 1000) {
  const date = new Date(time * 1000);
  const text = date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  const same = date.toDateString() === new Date(now * 1000).toDateString();
  return same ? text : `${date.toLocaleDateString([], { weekday: "short", day: "numeric", month: "short" })} ${text}`;
}

/** State of one objective over recent chats, as reported by the server: {name, text, kept, state}. */
export function standingText({ objective, value, bound, attainment }) {
  const [service, key] = `:${objective.split("=")[0]}`.split(":").slice(-2);
  const [metric, statistic] = key.split("_");
  const name = `${service ? `${service} ` : ""}${metric.toUpperCase()} ${statistic === "mean" ? "mean" : statistic.toUpperCase()}`;
  if (value === null) return { name, text: "–", kept: "", state: "" };
  if (bound === null) return { name, text: seconds(value), kept: "", state: "" };
  const kept = attainment === null ? "" : `met by ${percent(attainment)} of the chats`;
  return { name, text: `${seconds(value)}, limit ${seconds(bound)}`, kept, state: value <= bound ? "good" : "bad" };
}

export function limitOf(slo, metric) {
  const limits = objectives(slo).filter((o) => o.metric === metric).map((o) => o.limit);
  return limits.length ? Math.min(...limits) : null;
}

/** A round number at or above `value` with few steps below it: {top, step}. */
export function scale(value, steps = 4) {
  if (!(value > 0)) return { top: 1, step: 1 };
  const rough = value / steps;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((f) => f * power).find((s) => s >= rough * 0.999999);
  return { top: step * Math.ceil(value / step - 1e-9), step };
}
