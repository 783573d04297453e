// OpenAI's package for Node: chat, responses, tools, structured answers, files and batches.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { ASK, DEMO, DEMO_URL, PERSON, PUPPET, PUPPET_URL, begin, end, plan, step } from "./steps.mjs";

begin("openai", "zod");
const demo = new OpenAI({ baseURL: `${DEMO_URL}/v1`, apiKey: "none", maxRetries: 0 });
const puppet = new OpenAI({ baseURL: `${PUPPET_URL}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: ASK }];
const chat = { model: DEMO, messages, temperature: 0, max_tokens: 40 };
const Person = z.object({ name: z.string(), age: z.number().int(), city: z.string() });

await step("chat, whole and streamed; the stream helper; the message sent back", async () => {
  const { message } = (await demo.chat.completions.create(chat)).choices[0];
  assert.match(message.content, /Paris/);
  let text = "";
  for await (const chunk of await demo.chat.completions.create({ ...chat, stream: true })) {
    text += chunk.choices[0]?.delta.content ?? "";
  }
  assert.equal(text, message.content);
  const helper = demo.chat.completions.stream({ ...chat, stream_options: { include_usage: true } });
  const final = await helper.finalChatCompletion();
  assert.equal(final.choices[0].message.content, text);
  assert.ok(final.usage.completion_tokens > 0);
  const again = [...messages, message, { role: "user", content: "And of Italy?" }];
  assert.ok((await demo.chat.completions.create({ ...chat, messages: again })).choices[0].message.content);
});

await step("runTools, whole and streamed", async () => {
  for (const stream of [false, true]) {
    const seen = [];
    const weather = {
      name: "get_weather",
      description: "Weather of a city",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
      parse: JSON.parse,
      function: ({ city }) => {
        seen.push(city);
        return "fog";
      },
    };
    const content = plan([["get_weather", { city: "Seoul" }]], "It is foggy.");
    const tools = [{ type: "function", function: weather }];
    const options = { model: PUPPET, messages: [{ role: "user", content }], tools, stream };
    assert.equal(await puppet.chat.completions.runTools(options).finalContent(), "It is foggy.");
    assert.deepEqual(seen, ["Seoul"]);
  }
});

await step("parse with zod: chat and responses", async () => {
  const asked = [{ role: "user", content: PERSON }];
  const form = zodResponseFormat(Person, "person");
  const answer = await demo.chat.completions.parse({ ...chat, messages: asked, response_format: form });
  assert.equal(answer.choices[0].message.parsed.age, 71);
  const text = { format: zodTextFormat(Person, "person") };
  const response = await demo.responses.parse({ model: DEMO, input: PERSON, temperature: 0, text });
  assert.equal(response.output_parsed.age, 71);
});

await step("responses: whole, streamed, inputTokens", async () => {
  const asked = { model: DEMO, input: ASK, temperature: 0 };
  const whole = await demo.responses.create(asked);
  assert.match(whole.output_text, /Paris/);
  const stream = demo.responses.stream(asked);
  let text = "";
  stream.on("response.output_text.delta", (event) => (text += event.delta));
  assert.equal((await stream.finalResponse()).output_text, text);
  assert.equal(text, whole.output_text);
  const count = await demo.responses.inputTokens.count({ model: DEMO, input: ASK });
  assert.equal(count.input_tokens, whole.usage.input_tokens);
});

await step("completions with logprobs, embeddings, models", async () => {
  const answer = await demo.completions.create({ model: DEMO, prompt: "The capital", max_tokens: 4, logprobs: 2 });
  assert.equal(answer.choices[0].logprobs.tokens.length, answer.usage.completion_tokens);
  const { data } = await demo.embeddings.create({ model: DEMO, input: ["a", "b"] });
  assert.ok(data.length === 2 && data[0].embedding.every(Number.isFinite));
  const found = [];
  for await (const model of demo.models.list()) found.push(model.id);
  assert.ok(found.includes(DEMO));
  assert.equal((await demo.models.retrieve(DEMO)).id, DEMO);
});

await step("files and batches", async () => {
  const lines = ["0", "1"].map((custom_id) =>
    JSON.stringify({ custom_id, method: "POST", url: "/v1/chat/completions", body: { ...chat, max_tokens: 4 } }),
  );
  const file = await demo.files.create({ file: new File([lines.join("\n")], "in.jsonl"), purpose: "batch" });
  const job = { input_file_id: file.id, endpoint: "/v1/chat/completions", completion_window: "24h" };
  let batch = await demo.batches.create(job);
  while (!["completed", "failed", "expired", "cancelled"].includes(batch.status)) {
    await new Promise((done) => setTimeout(done, 50));
    batch = await demo.batches.retrieve(batch.id);
  }
  assert.equal(batch.status, "completed");
  const rows = (await (await demo.files.content(batch.output_file_id)).text()).trim().split("\n").map(JSON.parse);
  assert.deepEqual(rows.map((row) => row.custom_id).sort(), ["0", "1"]);
});

await step("an aborted stream; typed errors: 400 and 404", async () => {
  const stream = await demo.chat.completions.create({ ...chat, max_tokens: 1000, ignore_eos: true, stream: true });
  for await (const chunk of stream) {
    assert.ok(chunk.id);
    stream.controller.abort();
  }
  await assert.rejects(demo.chat.completions.create({ ...chat, model: "unknown" }), OpenAI.NotFoundError);
  await assert.rejects(demo.chat.completions.create({ ...chat, temperature: 9 }), OpenAI.BadRequestError);
});

end();
