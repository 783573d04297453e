// Form for a batch from a table: its columns, a prompt, the first rows with answers of the model, the estimate, the start.

import { postJson } from "./api.js";
import { count, money, rangeText } from "./format.js";
import { worth } from "./story.js";

const FILE_NAME = /\.(csv|tsv|parquet|json|(csv|tsv|jsonl|ndjson|json)\.gz)$/i;

const SHOWN_COLUMNS = 200;

/** Whether a file is a table of rows, not one of requests. `first`: the value of its first line, or null. */
export function isTable(name, first) {
  return FILE_NAME.test(name) || (first !== null && typeof first === "object" && !("url" in first && "body" in first));
}

/** Expected tokens of all rows: {prompt, output}, or null. `answers`: {chars, usage} of rows that were answered. */
export function expectedTokens({ prompt_chars: chars, requests }, answers) {
  const sum = (value) => answers.reduce((total, answer) => total + value(answer), 0);
  if (!sum((answer) => answer.chars)) return null;
  return {
    prompt: (chars * sum(({ usage }) => usage.prompt_tokens)) / sum((answer) => answer.chars),
    output: (requests * sum(({ usage }) => usage.completion_tokens)) / answers.length,
  };
}

/** The estimate in words. `tokens`: of `expectedTokens`; `eta`: of `outlook`, or null. */
export function estimateText({ rows, requests }, tokens, eta, prices, now) {
  const parts = [`${count(rows)} rows`];
  if (requests < rows) parts.push(`${count(rows - requests)} without a request`);
  if (tokens) {
    parts.push(`about ${count(tokens.prompt)} prompt and ${count(tokens.output)} output tokens`);
    const value = worth(tokens.prompt, tokens.output, prices.in, prices.out);
    if (value !== null) parts.push(`price ${money(value)}`);
  }
  parts.push(eta ? `done in ${rangeText(eta, now)}` : "end unknown before the first batch work");
  return parts.join("; ");
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`The schema is not JSON: ${error.message}`);
  }
}

function element(tag, textContent, className = "") {
  return Object.assign(document.createElement(tag), { textContent, className });
}

export class TableForm {
  constructor(elements) {
    Object.assign(this, elements); // form, models, window, prices, outlook, started
    this.part = (name) => this.form.querySelector(`.${name}`);
    this.form.addEventListener("submit", (event) => { event.preventDefault(); this.busy(() => this.start()); });
    this.part("look").addEventListener("click", () => this.busy(() => this.preview()));
    this.part("close").addEventListener("click", () => { this.form.hidden = true; });
  }

  /** Show the form for a stored file. */
  async open(file) {
    this.file = file;
    this.table = null;
    this.form.hidden = false;
    this.part("file").textContent = file.filename;
    for (const name of ["chips", "first", "estimate"]) this.part(name).replaceChildren();
    this.form.elements.model.replaceChildren(...[...this.models.options].map((option) => option.cloneNode(true)));
    await this.busy(async () => {
      try {
        await this.look();
      } catch (error) { // the prompt may be that of another table
        await this.look({ prompt: "" });
        throw error;
      }
    });
  }

  /** Run `work` while the buttons rest, and show its error. */
  async busy(work) {
    const buttons = [...this.form.querySelectorAll("button:not(.close)")];
    this.part("problem").textContent = "";
    for (const button of buttons) button.disabled = true;
    try {
      await work();
    } catch (error) {
      this.part("problem").textContent = error.message;
    }
    for (const button of buttons) button.disabled = false;
  }

  body() {
    const { prompt, schema, model, max_tokens: most, prefix, encoding } = this.form.elements;
    const body = { input_file_id: this.file.id, prompt: prompt.value, model: model.value, prefix: prefix.value };
    if (schema.value.trim()) body.schema = parsed(schema.value);
    if (most.value) body.max_tokens = Number(most.value);
    if (encoding.value.trim()) body.encoding = encoding.value.trim();
    return { ...body, completion_window: this.window.value };
  }

  async look(changes = {}) {
    const { file } = this;
    const { table, metadata } = await (await postJson("/v1/tables/preview", { ...this.body(), ...changes })).json();
    if (file !== this.file) return; // another was dropped meanwhile
    this.table = table;
    this.eta = this.outlook({ metadata }).eta;
    this.answers = [];
    const more = table.columns.length - SHOWN_COLUMNS;
    this.part("chips").replaceChildren("columns: ", ...table.columns.slice(0, SHOWN_COLUMNS).map((name) => {
      const chip = element("button", `{${name}}`, "chip");
      chip.type = "button";
      chip.addEventListener("click", () => this.insert(chip.textContent));
      return chip;
    }), more > 0 ? `and ${count(more)} more` : "");
    this.estimate();
  }

  insert(text) {
    const { prompt } = this.form.elements;
    prompt.setRangeText(text, prompt.selectionStart, prompt.selectionEnd, "end");
    prompt.focus();
  }

  estimate() {
    const text = estimateText(this.table, expectedTokens(this.table, this.answers), this.eta, this.prices());
    this.part("estimate").textContent = [text, ...this.table.warnings].join(". Note: ");
  }

  /** Show the first requests and ask the model for their answers. */
  async preview() {
    await this.look();
    const { answers } = this;
    const items = this.table.first.map(({ body, problem }, i) => {
      const item = document.createElement("li");
      const prompt = body ? body.messages.at(-1).content : problem;
      const answer = element("pre", body ? "…" : "");
      item.append(element("h3", `row ${i + 1}`), element("pre", prompt, body ? "" : "problem"), element("h3", "answer"), answer);
      return { item, answer };
    });
    this.part("first").replaceChildren(...items.map(({ item }) => item));
    await Promise.all(this.table.first.map(({ body, chars }, i) => body && this.ask(body, chars, items[i].answer, answers)));
  }

  async ask(body, chars, shown, answers) {
    try {
      const { choices, usage } = await (await postJson("/v1/chat/completions", body)).json();
      shown.textContent = choices[0].message.content || JSON.stringify(choices[0].message);
      if (usage) answers.push({ chars, usage });
      this.estimate();
    } catch (error) {
      Object.assign(shown, { className: "problem", textContent: error.message });
    }
  }

  async start() {
    await postJson("/v1/tables", this.body());
    this.form.hidden = true;
    await this.started();
  }
}
