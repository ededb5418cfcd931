// Vercel's AI SDK, over chat completions and over messages.

import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

import { BASE_URL, HELLO, NAMES, PARAMETERS, Seat } from "./seat.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false; // it does not know the model, and says so each time

const TOOLS = Object.fromEntries(
  NAMES.map((name) => [
    name,
    tool({ inputSchema: jsonSchema(PARAMETERS), execute: async ({ a, b }) => `${a} ${b}` }),
  ]),
);
const providers = {
  chat: (apiKey) => createOpenAICompatible({ name: "fulmen", baseURL: BASE_URL, apiKey }),
  messages: (apiKey) => createAnthropic({ baseURL: BASE_URL, apiKey }),
};
const whole = (given) => generateText(given);
const streamed = async (given) => {
  const result = streamText(given);
  await result.consumeStream();
  return { text: await result.text, reasoningText: await result.reasoningText };
};
let seat;

beforeEach(async () => {
  seat = await Seat.take();
});

for (const [protocol, provider] of Object.entries(providers)) {
  const given = (prompt, more = {}) => ({
    model: provider(seat.key)("m"),
    prompt,
    maxRetries: 0,
    ...more,
  });

  for (const get of [whole, streamed]) {
    const over = `over ${protocol}, ${get.name}`;

    test(`a text is what was recorded, ${over}`, async () => {
      assert.equal((await get(given("say hello"))).text, HELLO);
      await seat.recorded(HELLO);
    });

    for (const [prompt, said] of [["call add", "2 3"], ["call both", "2 3, 2 3"]]) {
      test(`an agent that was told to ${prompt} continues the sampled tokens, ${over}`, async () => {
        const asked = given(prompt, { tools: TOOLS, stopWhen: stepCountIs(3) });
        assert.ok((await get(asked)).text.endsWith(`I see: ${said}.`));
        await seat.continued(2);
      });
    }

    test(`reasoning comes beside the text, ${over}`, async () => {
      const { text, reasoningText } = await get(given("think"));
      assert.deepEqual([reasoningText, text], ["Two and two.", "Four."]);
    });
  }

  test(`an agent that thinks before it calls continues the sampled tokens, ${protocol}`, async () => {
    const asked = given("think and call", { tools: TOOLS, stopWhen: stepCountIs(3) });
    assert.equal((await whole(asked)).text, "I see: 2 3.");
    await seat.continued(2);
  });

  test(`a wrong key is an error with its status, over ${protocol}`, async () => {
    const asked = given("say hello", { model: provider("sk-wrong")("m") });
    await assert.rejects(whole(asked), (error) => {
      assert.ok(APICallError.isInstance(error));
      assert.equal(error.statusCode, 401);
      assert.match(error.message, /API key/);
      return true;
    });
  });

  test(`a prompt that is too long is an error that says so, over ${protocol}`, async () => {
    await assert.rejects(whole(given("long ".repeat(5000))), /maximum context length/);
  });

  test(`a stream that is aborted in the middle ends the call, over ${protocol}`, async () => {
    const leaving = new AbortController();
    const model = provider(seat.key)("slow");
    const { textStream } = streamText(
      given("say hello", { model, abortSignal: leaving.signal, onError: () => {} }),
    );
    for await (const piece of textStream) if (piece) leaving.abort();
    await seat.aborted();
    assert.equal((await whole(given("say hello"))).text, HELLO);
  });
}
