// Minimal Markdown to DOM nodes: fenced and inline code. Text is only set as text content.

/** [{code: boolean, text}] of a text with ``` fences; an unclosed fence runs to the end. */
export function blocks(text) {
  const parts = [];
  const lines = text.split("\n");
  let current = { code: false, lines: [] };
  for (const line of lines) {
    if (/^\s*```/.test(line)) {
      parts.push(current);
      current = { code: !current.code, lines: [] };
    } else {
      current.lines.push(line);
    }
  }
  parts.push(current);
  return parts.map(({ code, lines: own }) => ({ code, text: own.join("\n") })).filter((part) => part.code || part.text !== "");
}

export function render(host, text) {
  const nodes = [];
  for (const part of blocks(text)) {
    if (part.code) {
      const pre = document.createElement("pre");
      pre.textContent = part.text;
      nodes.push(pre);
      continue;
    }
    part.text.split(/(`[^`\n]+`)/).forEach((piece) => {
      if (piece.length > 2 && piece.startsWith("`") && piece.endsWith("`")) {
        const code = document.createElement("code");
        code.textContent = piece.slice(1, -1);
        nodes.push(code);
      } else if (piece) {
        nodes.push(document.createTextNode(piece));
      }
    });
  }
  host.replaceChildren(...nodes);
}
