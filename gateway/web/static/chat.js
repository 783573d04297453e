// Playground: a chat over the public API, which shows time to first token and tokens per second.

import { events, postJson } from "./api.js";
import { seconds } from "./format.js";
import { render } from "./markdown.js";

export class Playground {
  constructor(elements) {
    Object.assign(this, elements); // turns, form, prompt, send, tier, temperature, maxTokens, system, copy, clear
    this.messages = [];
    this.model = null;
    this.running = null;
    this.form.addEventListener("submit", (event) => { event.preventDefault(); this.running ? this.running.abort() : this.ask(); });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); if (!this.running) this.ask(); }
    });
    this.clear.addEventListener("click", () => { this.messages = []; this.turns.replaceChildren(); this.prompt.focus(); });
    this.copy.addEventListener("click", () => this.copyCurl());
  }

  body(messages) {
    const system = this.system.value.trim();
    const body = {
      model: this.model,
      messages: system ? [{ role: "system", content: system }, ...messages] : messages,
      temperature: Number(this.temperature.value),
      max_tokens: Math.max(1, Math.round(Number(this.maxTokens.value)) || 256),
      stream: true,
      stream_options: { include_usage: true },
    };
    if (this.tier.value !== "default") body.service_tier = this.tier.value;
    return body;
  }

  turn(role, text) {
    const turn = document.createElement("div");
    turn.className = `turn ${role}`;
    const shown = document.createElement("div");
    shown.className = "text";
    render(shown, text);
    const figures = document.createElement("p");
    figures.className = "figures";
    turn.append(shown, figures);
    this.turns.append(turn);
    this.turns.scrollTop = this.turns.scrollHeight;
    return { turn, shown, figures };
  }

  async ask() {
    const question = this.prompt.value.trim();
    if (!question || !this.model) return;
    this.prompt.value = "";
    this.messages.push({ role: "user", content: question });
    this.turn("user", question);
    const answer = this.turn("assistant", "");
    this.running = new AbortController();
    this.send.textContent = "Stop";
    let text = "";
    try {
      for await (const part of this.stream(answer.figures)) {
        text += part;
        render(answer.shown, text);
        this.turns.scrollTop = this.turns.scrollHeight;
      }
    } catch (error) {
      if (error.name === "AbortError") answer.figures.textContent = "stopped";
      else { answer.turn.classList.add("failed"); render(answer.shown, text ? `${text}\n${error.message}` : error.message); }
    }
    if (text) this.messages.push({ role: "assistant", content: text });
    else this.messages.pop();
    this.running = null;
    this.send.textContent = "Send";
  }

  async *stream(figures) {
    const began = performance.now();
    let first = null;
    const response = await postJson("/v1/chat/completions", this.body(this.messages), { signal: this.running.signal });
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const text = chunk.choices.length ? chunk.choices[0].delta.content : null;
      if (text) {
        first = first ?? performance.now();
        yield text;
      }
      if (chunk.usage && first !== null) {
        const tokens = chunk.usage.completion_tokens;
        const passed = (performance.now() - first) / 1000;
        const rate = tokens > 1 && passed > 0 ? `, ${((tokens - 1) / passed).toFixed(1)} tokens/s` : "";
        figures.textContent = `first token after ${seconds((first - began) / 1000)}, ${tokens} tokens${rate}`;
      }
    }
  }

  curl() {
    const draft = this.prompt.value.trim();
    const messages = draft ? [...this.messages, { role: "user", content: draft }] : this.messages;
    const body = JSON.stringify(this.body(messages), null, 1).replaceAll("'", "'\\''");
    return `curl -N ${location.origin}/v1/chat/completions -H 'content-type: application/json' -H "authorization: Bearer $TIDEMILL_API_KEY" -d '${body}'`;
  }

  async copyCurl() {
    const said = this.copy.textContent;
    try {
      await navigator.clipboard.writeText(this.curl());
      this.copy.textContent = "Copied";
    } catch {
      this.turn("assistant", `\`\`\`\n${this.curl()}\n\`\`\``); // the clipboard needs https: show the command instead
      return;
    }
    setTimeout(() => { this.copy.textContent = said; }, 1500);
  }
}
