// Table of batches (upload, progress, cancel, download), which uses the public API.

import { call, getJson, getOfAll, hasKey, postJson } from "./api.js";
import { detailOf } from "./detail.js";
import { clock, count, money, rangeText, seconds } from "./format.js";
import { isTable } from "./table.js";

const SHOWN = 50;
const FIRST = 8; // rows before "all"
const ASK_ABOVE = 10; // lines that a cancel would stop without a second click
const RUNNING = new Set(["validating", "in_progress", "finalizing", "cancelling"]);

function cell(row, content, className = "") {
  const td = document.createElement("td");
  td.className = className;
  if (content instanceof Node) td.append(content);
  else td.textContent = content;
  row.append(td);
  return td;
}

function button(text, label, act) {
  const element = document.createElement("button");
  element.type = "button";
  element.textContent = text;
  element.setAttribute("aria-label", label);
  element.addEventListener("click", act);
  return element;
}

/** What the server expects of an unfinished batch: {eta, atRisk, warning, tokens}; eta: earliest and latest end in Unix seconds, or null. */
export function outlook({ metadata }) {
  const notes = metadata || {};
  const eta = /^(\d+)-(\d+)$/.exec(notes["tidemill.eta"] || "");
  return {
    eta: eta && [Number(eta[1]), Number(eta[2])],
    atRisk: notes["tidemill.at_risk"] === "true",
    warning: notes["tidemill.warning"] || "",
    tokens: Number(notes["tidemill.remaining_tokens"]) || 0,
  };
}

/** Counts of lines: {total, done, failed, unfinished}. */
export function outcome({ request_counts }) {
  const { total, completed, failed } = request_counts || { total: 0, completed: 0, failed: 0 };
  return { total, done: completed, failed, unfinished: total - completed - failed };
}

/** The end of a batch in words, at `now` in Unix seconds. */
export function endText(batch, now) {
  const ended = batch.completed_at || batch.cancelled_at || batch.expired_at || batch.failed_at;
  if (ended) return `ended ${clock(ended, now)}`;
  const { eta, atRisk } = outlook(batch);
  const late = atRisk ? "; at risk" : "";
  return eta === null ? late.slice(2) : `done in ${rangeText(eta, now)}${late}`;
}

/** Figures of /v1/usage for a batch: "1,234 + 567 tokens, 3.21 s of the engine, worth 0.0123". */
export function billText({ input_tokens: prompt, output_tokens: output, engine_seconds: engine, value }) {
  if (!prompt && !output) return "";
  const parts = [`${count(prompt)} + ${count(output)} tokens`];
  if (engine !== null) parts.push(`${seconds(engine)} of the engine`);
  if (value !== null) parts.push(`worth ${money(value)}`);
  return parts.join(", ");
}

/** Figures of all batches together: {left, eta, atRisk}; eta as in `outlook`, of the last batch. */
export function totals(batches) {
  const running = batches.filter(({ status }) => RUNNING.has(status));
  const etas = running.map((batch) => outlook(batch).eta).filter((eta) => eta !== null);
  return {
    left: running.reduce((sum, batch) => sum + outcome(batch).unfinished, 0),
    eta: etas.length ? [0, 1].map((bound) => Math.max(...etas.map((eta) => eta[bound]))) : null,
    atRisk: running.filter((batch) => outlook(batch).atRisk).length,
  };
}

export class Batches {
  constructor(elements) {
    Object.assign(this, elements); // rows, file, drop, problem, onlyRunning, window, changed, prices, table
    this.bills = new Map(); // batch id: figures of /v1/usage
    this.names = new Map(); // file id: name
    this.opened = null; // id of the batch whose lines are shown, and the elements that show them
    this.detail = [];
    this.all = false;
    this.asking = null; // id of the batch whose cancel waits for a second click
    this.onlyRunning.addEventListener("change", () => this.refresh());
    this.file.addEventListener("change", () => { this.upload(this.file.files[0]); this.file.value = ""; });
    for (const name of ["dragover", "dragleave", "drop"]) {
      this.drop.addEventListener(name, (event) => {
        event.preventDefault();
        this.drop.dataset.over = name === "dragover" ? "yes" : "no";
        if (name === "drop") this.upload(event.dataTransfer.files[0]);
      });
    }
    this.hint = this.drop.textContent;
    this.shown = "";
  }

  async refresh() {
    try {
      const batches = (await getOfAll("/v1/batches", { limit: SHOWN })).data;
      await Promise.all([this.learnNames(batches), this.learnBills()]);
      this.changed(batches);
      this.draw(this.onlyRunning.checked ? batches.filter(({ status }) => RUNNING.has(status)) : batches);
    } catch (error) {
      if (error.status === 404) this.drop.textContent = "This server does not support files and batches.";
    }
  }

  async learnNames(batches) {
    const files = batches.map((batch) => batch.input_file_id).filter((id) => !this.names.has(id));
    await Promise.all(files.map(async (id) => {
      const file = await getJson(`/v1/files/${id}`).catch(() => ({ filename: "" })); // the file may be deleted
      this.names.set(id, file.filename);
    }));
  }

  async learnBills() {
    const { in: price_in, out: price_out } = this.prices();
    const query = { limit: SHOWN, ...(price_in > 0 || price_out > 0 ? { price_in, price_out } : {}) };
    const { batches } = await getOfAll("/v1/usage", query).catch(() => ({ batches: [] })); // of a passing fault
    this.bills = new Map(batches.map((bill) => [bill.id, billText(bill)]));
  }

  draw(batches) {
    const now = Date.now() / 1000;
    const seen = (b) => [b.id, b.status, b.request_counts, endText(b, now), this.bills.get(b.id)];
    const state = JSON.stringify([this.asking, this.opened, this.detail.length, this.all, batches.map(seen)]);
    if (state === this.shown) return; // keep the focus if the table is unchanged
    this.shown = state;
    const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.key : null;
    const shown = this.all ? batches : batches.slice(0, FIRST);
    this.rows.replaceChildren(...shown.flatMap((batch) => [this.row(batch, now), ...(batch.id === this.opened ? [this.wide(...this.detail)] : [])]));
    if (shown.length < batches.length) {
      this.rows.append(this.wide(button(`Show all ${count(batches.length)} batches`, "Show all batches", () => { this.all = true; this.refresh(); })));
    }
    if (!batches.length) {
      const row = document.createElement("tr");
      row.className = "none";
      cell(row, "No batch.").colSpan = 7;
      this.rows.append(row);
    }
    if (focused) {
      for (const element of this.rows.querySelectorAll("button")) if (element.dataset.key === focused) element.focus();
    }
  }

  /** A row with one cell. */
  wide(...content) {
    const row = document.createElement("tr");
    row.className = "detail";
    const only = cell(row, "");
    only.colSpan = 7;
    only.append(...content);
    return row;
  }

  async open(batch) {
    this.opened = this.opened === batch.id ? null : batch.id;
    this.detail = [];
    await this.guarded(async () => {
      if (this.opened) this.detail = await detailOf(batch, (file) => this.upload(file));
    });
  }

  row(batch, now) {
    const row = document.createElement("tr");
    const name = document.createElement("div");
    name.className = "name";
    const id = document.createElement("code");
    id.textContent = batch.id;
    const opener = button(this.names.get(batch.input_file_id) || "file deleted", `Open ${batch.id}`, () => this.open(batch));
    opener.className = "link";
    opener.dataset.key = `${batch.id} open`;
    opener.setAttribute("aria-expanded", String(batch.id === this.opened));
    name.append(opener, id);
    if (batch.tenant && hasKey()) name.append(Object.assign(document.createElement("span"), { className: "team", textContent: batch.tenant }));
    const [first] = (batch.errors || {}).data || [];
    if (first) {
      const where = first.line ? `line ${first.line}: ` : "";
      name.append(Object.assign(document.createElement("span"), { className: "problem", textContent: `${where}${first.message}` }));
    }
    cell(row, name);
    cell(row, batch.status.replace("_", " "));
    const { total, done, failed, unfinished } = outcome(batch);
    cell(row, this.meter(batch, total, done, failed), "wide");
    cell(row, failed ? count(failed) : "", "lost");
    const { atRisk, warning, tokens } = outlook(batch);
    const end = cell(row, endText(batch, now), "end");
    end.dataset.state = atRisk ? "bad" : "";
    end.title = warning || (RUNNING.has(batch.status) ? `about ${count(tokens)} tokens left` : "");
    cell(row, this.bills.get(batch.id) || "", "bill");
    cell(row, this.actions(batch, row, unfinished));
    return row;
  }

  meter(batch, total, done, failed) {
    const meter = document.createElement("div");
    meter.className = "meter";
    const bar = document.createElement("div");
    bar.className = RUNNING.has(batch.status) ? "track" : "track ended";
    bar.setAttribute("role", "progressbar");
    bar.setAttribute("aria-label", `progress of ${batch.id}`);
    bar.setAttribute("aria-valuenow", String(total ? Math.round((100 * (done + failed)) / total) : 0));
    for (const [className, part] of [["done", done], ["failed", failed]]) {
      const piece = document.createElement("span");
      piece.className = className;
      piece.style.width = `${total ? (100 * part) / total : 0}%`;
      bar.append(piece);
    }
    const text = document.createElement("span");
    text.textContent = `${count(done + failed)} of ${count(total)}`;
    meter.append(bar, text);
    return meter;
  }

  actions(batch, row, unfinished) {
    const actions = document.createElement("div");
    actions.className = "actions";
    const add = (words, label, act) => {
      const made = button(words, label, act);
      made.dataset.key = `${batch.id} ${label}`;
      actions.append(made);
    };
    if (RUNNING.has(batch.status) && batch.status !== "cancelling") {
      const asks = this.asking === batch.id;
      add(asks ? `Cancel ${count(unfinished)} lines?` : "Cancel", `Cancel ${batch.id}`, () => this.cancel(batch.id, unfinished));
    }
    const content = (id) => `/v1/files/${id}/content`;
    if ((batch.metadata || {})["tidemill.table"] && (batch.output_file_id || batch.error_file_id)) {
      const file = `answers-${(this.names.get(batch.input_file_id) || "").replace(/\.jsonl$/, "")}`;
      add("Table", `Download the table with the answers of ${batch.id}`, () => this.download(`/v1/batches/${batch.id}/table`, file));
    }
    if (batch.output_file_id) add("Results", `Download the results of ${batch.id}`, () => this.download(content(batch.output_file_id), `${batch.id}.jsonl`));
    if (batch.error_file_id) add("Errors", `Download the failed rows of ${batch.id}`, () => this.download(content(batch.error_file_id), `${batch.id}-errors.jsonl`));
    return actions;
  }

  async guarded(work) {
    this.problem.textContent = "";
    try {
      await work();
    } catch (error) {
      this.problem.textContent = error.message;
    }
    await this.refresh();
  }

  /** Cancel; if many lines are left, at the second click within five seconds. */
  cancel(id, unfinished) {
    if (unfinished > ASK_ABOVE && this.asking !== id) {
      this.asking = id;
      setTimeout(() => { if (this.asking === id) { this.asking = null; this.refresh(); } }, 5000);
      return this.refresh();
    }
    this.asking = null;
    return this.guarded(() => postJson(`/v1/batches/${id}/cancel`, {}));
  }

  download(path, name) {
    return this.guarded(async () => {
      const address = URL.createObjectURL(await (await call(path)).blob());
      const link = Object.assign(document.createElement("a"), { href: address, download: name });
      link.click();
      setTimeout(() => URL.revokeObjectURL(address), 10000);
    });
  }

  upload(file) {
    if (!file) return undefined;
    return this.guarded(async () => {
      this.drop.dataset.state = "busy";
      this.drop.textContent = `Uploading ${file.name}, ${count(file.size)} bytes`;
      try {
        const first = await firstLine(file);
        const form = new FormData();
        form.append("purpose", "batch");
        form.append("file", file, file.name);
        const stored = await (await call("/v1/files", { method: "POST", body: form })).json();
        if (isTable(file.name, first)) return await this.table.open(stored);
        const endpoint = (first && first.url) || "/v1/chat/completions"; // a batch has one; the server reports an invalid line
        await postJson("/v1/batches", { input_file_id: stored.id, endpoint, completion_window: this.window.value });
      } finally {
        this.drop.dataset.state = "";
        this.drop.textContent = this.hint;
      }
    });
  }
}

/** Value of a file's first line; null if it is no JSON. */
export async function firstLine(file) {
  const head = await file.slice(0, 1 << 20).text();
  try {
    return JSON.parse(head.split("\n").find((line) => line.trim()));
  } catch {
    return null;
  }
}
