// Chat over the public API, in one column or in two that answer the same messages side by side: thoughts folded, Markdown or
// shaded tokens, time to first token, tokens per second. Kept over a reload of the tab.

import { events, hasKey, postJson } from "./api.js";
import { count, seconds } from "./format.js";
import { render } from "./markdown.js";
import { ALTERNATIVES, drawPieces, piecesOf } from "./tokens.js";

const KEPT = "tidemill-chat";
const SECOND = "-2"; // what follows the ids of the second column

/** The form, and the columns that answer: the second one while "side by side" is ticked. */
export class Chat {
  constructor(elements) {
    Object.assign(this, elements); // column, form, prompt, send, copy, clear, beside
    this.running = null;
    const second = this.column.cloneNode(true);
    for (const element of [second, ...second.querySelectorAll("[id]")]) element.id += SECOND;
    this.column.after(second);
    this.columns = [new Column(this, this.column, ""), new Column(this, second, SECOND)];
    this.form.addEventListener("submit", (event) => { event.preventDefault(); this.running ? this.running.abort() : this.ask(); });
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); if (!this.running) this.ask(); }
    });
    this.clear.addEventListener("click", () => { this.columns.forEach((column) => column.take([])); this.prompt.focus(); });
    this.copy.addEventListener("click", () => this.copyCurl());
    this.beside.addEventListener("change", () => this.arrange());
    this.arrange();
  }

  get shown() {
    return this.beside.checked ? this.columns : this.columns.slice(0, 1);
  }

  /** Show or hide the second column. It takes over the first one's messages unless it was asked the same. */
  arrange() {
    const [first, second] = this.columns;
    second.root.hidden = !this.beside.checked;
    if (this.beside.checked && second.questions !== first.questions) second.take(first.messages);
  }

  /** Offer the models of /v1/models, the second one first in the second column. */
  offer(models) {
    this.columns.forEach((column, at) => column.offer(models, models[Math.min(at, models.length - 1)].id));
  }

  async ask() {
    const question = this.prompt.value.trim();
    if (!question || !this.shown.every((column) => column.check())) return;
    this.prompt.value = "";
    await this.run((signal) => Promise.all(this.shown.map((column) => column.ask(question, signal))));
  }

  /** Run requests that end with their signal, which "Stop" gives. */
  async run(requests) {
    this.running = new AbortController();
    this.send.textContent = "Stop";
    this.beside.disabled = true;
    await requests(this.running.signal).finally(() => {
      this.running = null;
      this.send.textContent = "Send";
      this.beside.disabled = false;
    });
  }

  async copyCurl() {
    const words = this.copy.textContent;
    const commands = this.shown.map((column) => column.curl(this.prompt.value.trim()));
    try {
      await navigator.clipboard.writeText(commands.join("\n"));
    } catch {
      this.shown.forEach((column, at) => column.write(column.turn("assistant"), { content: `\`\`\`\n${commands[at]}\n\`\`\`` })); // the clipboard needs https
      return;
    }
    this.copy.textContent = "Copied";
    setTimeout(() => { this.copy.textContent = words; }, 1500);
  }
}

/** A conversation with its model and settings. */
class Column {
  constructor(chat, root, suffix) {
    const field = (id) => root.querySelector(`#${id}${suffix}`);
    Object.assign(this, { chat, root, kept: KEPT + suffix });
    Object.assign(this, { turns: field("turns"), models: field("models"), tier: field("tier"), temperature: field("temperature"), topP: field("top-p") });
    Object.assign(this, { seed: field("seed"), maxTokens: field("max-tokens"), logprobs: field("logprobs"), system: field("system"), schema: field("schema") });
    this.take(JSON.parse(sessionStorage.getItem(this.kept) || "[]"));
  }

  /** Go on from these messages. */
  take(messages) {
    this.messages = messages.map(({ role, content, thought }) => ({ role, content, thought }));
    this.turns.replaceChildren();
    for (const message of this.messages) this.write(this.turn(message.role), message);
    this.keep();
  }

  keep() {
    sessionStorage.setItem(this.kept, JSON.stringify(this.messages, ["role", "content", "thought"]));
  }

  get questions() {
    return JSON.stringify(this.messages.filter(({ role }) => role === "user"), ["content"]);
  }

  offer(models, first) {
    const chosen = this.models.value;
    this.models.replaceChildren(...models.map(({ id }) => new Option(id, id)));
    this.models.value = models.some(({ id }) => id === chosen) ? chosen : first;
  }

  /** Whether the settings make a request; the invalid one is shown. */
  check() {
    if (!this.models.value) return false;
    try {
      JSON.parse(this.schema.value.trim() || "{}");
      this.schema.setCustomValidity("");
      return true;
    } catch (error) {
      this.schema.setCustomValidity(`not valid JSON: ${error.message}`);
      this.schema.closest("details").open = true;
      this.schema.reportValidity();
      return false;
    }
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
    if (this.logprobs.checked) Object.assign(body, { logprobs: true, top_logprobs: ALTERNATIVES });
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
    const [figures, note] = ["figures", "note"].map((className) => Object.assign(document.createElement("p"), { className }));
    Object.assign(note, { hidden: true, textContent: "Point at a token to see its probability and alternatives." });
    turn.append(thought, shown, figures, note);
    this.turns.append(turn);
    return { turn, thought, summary, inner, shown, figures, note };
  }

  /** Show a message: tokens where it has some, else Markdown; a user's as it is. */
  write({ turn, thought, summary, inner, shown, note }, { content: text, thought: thinking = "", pieces }, ended = true) {
    const follows = this.turns.scrollHeight - this.turns.scrollTop - this.turns.clientHeight < 60;
    thought.hidden = thinking === "";
    summary.textContent = `${ended || text ? "Thought" : "Thinking"} (${count(thinking.split(/\s+/).filter(Boolean).length)} words)`;
    inner.textContent = thinking;
    shown.hidden = text === "" && thinking !== "";
    if (Boolean(pieces) === note.hidden) shown.replaceChildren(); // from Markdown to tokens, or back
    note.hidden = !pieces;
    shown.classList.toggle("tokens", Boolean(pieces));
    if (turn.classList.contains("user")) shown.textContent = text;
    else if (pieces) drawPieces(shown, pieces, note);
    else render(shown, text);
    if (follows) this.turns.scrollTop = this.turns.scrollHeight;
  }

  async ask(question, signal) {
    this.messages.push({ role: "user", content: question });
    this.write(this.turn("user"), { content: question });
    this.turns.scrollTop = this.turns.scrollHeight;
    await this.answer({ role: "assistant", content: "", thought: "" }, this.turn("assistant"), {}, signal);
  }

  /** Stream an answer into a turn; what the message holds already stays in front of it. */
  async answer(message, view, more, signal) {
    const asked = message.content ? [...this.messages.slice(0, -1), message] : this.messages;
    const sent = this.body(asked, more);
    message.pieces = sent.logprobs ? message.pieces || piecesOf(message.content, []) : null;
    let cut = false;
    try {
      for await (const part of this.stream(sent, view.figures, signal)) {
        message.content += part.text;
        message.thought += part.thought;
        if (message.pieces) message.pieces.push(...piecesOf(part.text, part.tokens));
        cut = cut || part.cut;
        this.write(view, message, false);
      }
    } catch (error) {
      if (error.name === "AbortError") view.figures.textContent = "stopped";
      else {
        view.turn.classList.add("failed");
        message.content += message.content ? `\n\n${error.message}` : error.message;
        message.pieces = null;
      }
    }
    this.write(view, message);
    const known = this.messages.includes(message);
    const failed = view.turn.classList.contains("failed");
    if ((message.content || message.thought) && !failed && !known) this.messages.push(message);
    else if (!known) this.messages.pop();
    this.keep();
    if (cut) this.offerMore(message, view);
  }

  /** Say that an answer was cut off; continue it if it has begun. */
  offerMore(message, view) {
    view.figures.append(" – cut off at the limit of tokens ");
    if (!message.content) return;
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: "Continue" });
    button.addEventListener("click", () => {
      if (this.chat.running || this.messages[this.messages.length - 1] !== message) return;
      this.chat.run((signal) => this.answer(message, view, { continue_final_message: true, add_generation_prompt: false }, signal));
    });
    view.figures.append(button);
  }

  /** Yield {text, thought, tokens, cut} of each event. */
  async *stream(body, figures, signal) {
    const began = performance.now();
    let first = null;
    figures.textContent = "";
    const response = await postJson("/v1/chat/completions", body, { signal });
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const [choice] = chunk.choices;
      if (choice) {
        const text = choice.delta.content || "";
        const thought = choice.delta.reasoning_content || choice.delta.reasoning || "";
        if (text || thought) first = first ?? performance.now();
        yield { text, thought, tokens: (choice.logprobs || {}).content || [], cut: choice.finish_reason === "length" };
      }
      if (chunk.usage && first !== null) {
        const tokens = chunk.usage.completion_tokens;
        const passed = (performance.now() - first) / 1000;
        const rate = tokens > 1 && passed > 0 ? `, ${((tokens - 1) / passed).toFixed(1)} tokens/s` : "";
        figures.textContent = `first token after ${seconds((first - began) / 1000)} in this browser, ${tokens} tokens${rate}`;
      }
    }
  }

  /** The draft, or the last question, as a command. */
  curl(draft) {
    const last = this.messages.findLastIndex(({ role }) => role === "user");
    const messages = draft ? [...this.messages, { role: "user", content: draft }] : this.messages.slice(0, last + 1);
    const body = JSON.stringify(this.body(messages), null, 1).replaceAll("'", "'\\''");
    const key = hasKey() ? ' -H "authorization: Bearer $TIDEMILL_API_KEY"' : "";
    return `curl -N ${location.origin}/v1/chat/completions -H 'content-type: application/json'${key} -d '${body}'`;
  }
}
