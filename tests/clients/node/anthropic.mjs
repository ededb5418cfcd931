// Anthropic's client for Node.

import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";

import Anthropic from "@anthropic-ai/sdk";

import { HELLO, NAMES, PARAMETERS, ROOT, Seat, collect, user } from "./seat.mjs";

const TOOLS = NAMES.map((name) => ({ name, input_schema: PARAMETERS }));

let seat, client;

beforeEach(async () => {
  seat = await Seat.take();
  client = new Anthropic({ baseURL: ROOT, apiKey: seat.key, maxRetries: 0 });
});

const given = (messages = user("say hello"), more = {}) => ({
  model: "m",
  max_tokens: 500,
  messages,
  ...more,
});
const ask = (...asked) => client.messages.create(given(...asked));
const streamed = (...asked) => client.messages.stream(given(...asked)).finalMessage();
const resultsOf = (message, more = {}) => [
  {
    role: "user",
    content: message.content
      .filter((block) => block.type === "tool_use")
      .map((use) => ({ type: "tool_result", tool_use_id: use.id, content: use.name, ...more })),
  },
];

test("the models are listed", async () => {
  const names = (await collect(client.models.list())).map((model) => model.id);
  assert.deepEqual(names, ["m", "slow", "random"]);
});

test("a message is what was recorded", async () => {
  const message = await ask();
  assert.equal(message.content[0].text, HELLO);
  const call = await seat.recorded(HELLO);
  assert.equal(message.id, call.id);
  assert.equal(message.usage.output_tokens, call.completion_ids.length);
});

test("a streamed message is what was recorded", async () => {
  const stream = client.messages.stream(given());
  let text = "";
  stream.on("text", (piece) => (text += piece));
  assert.equal((await stream.finalMessage()).content[0].text, HELLO);
  assert.equal(text, HELLO);
  await seat.recorded(HELLO);
});

for (const get of [ask, streamed]) {
  for (const [text, count] of [["call add", 1], ["call both", 2]]) {
    test(`a conversation with ${count} calls continues the tokens, ${get.name}`, async () => {
      const messages = user(text);
      const first = await get(messages, { tools: TOOLS });
      assert.equal(first.stop_reason, "tool_use");
      messages.push({ role: "assistant", content: first.content }, ...resultsOf(first));
      const second = await get(messages, { tools: TOOLS });
      assert.equal(second.content[0].text, `I see: ${NAMES.slice(0, count).join(", ")}.`);
      messages.push({ role: "assistant", content: second.content }, ...user("say hello"));
      assert.equal((await get(messages, { tools: TOOLS })).content[0].text, HELLO);
      await seat.continued(3);
    });
  }

  test(`reasoning is a block of its own, ${get.name}`, async () => {
    const { content } = await get(user("think"));
    assert.deepEqual([content[0].type, content[0].thinking], ["thinking", "Two and two."]);
    assert.deepEqual([content[1].type, content[1].text], ["text", "Four."]);
    await get([...user("think"), { role: "assistant", content }, ...user("say hello")]);
    await seat.reasoningWasDropped();
  });
}

test("a failed tool's result continues the sampled tokens", async () => {
  const messages = user("call add");
  const first = await ask(messages, { tools: TOOLS });
  messages.push({ role: "assistant", content: first.content });
  messages.push(...resultsOf(first, { is_error: true }));
  assert.equal((await ask(messages, { tools: TOOLS })).content[0].text, "I see: add.");
  await seat.continued(2);
});

test("the client's tool runner goes through a conversation", async () => {
  const tools = TOOLS.map((tool) => ({
    ...tool,
    parse: (input) => input,
    run: ({ a, b }) => `${a} ${b}`,
  }));
  const message = await client.beta.messages.toolRunner(given(user("call both"), { tools }));
  assert.equal(message.content[0].text, "I see: 2 3, 2 3.");
  await seat.continued(2);
});

test("tokens are counted as they are charged", async () => {
  const asked = { model: "m", messages: user("say hello"), tools: TOOLS };
  const counted = await client.messages.countTokens(asked);
  const message = await ask(undefined, { tools: TOOLS });
  assert.equal(counted.input_tokens, message.usage.input_tokens);
});

for (const stream of [false, true]) {
  test(`a field of the wrong type is a bad request, stream: ${stream}`, async () => {
    const asked = ask(undefined, { temperature: "hot", stream });
    await assert.rejects(asked, Anthropic.BadRequestError);
  });
}

test("a wrong key is an authentication error", async () => {
  client = new Anthropic({ baseURL: ROOT, apiKey: "sk-wrong", maxRetries: 0 });
  await assert.rejects(ask(), Anthropic.AuthenticationError);
});

test("a prompt that is too long is told in the words that clients look for", async () => {
  await assert.rejects(ask(user("long ".repeat(5000))), /prompt is too long/);
});

test("a stream that is aborted in the middle ends the call", async () => {
  const stream = client.messages.stream(given(undefined, { model: "slow" }));
  stream.on("text", () => stream.abort());
  await assert.rejects(stream.done(), Anthropic.APIUserAbortError);
  await seat.aborted();
  assert.equal((await ask()).content[0].text, HELLO);
});
