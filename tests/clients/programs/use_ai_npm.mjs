// The AI SDK over its providers: openai (responses and chat), openai-compatible, anthropic.

import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, embedMany, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { ASK, DEMO, DEMO_URL, PERSON, PUPPET, PUPPET_URL, begin, end, plan, refused, step } from "./steps.mjs";

begin("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic");
const Person = z.object({ name: z.string(), age: z.number().int(), city: z.string() });
const fail = ({ error }) => assert.fail(String(error));

function providers(url) {
  const baseURL = `${url}/v1`;
  const openai = createOpenAI({ baseURL, apiKey: "none" });
  const compatible = createOpenAICompatible({ name: "tidemill", baseURL, supportsStructuredOutputs: true });
  return { responses: openai, chat: openai.chat, compatible, anthropic: createAnthropic({ baseURL, apiKey: "none" }) };
}

function weather(seen) {
  const execute = async ({ city }) => {
    seen.push(city);
    return "fog";
  };
  return { get_weather: tool({ description: "Weather", inputSchema: z.object({ city: z.string() }), execute }) };
}

async function texts(common, unknown) {
  const first = await generateText({ ...common, system: "Be brief.", prompt: ASK });
  assert.match(first.text, /Paris/);
  assert.ok(first.usage.outputTokens > 0);
  const streamed = streamText({ ...common, system: "Be brief.", prompt: ASK, onError: fail });
  assert.equal(await streamed.text, first.text);
  assert.equal(await streamed.finishReason, first.finishReason);
  const stateless = { openai: { store: false } };
  assert.ok((await secondTurn({ ...common, providerOptions: stateless })).text);
  await assert.rejects(generateText({ ...common, model: unknown, prompt: ASK }), (error) => error.statusCode === 404);
}

async function secondTurn(common) {
  const { response } = await generateText({ ...common, prompt: ASK });
  const question = { role: "user", content: "And of Italy?" };
  return generateText({ ...common, messages: [{ role: "user", content: ASK }, ...response.messages, question] });
}

async function calls(common) {
  const prompt = plan([["get_weather", { city: "Seoul" }]], "It is foggy.");
  for (const generate of [generateText, (options) => streamText({ ...options, onError: fail })]) {
    const seen = [];
    const answer = await generate({ ...common, tools: weather(seen), prompt, stopWhen: stepCountIs(3) });
    assert.equal(await answer.text, "It is foggy.");
    assert.deepEqual(seen, ["Seoul"]);
  }
}

// `exact`: the model reads the person rightly; the small model fails where the provider sends the form as a tool.
async function objects(common, exact) {
  const { output } = await generateText({ ...common, output: Output.object({ schema: Person }), prompt: PERSON });
  assert.ok(exact ? output.age === 71 : Number.isInteger(output.age));
  const streamed = streamText({ ...common, output: Output.object({ schema: Person }), prompt: PERSON, onError: fail });
  let last;
  for await (const partial of streamed.partialOutputStream) last = partial;
  assert.deepEqual(last, output);
  const options = ["Paris", "Rome"];
  const choice = await generateText({ ...common, output: Output.choice({ options }), prompt: ASK });
  assert.ok(options.includes(choice.output));
}

async function callsAndObject(common, turn) {
  const seen = [];
  const prompt = plan([["get_weather", { city: "Seoul" }]], turn);
  const output = Output.object({ schema: z.object({ summary: z.string() }) });
  const answer = await generateText({ ...common, tools: weather(seen), output, prompt, stopWhen: stepCountIs(3) });
  assert.deepEqual([seen, answer.output], [["Seoul"], { summary: "fog" }]);
}

const [demo, puppet] = [providers(DEMO_URL), providers(PUPPET_URL)];
for (const name of ["responses", "chat", "compatible", "anthropic"]) {
  const common = { model: demo[name](DEMO), temperature: 0, maxRetries: 0, maxOutputTokens: 200 };
  const planned = { model: puppet[name](PUPPET), maxRetries: 0 };
  const object = '{"summary": "fog"}';
  await step(`${name}: text, whole and streamed, a second turn, an error`, () => texts(common, demo[name]("unknown")));
  await step(`${name}: tools, whole and streamed`, () => calls(planned));
  await step(`${name}: Output.object, whole and streamed, and Output.choice`, () => objects(common, name !== "anthropic"));
  await step(`${name}: tools with Output.object`, () =>
    callsAndObject(planned, name === "anthropic" ? [["json", JSON.parse(object)]] : object),
  );
  const ask = (providerOptions, more = {}) => generateText({ ...common, prompt: ASK, providerOptions, ...more });
  if (name === "anthropic") {
    await step("anthropic: thinking, a cached system message", async () => {
      const thinking = { type: "enabled", budgetTokens: 1024 };
      assert.ok((await ask({ anthropic: { thinking } }, { temperature: undefined })).text);
      const providerOptions = { anthropic: { cacheControl: { type: "ephemeral" } } };
      const messages = [{ role: "system", content: "Be brief.", providerOptions }, { role: "user", content: ASK }];
      assert.ok((await generateText({ ...common, messages })).text);
    });
  } else {
    await step(`${name}: reasoning effort, verbosity`, async () => {
      for (const options of [{ reasoningEffort: "low" }, { textVerbosity: "low" }]) {
        assert.ok((await ask({ openai: options, tidemill: options })).text);
      }
    });
  }
}

const stored = { model: demo.responses(DEMO), maxRetries: 0, maxOutputTokens: 50 };
await refused("responses: a second turn that refers to stored items", () => secondTurn(stored));

await step("logprobs, embedMany", async () => {
  for (const name of ["responses", "chat"]) {
    const model = demo[name](DEMO);
    const { providerMetadata } = await generateText({ model, prompt: ASK, providerOptions: { openai: { logprobs: 2 } } });
    assert.ok(providerMetadata.openai.logprobs.length > 0);
  }
  for (const model of [demo.responses.embedding(DEMO), demo.compatible.textEmbeddingModel(DEMO)]) {
    assert.equal((await embedMany({ model, values: ["a", "b"] })).embeddings.length, 2);
  }
});

end();
