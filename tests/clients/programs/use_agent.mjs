// Coding agents: one session with a picture, a tool search where the agent has one, a command, and a second turn.

import assert from "node:assert/strict";
import { execFile } from "node:child_process";
import { existsSync, mkdirSync, writeFileSync } from "node:fs";
import { dirname } from "node:path";
import { promisify } from "node:util";
import { crc32, deflateSync } from "node:zlib";
import { begin, end, plan, PUPPET, PUPPET_URL, step } from "./steps.mjs";

const { HOME } = process.env;
const PICTURE = `${HOME}/picture.png`;
const COMMAND = "cat note.txt";
const AGENTS = {
  "@openai/codex": {
    program: "codex",
    files: {
      ".codex/config.toml": `model = "${PUPPET}"\nmodel_provider = "tidemill"\n[model_providers.tidemill]\n` +
        `name = "tidemill"\nbase_url = "${PUPPET_URL}/v1"\nwire_api = "responses"\n`,
    },
    first: ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"],
    next: ["exec", "resume", "--last", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"],
    calls: [["view_image", { path: PICTURE }], ["exec_command", { cmd: COMMAND }]],
  },
  "@anthropic-ai/claude-code": {
    program: "claude",
    environment: {
      ANTHROPIC_BASE_URL: PUPPET_URL, ANTHROPIC_AUTH_TOKEN: "x", ANTHROPIC_MODEL: PUPPET,
      ANTHROPIC_DEFAULT_HAIKU_MODEL: PUPPET, ENABLE_TOOL_SEARCH: "true", IS_SANDBOX: "1",
      CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
    },
    first: ["-p", "--dangerously-skip-permissions"],
    next: ["-c", "-p", "--dangerously-skip-permissions"],
    calls: [
      ["Read", { file_path: PICTURE }], ["ToolSearch", { query: "select:TaskStop" }], ["Bash", { command: COMMAND }],
    ],
  },
  "@qwen-code/qwen-code": {
    program: "qwen",
    environment: { OPENAI_BASE_URL: `${PUPPET_URL}/v1`, OPENAI_API_KEY: "x", OPENAI_MODEL: PUPPET },
    first: ["--auth-type", "openai", "-y", "-p"],
    next: ["--auth-type", "openai", "-y", "-c", "-p"],
    earlier: ["a turn of its own"],
    calls: [
      ["read_file", { file_path: PICTURE }], ["tool_search", { query: "select:web_fetch" }],
      ["run_shell_command", { command: COMMAND, is_background: false }],
    ],
  },
  "opencode-ai": {
    program: "opencode",
    files: {
      ".config/opencode/opencode.json": JSON.stringify({
        provider: { tidemill: { npm: "@ai-sdk/openai-compatible", options: { baseURL: `${PUPPET_URL}/v1` },
                                models: { [PUPPET]: { attachment: true, tool_call: true } } } },
        model: `tidemill/${PUPPET}`, small_model: `tidemill/${PUPPET}`, share: "disabled", autoupdate: false,
      }),
    },
    first: ["run"],
    next: ["run", "-c"],
    calls: [["read", { filePath: PICTURE }], ["bash", { command: COMMAND, description: "show" }]],
  },
};

// Return a PNG of 8 x 8 red points.
function picture() {
  const chunk = (kind, data) => {
    const body = Buffer.concat([Buffer.from(kind), data]);
    const edge = (number) => Buffer.from(new Uint32Array([number]).buffer).swap32();
    return Buffer.concat([edge(data.length), body, edge(crc32(body))]);
  };
  const head = Buffer.from([0, 0, 0, 8, 0, 0, 0, 8, 8, 2, 0, 0, 0]);
  const rows = Buffer.concat(Array.from({ length: 8 }, () => Buffer.from([0, ...Array(8).fill([255, 0, 0]).flat()])));
  const parts = [chunk("IHDR", head), chunk("IDAT", deflateSync(rows)), chunk("IEND", Buffer.alloc(0))];
  return Buffer.concat([Buffer.from([137, 80, 78, 71, 13, 10, 26, 10]), ...parts]);
}

const here = (path) => new URL(`node_modules/${path}`, import.meta.url).pathname;
const name = Object.keys(AGENTS).find((each) => existsSync(here(each)));
const agent = AGENTS[name];

// Run the agent and return its output, which must hold the words of the answer.
async function ask(options, text, answer) {
  const running = promisify(execFile)(here(`.bin/${agent.program}`), [...options, text], {
    cwd: HOME, env: { ...process.env, PWD: HOME, ...agent.environment }, timeout: 240_000,
  });
  running.child.stdin.end();
  const { stdout, stderr } = await running;
  assert.ok(stdout.includes(answer) && !/API Error|invalid_request_error/.test(stdout), `${stdout}\n${stderr}`);
}

begin(name);
writeFileSync(PICTURE, picture());
writeFileSync(`${HOME}/note.txt`, "The word is fog.\n");

for (const [path, text] of Object.entries(agent.files ?? {})) {
  mkdirSync(dirname(`${HOME}/${path}`), { recursive: true });
  writeFileSync(`${HOME}/${path}`, text);
}
const turns = agent.calls.map((call) => [call]);
const tools = agent.calls.map(([tool]) => tool).join(", ");

await step(`a session with the tools ${tools}`, () =>
  ask(agent.first, `Look. ${plan(...(agent.earlier ?? []), ...turns, "The first turn is done.")}`, "The first turn is done."));

await step("a second turn of the session", () =>
  ask(agent.next, `Bye. ${plan("The second turn is done.")}`, "The second turn is done."));

end();
