// Table of teams (tenants) with the sums of /v1/usage: all teams for an operator, else the key's own.

import { getOfAll, hasKey } from "./api.js";
import { clock, count, money, seconds } from "./format.js";

const EVERY = 10000; // milliseconds

/** The cells of a team's row. The bill is that of requests and batch lines together. */
export function teamCells({ tenant, requests, batches, running_requests: running, waiting_requests: waiting, refused_requests: refused, unfinished_lines: lines }) {
  const tokens = ({ input_tokens: prompt, output_tokens: output }) => `${count(prompt)} + ${count(output)}`;
  const both = (name) => (requests[name] === null && batches[name] === null ? null : requests[name] + batches[name]);
  const value = both("value");
  return [
    tenant, tokens(requests), tokens(batches), count(running), count(waiting), count(refused), count(lines),
    seconds(both("engine_seconds")), value === null ? "–" : money(value),
  ];
}

export class Teams {
  constructor(elements) {
    Object.assign(this, elements); // card, head, rows, note, prices
    this.names = [...this.head.cells].map((cell) => cell.textContent);
    this.readAt = -EVERY;
  }

  async refresh() {
    if (performance.now() - this.readAt < EVERY) return;
    this.readAt = performance.now();
    const { in: price_in, out: price_out } = this.prices();
    const query = { limit: 1, ...(price_in > 0 || price_out > 0 ? { price_in, price_out } : {}) };
    const found = await getOfAll("/v1/usage", query).catch(() => null); // of a passing fault
    if (found) this.draw(found.since, found.tenants);
  }

  draw(since, teams) {
    this.card.hidden = teams.length < 2 && !hasKey(); // without keys there are no teams
    this.note.textContent = `requests since ${clock(since)}, batch lines of all batches kept`;
    this.rows.replaceChildren(...teams.map((team) => {
      const row = document.createElement("tr");
      teamCells(team).forEach((text, at) => { Object.assign(row.insertCell(), { textContent: text }).dataset.name = this.names[at]; });
      return row;
    }));
  }
}
