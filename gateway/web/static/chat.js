// Chat over the public API: thoughts folded, Markdown, time to first token, tokens per second. Kept over a reload of the tab.

import { events, hasKey, postJson } from "./api.js";
import { count, seconds } from "./format.js";
import { render } from "./markdown.js";

const KEPT = "tidemill-chat";

export class Chat {
  constructor(elements) {
    Object.assign(this, elements); // turns, form, prompt, send, tier, temperature, topP, seed, schema, maxTokens, system, copy, clear, models
    this.messages = [];
    this.running = null;
    this.form.addEventListener("submit", (event) => { event.preventDefault(); this.running ? this.running.abort() : this.ask(); });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); if (!this.running) this.ask(); }
    });
    this.clear.addEventListener("click", () => { this.messages = []; this.keep(); this.turns.replaceChildren(); this.prompt.focus(); });
    this.copy.addEventListener("click", () => this.copyCurl());
    for (const { role, content, thought } of JSON.parse(sessionStorage.getItem(KEPT) || "[]")) {
      this.messages.push({ role, content, thought });
      this.write(this.turn(role), content, thought || "");
    }
  }

  /** Offer the models of /v1/models. */
  offer(models) {
    const chosen = this.models.value;
    this.models.replaceChildren(...models.map(({ id }) => new Option(id, id)));
    if (models.some(({ id }) => id === chosen)) this.models.value = chosen;
  }

  keep() {
    sessionStorage.setItem(KEPT, JSON.stringify(this.messages));
  }

  /** The body of a request. Without a temperature or a limit in the form the server's defaults apply. */
  body(messages, more = {}) {
    const system = this.system.value.trim();
    const sent = messages.map(({ role, content }) => ({ role, content }));
    const body = {
      model: this.models.value,
      messages: system ? [{ role: "system", content: system }, ...sent] : sent,
      stream: true,
      stream_options: { include_usage: true },
      ...more,
    };
    for (const [name, field] of [["temperature", this.temperature], ["top_p", this.topP], ["seed", this.seed]]) {
      if (field.value !== "") body[name] = Number(field.value);
    }
    const schema = this.schema.value.trim();
    if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(schema) } };
    if (this.maxTokens.value !== "") body.max_tokens = Math.max(1, Math.round(Number(this.maxTokens.value)));
    if (this.tier.value !== "default") body.service_tier = this.tier.value;
    return body;
  }

  turn(role) {
    const turn = document.createElement("div");
    turn.className = `turn ${role}`;
    const thought = document.createElement("details");
    thought.className = "thought";
    thought.hidden = true;
    const summary = document.createElement("summary");
    const inner = document.createElement("div");
    thought.append(summary, inner);
    const shown = document.createElement("div");
    shown.className = "text";
    const figures = document.createElement("p");
    figures.className = "figures";
    turn.append(thought, shown, figures);
    this.turns.append(turn);
    return { turn, thought, summary, inner, shown, figures };
  }

  write({ turn, thought, summary, inner, shown }, text, thinking, ended = true) {
    const follows = this.turns.scrollHeight - this.turns.scrollTop - this.turns.clientHeight < 60;
    thought.hidden = thinking === "";
    summary.textContent = `${ended || text ? "Thought" : "Thinking"} (${count(thinking.split(/\s+/).filter(Boolean).length)} words)`;
    inner.textContent = thinking;
    shown.hidden = text === "" && thinking !== "";
    if (turn.classList.contains("user")) shown.textContent = text;
    else render(shown, text);
    if (follows) this.turns.scrollTop = this.turns.scrollHeight;
  }

  async ask() {
    const question = this.prompt.value.trim();
    if (!question || !this.models.value) return;
    try {
      JSON.parse(this.schema.value.trim() || "{}");
      this.schema.setCustomValidity("");
    } catch (error) {
      this.schema.setCustomValidity(`not valid JSON: ${error.message}`);
      this.schema.closest("details").open = true;
      this.schema.reportValidity();
      return;
    }
    this.prompt.value = "";
    this.messages.push({ role: "user", content: question });
    this.write(this.turn("user"), question, "");
    this.turns.scrollTop = this.turns.scrollHeight;
    await this.answer({ role: "assistant", content: "", thought: "" }, this.turn("assistant"), {});
  }

  /** Stream an answer into a turn; what the message holds already stays in front of it. */
  async answer(message, view, more) {
    this.running = new AbortController();
    this.send.textContent = "Stop";
    const asked = message.content ? [...this.messages.slice(0, -1), message] : this.messages;
    const sent = this.body(asked, more);
    let cut = false;
    try {
      for await (const part of this.stream(sent, view.figures)) {
        message.content += part.text;
        message.thought += part.thought;
        cut = cut || part.cut;
        this.write(view, message.content, message.thought, false);
      }
    } catch (error) {
      if (error.name === "AbortError") view.figures.textContent = "stopped";
      else { view.turn.classList.add("failed"); message.content += message.content ? `\n\n${error.message}` : error.message; }
    }
    this.write(view, message.content, message.thought);
    const known = this.messages.includes(message);
    const failed = view.turn.classList.contains("failed");
    if ((message.content || message.thought) && !failed && !known) this.messages.push(message);
    else if (!known) this.messages.pop();
    this.keep();
    if (cut) this.offerMore(message, view);
    this.running = null;
    this.send.textContent = "Send";
  }

  /** Say that an answer was cut off; continue it if it has begun. */
  offerMore(message, view) {
    view.figures.append(" – cut off at the limit of tokens ");
    if (!message.content) return;
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: "Continue" });
    button.addEventListener("click", () => {
      if (this.running || this.messages[this.messages.length - 1] !== message) return;
      this.answer(message, view, { continue_final_message: true, add_generation_prompt: false });
    });
    view.figures.append(button);
  }

  /** Yield {text, thought, cut} of each event. */
  async *stream(body, figures) {
    const began = performance.now();
    let first = null;
    figures.textContent = "";
    const response = await postJson("/v1/chat/completions", body, { signal: this.running.signal });
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const [choice] = chunk.choices;
      if (choice) {
        const text = choice.delta.content || "";
        const thought = choice.delta.reasoning_content || choice.delta.reasoning || "";
        if (text || thought) first = first ?? performance.now();
        yield { text, thought, cut: choice.finish_reason === "length" };
      }
      if (chunk.usage && first !== null) {
        const tokens = chunk.usage.completion_tokens;
        const passed = (performance.now() - first) / 1000;
        const rate = tokens > 1 && passed > 0 ? `, ${((tokens - 1) / passed).toFixed(1)} tokens/s` : "";
        figures.textContent = `first token after ${seconds((first - began) / 1000)} in this browser, ${tokens} tokens${rate}`;
      }
    }
  }

  /** The last question, or the draft, as a command. */
  curl() {
    const draft = this.prompt.value.trim();
    const last = this.messages.findLastIndex(({ role }) => role === "user");
    const messages = draft ? [...this.messages, { role: "user", content: draft }] : this.messages.slice(0, last + 1);
    const body = JSON.stringify(this.body(messages), null, 1).replaceAll("'", "'\\''");
    const key = hasKey() ? ' -H "authorization: Bearer $TIDEMILL_API_KEY"' : "";
    return `curl -N ${location.origin}/v1/chat/completions -H 'content-type: application/json'${key} -d '${body}'`;
  }

  async copyCurl() {
    const words = this.copy.textContent;
    try {
      await navigator.clipboard.writeText(this.curl());
    } catch {
      this.write(this.turn("assistant"), `\`\`\`\n${this.curl()}\n\`\`\``, ""); // the clipboard needs https: show the command instead
      return;
    }
    this.copy.textContent = "Copied";
    setTimeout(() => { this.copy.textContent = words; }, 1500);
  }
}
