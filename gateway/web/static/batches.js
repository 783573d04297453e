// Table of batches (upload, progress, cancel, download), which uses the public API.

import { call, getJson, postJson } from "./api.js";
import { count, duration } from "./format.js";

const SHOWN = 20;
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

/** Remaining seconds of a batch at its mean rate so far, or null if unknown. */
export function timeLeft(batch, now) {
  const { total, completed, failed } = batch.request_counts || {};
  const done = (completed || 0) + (failed || 0);
  if (batch.status !== "in_progress" || !done || !total || !batch.in_progress_at) return null;
  const passed = now - batch.in_progress_at;
  return passed > 0 ? (passed / done) * (total - done) : null;
}

/** Counts of rows by outcome. Rows of a stopped batch that never ran count as failed. */
export function outcome({ status, request_counts }) {
  const { total, completed, failed } = request_counts || { total: 0, completed: 0, failed: 0 };
  const stopped = status === "cancelled" || status === "expired";
  const lost = failed ? count(failed) + (stopped ? " not done" : "") : "";
  return { total, done: stopped ? completed : completed + failed, lost, stopped };
}

export class Batches {
  constructor(elements) {
    Object.assign(this, elements); // rows, file, drop, problem
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
      this.draw((await getJson(`/v1/batches?limit=${SHOWN}`)).data);
    } catch (error) {
      if (error.status === 404) this.drop.textContent = "This server does not support files and batches.";
    }
  }

  draw(batches) {
    const state = JSON.stringify(batches.map((b) => [b.id, b.status, b.request_counts]));
    if (state === this.shown) return; // keep the focus if the table is unchanged
    this.shown = state;
    const focused = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.key : null;
    this.rows.replaceChildren(...batches.map((batch) => this.row(batch)));
    if (!batches.length) {
      const row = document.createElement("tr");
      row.className = "none";
      cell(row, "No batch yet.").colSpan = 6;
      this.rows.append(row);
    }
    if (focused) {
      for (const element of this.rows.querySelectorAll("button")) if (element.dataset.key === focused) element.focus();
    }
  }

  row(batch) {
    const row = document.createElement("tr");
    const name = document.createElement("code");
    name.textContent = batch.id.slice(0, 14);
    name.title = batch.id;
    cell(row, name);
    cell(row, batch.status.replace("_", " "));
    const { total, done, lost, stopped } = outcome(batch);
    const meter = document.createElement("div");
    meter.className = "meter";
    const bar = document.createElement("progress");
    bar.max = Math.max(1, total);
    bar.value = done;
    bar.setAttribute("aria-label", `progress of ${batch.id}`);
    const text = document.createElement("span");
    text.textContent = `${count(done)} of ${count(total)}`;
    meter.append(bar, text);
    cell(row, meter, "wide");
    cell(row, lost, stopped ? "" : "lost");
    const left = timeLeft(batch, Date.now() / 1000);
    cell(row, left === null ? "" : duration(left), "left");
    const actions = document.createElement("div");
    actions.className = "actions";
    const add = (words, label, act) => {
      const made = button(words, label, act);
      made.dataset.key = `${batch.id} ${words}`;
      actions.append(made);
    };
    if (RUNNING.has(batch.status) && batch.status !== "cancelling") add("Cancel", `Cancel ${batch.id}`, () => this.cancel(batch.id));
    if (batch.output_file_id) add("Results", `Download the results of ${batch.id}`, () => this.download(batch.output_file_id, `${batch.id}.jsonl`));
    if (batch.error_file_id) add("Errors", `Download the failed rows of ${batch.id}`, () => this.download(batch.error_file_id, `${batch.id}-errors.jsonl`));
    if (batch.errors && batch.errors.data && batch.errors.data.length) {
      const first = batch.errors.data[0];
      const where = first.line ? `line ${first.line}: ` : "";
      row.title = `${where}${first.message}`;
      actions.append(Object.assign(document.createElement("span"), { className: "problem", textContent: `${where}${first.message}`.slice(0, 80) }));
    }
    cell(row, actions);
    return row;
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

  cancel(id) {
    return this.guarded(() => postJson(`/v1/batches/${id}/cancel`, {}));
  }

  download(fileId, name) {
    return this.guarded(async () => {
      const address = URL.createObjectURL(await (await call(`/v1/files/${fileId}/content`)).blob());
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
        const endpoint = await endpointOf(file);
        const form = new FormData();
        form.append("purpose", "batch");
        form.append("file", file, file.name);
        const stored = await (await call("/v1/files", { method: "POST", body: form })).json();
        await postJson("/v1/batches", { input_file_id: stored.id, endpoint, completion_window: "24h" });
      } finally {
        this.drop.dataset.state = "";
        this.drop.textContent = this.hint;
      }
    });
  }
}

/** URL of the file's first line: a batch has one endpoint. */
export async function endpointOf(file) {
  const head = await file.slice(0, 1 << 20).text();
  try {
    return JSON.parse(head.split("\n").find((line) => line.trim())).url || "/v1/chat/completions";
  } catch {
    return "/v1/chat/completions"; // the server reports the invalid line
  }
}
