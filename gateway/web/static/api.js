// HTTP client for the page's server: API key, JSON calls and server-sent events.

let key = sessionStorage.getItem("tidemill-key");

export class HttpError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function setKey(value) {
  key = value;
  every = { tenant: "*" };
  sessionStorage.setItem("tidemill-key", value);
}

export function hasKey() {
  return Boolean(key);
}

function headers(extra = {}) {
  return key ? { ...extra, authorization: `Bearer ${key}` } : extra;
}

async function failure(response) {
  let message = `${response.status} ${response.statusText}`;
  try {
    message = (await response.json()).error.message || message;
  } catch { /* no JSON error: use the status */ }
  return new HttpError(response.status, message);
}

export async function call(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers(options.headers) });
  if (!response.ok) throw await failure(response);
  return response;
}

export async function getJson(path) {
  return (await call(path)).json();
}

let every = { tenant: "*" }; // until the server says that the key is no operator's

/** A list of all tenants' objects for an operator, else of the key's own. */
export async function getOfAll(path, query) {
  const asked = every;
  try {
    return await getJson(`${path}?${new URLSearchParams({ ...query, ...asked })}`);
  } catch (error) {
    if (error.status !== 403 || !asked.tenant) throw error;
    every = {};
    return getOfAll(path, query);
  }
}

export async function postJson(path, body, options = {}) {
  return call(path, { ...options, method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
}

/** Split a stream of text, cut at any position, into the data of server-sent events. */
export class EventSplitter {
  constructor() {
    this.rest = "";
  }

  push(text) {
    this.rest += text;
    const parts = this.rest.split(/\r?\n\r?\n/);
    this.rest = parts.pop();
    return parts
      .map((part) => part.split(/\r?\n/).filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart()).join("\n"))
      .filter((data) => data !== "");
  }
}

/** Yield the data of a response's events as text. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const splitter = new EventSplitter();
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      yield* splitter.push(value);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
