// SVG charts of the live window.

import { scale, count, seconds } from "./format.js";

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 46;
const BOTTOM = 20;
const TOP = 8;

function make(name, attributes = {}, text = null) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  return element;
}

/** Path of the area between two lines of points [[x, y]]. */
export function areaPath(upper, lower) {
  const line = (points) => points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join("L");
  return upper.length ? `M${line(upper)}L${line([...lower].reverse())}Z` : "";
}

class Chart {
  constructor(host, label) {
    this.host = host;
    this.svg = make("svg", { role: "img", "aria-label": label });
    this.empty = document.createElement("p");
    this.empty.className = "empty";
    host.append(this.svg, this.empty);
  }

  frame(now, span, top, step, write) {
    const width = Math.max(120, this.host.clientWidth);
    const height = Math.max(80, this.host.clientHeight);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren();
    const x = (time) => LEFT + ((time - (now - span)) / span) * (width - LEFT - 6);
    const y = (value) => height - BOTTOM - (Math.min(value, top) / top) * (height - BOTTOM - TOP);
    for (let value = 0; value <= top * 1.0001; value += step) {
      this.svg.append(make("line", { class: "axis", x1: LEFT, x2: width - 6, y1: y(value), y2: y(value) }));
      this.svg.append(make("text", { x: LEFT - 7, y: y(value) + 4, "text-anchor": "end" }, write(value)));
    }
    const every = (span > 600 ? 300 : span > 120 ? 60 : 15) * (width < 480 && span === 300 ? 2 : 1);
    for (let ago = 0; ago <= span; ago += every) {
      const label = ago === 0 ? "now" : every < 60 ? `−${ago} s` : `−${ago / 60} min`;
      const anchor = ago === 0 ? "end" : ago >= span ? "start" : "middle";
      this.svg.append(make("text", { x: x(now - ago), y: height - 4, "text-anchor": anchor }, label));
    }
    return { x, y, width, height };
  }
}

/** Area of one rate over time. `name`: "online" or "offline". */
export class RateChart extends Chart {
  constructor(host, name, label) {
    super(host, label);
    this.name = name;
    this.tip = document.createElement("p");
    this.tip.className = "tip";
    this.tip.hidden = true;
    host.append(this.tip);
    host.addEventListener("pointermove", (event) => this.point(event));
    host.addEventListener("pointerleave", () => { this.pointer = null; this.tip.hidden = true; this.redraw(); });
    this.drawn = null;
  }

  draw(rates, now, span) {
    this.drawn = { rates: rates.filter((rate) => rate.time > now - span), now, span };
    this.redraw();
  }

  redraw() {
    if (!this.drawn) return;
    const { rates, now, span } = this.drawn;
    const { top, step } = scale(Math.max(10, ...rates.map((rate) => rate[this.name])) * 1.04, 2);
    const { x, y, height } = this.frame(now, span, top, step, count);
    this.empty.textContent = rates.some((rate) => rate[this.name] > 0) ? "" : "Nothing in this window.";
    const base = rates.map((rate) => [x(rate.time), y(0)]);
    const line = rates.map((rate) => [x(rate.time), y(rate[this.name])]);
    this.svg.append(make("path", { class: `area-${this.name}`, d: areaPath(line, base) }));
    if (this.pointer && rates.length) {
      const near = rates.reduce((a, b) => (Math.abs(x(b.time) - this.pointer) < Math.abs(x(a.time) - this.pointer) ? b : a));
      this.svg.append(make("line", { class: "cursor", x1: x(near.time), x2: x(near.time), y1: TOP, y2: height - BOTTOM }));
      this.tip.textContent = `${count(near[this.name])} prompt and output tokens/s, ${Math.round(now - near.time)} s ago`;
      this.tip.hidden = false;
      this.tip.style.left = `${Math.max(LEFT, Math.min(x(near.time) + 10, this.host.clientWidth - this.tip.clientWidth - 4))}px`;
    }
  }

  point(event) {
    this.pointer = event.clientX - this.host.getBoundingClientRect().left;
    this.redraw();
  }
}

/** The last day or week: above, the share of chats within their limits; below, batch output; pauses are shaded. */
export class NightChart extends Chart {
  draw(parts, now, span) {
    const top = scale(Math.max(1, ...parts.map((part) => part.output / part.seconds)) * 1.04, 2).top;
    const width = Math.max(120, this.host.clientWidth);
    const height = Math.max(120, this.host.clientHeight);
    const middle = TOP + (height - TOP - BOTTOM) * 0.35;
    const x = (time) => LEFT + ((time - (now - span)) / span) * (width - LEFT - 6);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.replaceChildren();
    const label = (y, text) => this.svg.append(make("text", { x: LEFT - 7, y, "text-anchor": "end" }, text));
    label(TOP + 10, "chats");
    label(middle + 16, count(top));
    label(height - BOTTOM, "0");
    for (const part of parts) {
      const judged = part.good + part.bad;
      const box = { x: x(part.from), width: Math.max(0.5, x(part.from + part.seconds) - x(part.from) - 0.5) };
      const add = (name, y, tall) => tall > 0 && this.svg.append(make("rect", { class: name, ...box, y, height: tall }));
      if (part.paused) add("night-paused", TOP, height - TOP - BOTTOM);
      const missed = judged ? (part.bad / judged) * (middle - TOP - 4) : 0;
      if (judged) add("night-good", TOP, middle - TOP - 4 - missed);
      add("night-bad", middle - 4 - missed, missed);
      const tall = (part.output / part.seconds / top) * (height - BOTTOM - middle - 4);
      add("night-work", height - BOTTOM - tall, tall);
      const words = [new Date(part.from * 1000).toLocaleString([], { weekday: "short", hour: "2-digit", minute: "2-digit" })];
      if (judged) words.push(`${part.good} of ${judged} chats within their limits`);
      if (part.refused) words.push(`${part.refused} refused`);
      if (part.answers) words.push(`${count(part.answers)} batch answers, ${count(part.output / part.seconds)} output tokens/s`);
      if (part.paused) words.push(`batch work paused ${seconds(part.paused)}: ${part.why}`);
      const hover = make("rect", { class: "night-hover", ...box, y: TOP, height: height - TOP - BOTTOM });
      hover.append(make("title", {}, words.join("\n")));
      this.svg.append(hover);
    }
    const ticks = width < 480 ? 2 : 4;
    for (let at = 0; at <= ticks; at += 1) {
      const time = now - span + (span * at) / ticks;
      const form = span > 86400 ? { weekday: "short" } : { hour: "2-digit", minute: "2-digit" };
      const anchor = at === 0 ? "start" : at === ticks ? "end" : "middle";
      this.svg.append(make("text", { x: x(time), y: height - 4, "text-anchor": anchor }, new Date(time * 1000).toLocaleString([], form)));
    }
    this.empty.textContent = parts.some((part) => part.good + part.bad + part.answers + part.output > 0) ? "" : "Nothing has happened yet.";
  }
}

/** Top and step of a chart of latencies: fitted to the values, with the limit inside if it is near: {top, step, near}. */
export function latencyScale(values, limit) {
  const most = Math.max(...values, 0.001);
  const near = Boolean(limit) && limit < most * 4;
  const wanted = near ? Math.min(Math.max(most, limit * 1.25), limit * 4) : most * 1.15;
  return { ...scale(values.length || !limit ? wanted : limit * 1.25, 3), near: near || !values.length };
}

export class DotChart extends Chart {
  /** `name`: the field of a chat that the chart shows. */
  constructor(host, name, label) {
    super(host, label);
    this.name = name;
  }

  draw(chats, now, span, limit) {
    const values = chats.map((chat) => chat[this.name]).filter((value) => value !== null);
    const { top, step, near } = latencyScale(values, limit);
    const { x, y, width } = this.frame(now, span, top, step, seconds);
    this.empty.textContent = values.length ? "" : "No chat has ended in this window.";
    const early = [];
    const late = [];
    for (const chat of chats) {
      const value = chat[this.name];
      if (value === null) continue;
      const at = `M${x(chat.time).toFixed(1)},${y(value).toFixed(1)}`;
      // an arrow up: the value lies above the chart
      const mark = value > top ? "m-3.5,6l3.5,-6l3.5,6z" : "m-2.6,0a2.6,2.6 0 1,0 5.2,0a2.6,2.6 0 1,0 -5.2,0";
      (limit && value > limit ? late : early).push(at + mark);
    }
    this.svg.append(make("path", { class: "dot", d: early.join("") })); // two elements for any number of chats
    this.svg.append(make("path", { class: "dot late", d: late.join("") }));
    if (!limit) return;
    const text = near ? `limit ${seconds(limit)}` : `limit ${seconds(limit)}, above this chart`;
    if (near) this.svg.append(make("line", { class: "limit", x1: LEFT, x2: width - 6, y1: y(limit), y2: y(limit) }));
    this.svg.append(make("text", { class: "limit-text", x: LEFT + 4, y: near ? y(limit) - 5 : TOP + 8 }, text));
  }
}
