// Tokens of an answer, shaded by probability, with the alternatives of the token under the pointer or the focus.

import { percent } from "./format.js";

export const ALTERNATIVES = 5;
const DARKEST = 85; // percent of the shade's colour at a probability of 0: texts stay readable on it

/** The text of a chunk by tokens: [{text, tokens}]; tokens: entries of `logprobs.content`, several where they share a character. */
export function piecesOf(text, content) {
  if (!text) return [];
  const apart = content.map(({ token }) => token).join("") === text;
  return apart ? content.map((token) => ({ text: token.token, tokens: [token] })) : [{ text, tokens: content }];
}

/** The probability of a piece, 0 to 1. A piece of unknown probability has 1, which leaves it unshaded. */
export function chanceOf({ tokens }) {
  return Math.exp(tokens.reduce((sum, { logprob }) => sum + logprob, 0));
}

/** The tokens of a piece and their alternatives in words. */
export function alternativesText({ tokens }) {
  const name = ({ token, logprob }) => `${JSON.stringify(token)} ${percent(Math.exp(logprob))}`;
  const told = tokens.map((chosen) => {
    const others = chosen.top_logprobs.filter(({ bytes }) => `${bytes}` !== `${chosen.bytes}`);
    return others.length ? `${name(chosen)}, else ${others.map(name).join(", ")}` : name(chosen);
  });
  return told.join("; ") || "not known";
}

/** Add the pieces that `host` does not show yet. The arrow keys move between them; `note` tells the alternatives of one. */
export function drawPieces(host, pieces, note) {
  for (const piece of pieces.slice(host.children.length)) {
    const span = Object.assign(document.createElement("span"), { textContent: piece.text, tabIndex: host.children.length ? -1 : 0 });
    span.style.setProperty("--doubt", `${Math.round(DARKEST * (1 - chanceOf(piece)))}%`);
    for (const event of ["pointerenter", "focus"]) {
      span.addEventListener(event, () => { note.textContent = alternativesText(piece); });
    }
    span.addEventListener("keydown", ({ key }) => {
      const next = { ArrowRight: span.nextElementSibling, ArrowLeft: span.previousElementSibling }[key];
      if (next) next.focus();
    });
    host.append(span);
  }
}
