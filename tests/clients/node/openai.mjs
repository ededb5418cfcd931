// OpenAI's client for Node.

import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";

import OpenAI from "openai";

import { BASE_URL, HELLO, NAMES, PARAMETERS, ROOT, Seat, collect, user } from "./seat.mjs";

const TOOLS = NAMES.map((name) => ({
  type: "function",
  function: { name, parameters: PARAMETERS },
}));
const FLAT_TOOLS = NAMES.map((name) => ({
  type: "function",
  name,
  parameters: PARAMETERS,
  strict: false,
}));

let seat, client;

beforeEach(async () => {
  seat = await Seat.take();
  client = new OpenAI({ baseURL: BASE_URL, apiKey: seat.key, maxRetries: 0 });
});

const chat = (messages = user("say hello"), more = {}) =>
  client.chat.completions.create({ model: "m", messages, ...more });
const respond = (input = "say hello", more = {}) =>
  client.responses.create({ model: "m", input, ...more });
const resultsOf = (response) =>
  response.output
    .filter((item) => item.type === "function_call")
    .map((item) => ({ type: "function_call_output", call_id: item.call_id, output: item.name }));

test("the models are listed", async () => {
  const names = (await collect(client.models.list())).map((model) => model.id);
  assert.deepEqual(names, ["m", "slow", "random"]);
});

test("a chat answer is what was recorded", async () => {
  const answer = await chat();
  assert.equal(answer.choices[0].message.content, HELLO);
  const call = await seat.recorded(HELLO);
  assert.equal(answer.id, call.id);
  assert.equal(answer.usage.completion_tokens, call.completion_ids.length);
});

test("a streamed chat answer is what was recorded", async () => {
  const stream = await chat(undefined, {
    stream: true,
    stream_options: { include_usage: true },
  });
  const chunks = await collect(stream);
  const text = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join("");
  assert.equal(text, HELLO);
  const call = await seat.recorded(HELLO);
  assert.equal(chunks.at(-1).usage.completion_tokens, call.completion_ids.length);
});

for (const [text, count] of [["call add", 1], ["call both", 2]]) {
  test(`a chat with ${count} calls at once continues the sampled tokens`, async () => {
    const messages = user(text);
    const { message, finish_reason } = (await chat(messages, { tools: TOOLS })).choices[0];
    assert.equal(finish_reason, "tool_calls");
    assert.deepEqual(message.tool_calls.map((call) => call.function.name), NAMES.slice(0, count));
    messages.push(message);
    for (const call of message.tool_calls) {
      messages.push({ role: "tool", tool_call_id: call.id, content: call.function.name });
    }
    const answer = (await chat(messages, { tools: TOOLS })).choices[0].message;
    assert.equal(answer.content, `I see: ${NAMES.slice(0, count).join(", ")}.`);
    messages.push(answer, ...user("say hello"));
    assert.equal((await chat(messages, { tools: TOOLS })).choices[0].message.content, HELLO);
    await seat.continued(3);
  });

  test(`responses with ${count} calls continue the sampled tokens by reference`, async () => {
    const first = await respond(text, { tools: FLAT_TOOLS });
    const more = { tools: FLAT_TOOLS, previous_response_id: first.id };
    const second = await respond(resultsOf(first), more);
    assert.equal(second.output_text, `I see: ${NAMES.slice(0, count).join(", ")}.`);
    await seat.continued(2);
  });
}

test("the client's tool runner goes through a streamed chat", async () => {
  const runner = client.chat.completions.runTools({
    model: "m",
    messages: user("call both"),
    stream: true,
    tools: NAMES.map((name) => ({
      type: "function",
      function: { name, parameters: PARAMETERS, parse: JSON.parse, function: ({ a, b }) => `${a} ${b}` },
    })),
  });
  assert.equal(await runner.finalContent(), "I see: 2 3, 2 3.");
  await seat.continued(2);
});

test("several choices are told apart", async () => {
  const answer = await chat(undefined, { n: 3 });
  assert.deepEqual(answer.choices.map((choice) => choice.message.content), [HELLO, HELLO, HELLO]);
  assert.deepEqual((await seat.calls(3)).map((call) => call.choice), [0, 1, 2]);
});

test("reasoning comes beside the content and may go back", async () => {
  const messages = user("think");
  const { message } = (await chat(messages)).choices[0];
  assert.deepEqual([message.reasoning_content, message.content], ["Two and two.", "Four."]);
  await chat([...messages, message, ...user("say hello")]);
  await seat.reasoningWasDropped();
});

for (const stream of [false, true]) {
  test(`a field of the wrong type is a bad request, stream: ${stream}`, async () => {
    await assert.rejects(chat(undefined, { temperature: "hot", stream }), (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      assert.equal(error.param, "temperature");
      return true;
    });
  });
}

test("a wrong key is an authentication error", async () => {
  client = new OpenAI({ baseURL: BASE_URL, apiKey: "sk-wrong", maxRetries: 0 });
  await assert.rejects(chat(), OpenAI.AuthenticationError);
});

test("the key may be in the base URL", async () => {
  client = new OpenAI({ baseURL: `${ROOT}/key/${seat.key}/v1`, apiKey: "unused" });
  assert.equal((await chat()).choices[0].message.content, HELLO);
  await seat.recorded(HELLO);
});

for (const [name, ask] of [["chat", (text) => chat(user(text))], ["response", respond]]) {
  test(`a prompt of a ${name} that is too long is told by its code`, async () => {
    await assert.rejects(ask("long ".repeat(5000)), (error) => {
      assert.ok(error instanceof OpenAI.BadRequestError);
      assert.equal(error.code, "context_length_exceeded");
      return true;
    });
  });
}

test("a chat stream that is left in the middle ends the call", async () => {
  const stream = await chat(undefined, { model: "slow", stream: true });
  for await (const chunk of stream) if (chunk.choices[0].delta.content) break;
  await seat.aborted();
  assert.equal((await chat()).choices[0].message.content, HELLO);
});

test("a stream of a response that is aborted ends the call", async () => {
  const stream = client.responses.stream({ model: "slow", input: "say hello" });
  for await (const event of stream) if (event.type === "response.output_text.delta") break;
  await seat.aborted();
  assert.equal((await respond()).output_text, HELLO);
});

test("a call that times out is recorded and superseded", async () => {
  const body = { model: "slow", messages: user("say hello") };
  const asked = client.chat.completions.create(body, { timeout: 300 });
  await assert.rejects(asked, OpenAI.APIConnectionTimeoutError);
  assert.equal((await seat.aborted()).superseded, true);
});

test("a completion continues raw text", async () => {
  const given = { model: "m", prompt: "say hello", max_tokens: 100 };
  assert.equal((await client.completions.create(given)).choices[0].text, HELLO);
  const stream = await client.completions.create({ ...given, stream: true });
  const chunks = await collect(stream);
  assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(""), HELLO);
  assert.equal((await seat.calls(2))[1].prompt, "say hello");
});

test("a response is what was recorded", async () => {
  assert.equal((await respond()).output_text, HELLO);
  await seat.recorded(HELLO);
});

test("a streamed response is what was recorded", async () => {
  const stream = client.responses.stream({ model: "m", input: "say hello" });
  const events = await collect(stream);
  const deltas = events.filter((event) => event.type === "response.output_text.delta");
  assert.equal(deltas.map((event) => event.delta).join(""), HELLO);
  assert.equal((await stream.finalResponse()).output_text, HELLO);
  await seat.recorded(HELLO);
});

test("streamed responses by value continue the sampled tokens", async () => {
  const input = user("call both");
  const turn = () =>
    client.responses
      .stream({ model: "m", input, tools: FLAT_TOOLS, store: false })
      .finalResponse();
  const first = await turn();
  input.push(...first.output, ...resultsOf(first));
  const second = await turn();
  assert.equal(second.output_text, "I see: add, multiply.");
  input.push(...second.output, ...user("say hello"));
  assert.equal((await turn()).output_text, HELLO);
  await seat.continued(3);
});

test("reasoning of a response is an item of its own", async () => {
  const stream = client.responses.stream({ model: "m", input: "think" });
  const { output } = await stream.finalResponse();
  assert.equal(output[0].content[0].text, "Two and two.");
  assert.equal(output[1].content[0].text, "Four.");
  await respond([...user("think"), ...output, ...user("say hello")]);
  await seat.reasoningWasDropped();
});

test("stored responses can be read and deleted", async () => {
  const { id } = await respond();
  assert.equal((await client.responses.retrieve(id)).output_text, HELLO);
  await client.responses.delete(id);
  await assert.rejects(client.responses.retrieve(id), OpenAI.NotFoundError);
});
