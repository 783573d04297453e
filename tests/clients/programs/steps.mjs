// Shared by the programs of npm packages: addresses, plans of the puppet, and steps that each print one line.

import { readFileSync } from "node:fs";

export const { DEMO_URL, PUPPET_URL } = process.env;
export const DEMO = "tidemill-demo";
export const PUPPET = "puppet";
export const ASK = "What is the capital of France?";
export const PERSON = "Who is this? Ida is 71 and lives in Bern.";
const LONGEST = 240; // characters of a reason

// Return text for a message that tells the puppet its turns: a string, or calls as [name, arguments].
export const plan = (...turns) => turns.map((turn) => `<<${JSON.stringify(turn)}>>`).join(" ");

// Print the version of the client, then those of the other packages.
export function begin(client, ...others) {
  const version = (name) =>
    JSON.parse(readFileSync(new URL(`node_modules/${name}/package.json`, import.meta.url))).version;
  say([version(client), ...others.map((name) => `${name} ${version(name)}`)].join(", "));
}

// Await the function, which throws when the answer is not the expected one.
export async function step(what, run) {
  try {
    await run();
    say([what, "passed"]);
  } catch (error) {
    console.error(error);
    const reason = `${error?.name}: ${error?.message} ${error?.responseBody ?? ""}`.replace(/\s+/g, " ");
    say([what, `failed: ${reason.slice(0, LONGEST)}`]);
  }
}

// Await the function, which the server must refuse with a reason.
export async function refused(what, run) {
  try {
    await run();
    say([what, "failed: served"]);
  } catch (error) {
    const reason = JSON.parse(error?.responseBody ?? "{}").error?.message ?? error?.message;
    const is4xx = error?.statusCode >= 400 && error?.statusCode < 500;
    say([what, `${is4xx ? "refused" : "failed"}: ${reason}`]);
  }
}

export const end = () => say("end");

const say = (line) => console.log(`\n${JSON.stringify({ "client step": line })}`);
