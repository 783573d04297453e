// What became of the lines of one batch: causes of failures by count, samples of both files, and another run of the failed.

import { call } from "./api.js";
import { count } from "./format.js";

const HEAD_BYTES = 256 * 1024; // of a file of results
const WHOLE_BYTES = 64 * 1024 * 1024; // of files that are read to the end for another run
const CAUSES = 5;
const SAMPLES = 3;
const SAMPLE_CHARS = 600;

/** The first bytes of a file as rows: {rows, whole}. The last row is left out if it is cut. */
async function headOf(fileId, limit) {
  const reader = (await call(`/v1/files/${fileId}/content`)).body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  let whole = false;
  while (text.length < limit && !whole) {
    const { value, done } = await reader.read();
    whole = done;
    text += value || "";
  }
  if (!whole) reader.cancel().catch(() => {});
  return { rows: rowsOf(text, whole), whole };
}

/** JSON Lines as objects; damaged lines are left out. */
export function rowsOf(text, whole = true) {
  const lines = text.split("\n");
  if (!whole) lines.pop();
  return lines.flatMap((line) => {
    try {
      return line.trim() ? [JSON.parse(line)] : [];
    } catch {
      return [];
    }
  });
}

/** Why a row of an error file failed. */
export function causeOf(row) {
  const error = row.error || ((row.response || {}).body || {}).error || {};
  return error.message || error.code || "no reason is known";
}

/** Causes of failures by count, the commonest first: [[cause, count]]. */
export function causesOf(rows) {
  const counts = new Map();
  for (const cause of rows.map(causeOf)) counts.set(cause, (counts.get(cause) || 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1]);
}

/** The answer of a result row as text, and its tokens. */
export function answerOf(row) {
  const body = (row.response || {}).body || {};
  const choice = (body.choices || [{}])[0];
  const usage = body.usage || {};
  const text = choice.text ?? (choice.message ? choice.message.content || JSON.stringify(choice.message) : JSON.stringify(body));
  return { text, tokens: [usage.prompt_tokens, usage.completion_tokens] };
}

function paragraph(text, className = "") {
  return Object.assign(document.createElement("p"), { textContent: text, className });
}

function sample(id, text, note) {
  const item = document.createElement("li");
  const name = Object.assign(document.createElement("code"), { textContent: id });
  const content = Object.assign(document.createElement("pre"), { textContent: text.length > SAMPLE_CHARS ? `${text.slice(0, SAMPLE_CHARS)} …` : text });
  item.append(name, ` ${note}`, content);
  return item;
}

/** Elements that describe a batch. `rerun`: called with a File of its failed lines. */
export async function detailOf(batch, rerun) {
  const parts = [];
  for (const { line, message } of ((batch.errors || {}).data || []).slice(0, CAUSES)) {
    parts.push(paragraph(line ? `line ${line}: ${message}` : message, "problem"));
  }
  if (batch.error_file_id) {
    const { rows, whole } = await headOf(batch.error_file_id, HEAD_BYTES);
    const list = document.createElement("ul");
    for (const [cause, times] of causesOf(rows).slice(0, CAUSES)) {
      list.append(Object.assign(document.createElement("li"), { textContent: `${count(times)} × ${cause}`, className: "problem" }));
    }
    parts.push(paragraph(whole ? "Failed lines by cause:" : `Failed lines by cause, of the first ${count(rows.length)}:`), list);
    const again = Object.assign(document.createElement("button"), { type: "button", textContent: "Run the failed lines again" });
    again.addEventListener("click", async () => rerun(await failedLines(batch)));
    parts.push(again);
  }
  if (batch.output_file_id) {
    const { rows } = await headOf(batch.output_file_id, HEAD_BYTES);
    const list = document.createElement("ul");
    for (const row of rows.slice(0, SAMPLES)) {
      const { text, tokens } = answerOf(row);
      list.append(sample(row.custom_id, text, tokens.every(Number.isFinite) ? `${count(tokens[0])} + ${count(tokens[1])} tokens` : ""));
    }
    parts.push(paragraph("First answers:"), list);
  }
  return parts.length ? parts : [paragraph("Results and failed lines appear here when the batch has ended.", "quiet")];
}

/** The failed lines of a batch's input, as a file for a new batch. Throws an Error if a file is too large. */
async function failedLines(batch) {
  const [errors, input] = await Promise.all([batch.error_file_id, batch.input_file_id].map((id) => headOf(id, WHOLE_BYTES)));
  if (!errors.whole || !input.whole) throw new Error("The files are too large for the page; run tidemill batch run with --retry-failed.");
  return new File([failedOf(errors.rows, input.rows)], `${batch.id}-again.jsonl`);
}

/** The lines of an input whose ids are in the error file, as JSON Lines. */
export function failedOf(errors, input) {
  const failed = new Set(errors.map((row) => row.custom_id));
  return input.filter((line) => failed.has(line.custom_id)).map((line) => `${JSON.stringify(line)}\n`).join("");
}
