// Markdown to DOM nodes: headings, paragraphs, lists, tables, quotes, code, emphasis, links. Text is only set as text content.

const FENCE = /^\s*```/;
const ITEM = /^(\s*)(?:[-*+]|(\d+)[.)])\s+(.*)$/;
const RULE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;

/** Blocks of a text: {kind: "code" | "heading" | "list" | "table" | "quote" | "text", ...}. An unclosed fence runs to the end. */
export function blocks(text) {
  const lines = text.split("\n");
  const found = [];
  let at = 0;
  const take = (fits) => {
    const from = at;
    while (at < lines.length && fits(lines[at], at)) at += 1;
    return lines.slice(from, at);
  };
  while (at < lines.length) {
    const line = lines[at];
    const heading = /^(#{1,6})\s+(.*)$/.exec(line);
    if (FENCE.test(line)) {
      at += 1;
      found.push({ kind: "code", text: take((each) => !FENCE.test(each)).join("\n") });
      at += 1;
    } else if (heading) {
      found.push({ kind: "heading", level: heading[1].length, text: heading[2] });
      at += 1;
    } else if (ITEM.test(line)) {
      const items = take((each) => ITEM.test(each) || (/^\s{2,}\S/.test(each) && !FENCE.test(each)));
      found.push({ kind: "list", items: listItems(items) });
    } else if (line.includes("|") && RULE.test(lines[at + 1] || "")) {
      const rows = take((each) => each.includes("|"));
      found.push({ kind: "table", rows: rows.filter((_, number) => number !== 1).map(cells) });
    } else if (/^\s*>/.test(line)) {
      found.push({ kind: "quote", text: take((each) => /^\s*>/.test(each)).map((each) => each.replace(/^\s*> ?/, "")).join("\n") });
    } else if (!line.trim()) {
      at += 1;
    } else {
      const first = at;
      const starts = (each, number) => number > first && (FENCE.test(each) || ITEM.test(each) || /^(#{1,6}\s|\s*>)/.test(each) || (each.includes("|") && RULE.test(lines[number + 1] || "")));
      found.push({ kind: "text", text: take((each, number) => each.trim() !== "" && !starts(each, number)).join("\n") });
    }
  }
  return found;
}

function listItems(lines) {
  const items = [];
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (match) items.push({ depth: Math.floor(match[1].length / 2), number: match[2] ? Number(match[2]) : null, text: match[3] });
    else items[items.length - 1].text += `\n${line.trim()}`;
  }
  return items;
}

function cells(row) {
  return row.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
}

/** Spans of a line: {kind: "code" | "strong" | "em" | "link" | "text", text, href}. */
export function spans(text) {
  const pattern = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*|\[([^\]\n]+)\]\((https?:[^\s)]+)\)/g;
  const found = [];
  let from = 0;
  for (const match of text.matchAll(pattern)) {
    if (match.index > from) found.push({ kind: "text", text: text.slice(from, match.index) });
    const [whole, code, strong, em, link, href] = match;
    if (code !== undefined) found.push({ kind: "code", text: code });
    else if (strong !== undefined) found.push({ kind: "strong", text: strong });
    else if (em !== undefined) found.push({ kind: "em", text: em });
    else found.push({ kind: "link", text: link, href });
    from = match.index + whole.length;
  }
  if (from < text.length) found.push({ kind: "text", text: text.slice(from) });
  return found;
}

function make(name, children = []) {
  const element = document.createElement(name);
  element.append(...children);
  return element;
}

function inline(text) {
  return spans(text).map(({ kind, text: words, href }) => {
    if (kind === "text") return document.createTextNode(words);
    if (kind === "link") return Object.assign(make("a", [words]), { href, target: "_blank", rel: "noopener noreferrer" });
    return make(kind, [words]);
  });
}

function node(block) {
  if (block.kind === "code") return make("pre", [block.text]);
  if (block.kind === "heading") return make(`h${Math.min(6, block.level + 2)}`, inline(block.text));
  if (block.kind === "quote") return make("blockquote", inline(block.text));
  if (block.kind === "text") return make("p", inline(block.text));
  if (block.kind === "table") {
    const [head, ...rest] = block.rows;
    const row = (name) => (each) => make("tr", each.map((cell) => make(name, inline(cell))));
    return make("table", [make("thead", [row("th")(head)]), make("tbody", rest.map(row("td")))]);
  }
  return list(block.items);
}

/** Nested lists of items with depths. */
function list(items) {
  const ordered = items[0].number !== null;
  const host = make(ordered ? "ol" : "ul");
  if (ordered) host.start = items[0].number;
  for (let at = 0; at < items.length;) {
    const { depth, text } = items[at];
    const inner = [];
    for (at += 1; at < items.length && items[at].depth > depth; at += 1) inner.push(items[at]);
    host.append(make("li", [...inline(text), ...(inner.length ? [list(inner)] : [])]));
  }
  return host;
}

export function render(host, text) {
  host.replaceChildren(...blocks(text).map(node));
}
