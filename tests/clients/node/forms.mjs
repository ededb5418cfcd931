// Answers of a given form, of random weights, as the clients for Node ask for them.

import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";

import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject } from "ai";
import OpenAI from "openai";
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

import { BASE_URL, Seat } from "./seat.mjs";

const Paint = z.object({ colour: z.enum(["red", "blue"]), count: z.number().int().min(0).max(99) });
const messages = [{ role: "user", content: "paint" }];
let seat, client;

beforeEach(async () => {
  seat = await Seat.take();
  client = new OpenAI({ baseURL: BASE_URL, apiKey: seat.key, maxRetries: 0 });
});

test("chat parses into the client's own type", async () => {
  const format = zodResponseFormat(Paint, "paint");
  const answer = await client.chat.completions.parse({
    model: "random",
    messages,
    response_format: format,
  });
  assert.ok(Paint.parse(answer.choices[0].message.parsed));
});

test("responses parse into the client's own type", async () => {
  const format = zodTextFormat(Paint, "paint");
  const answer = await client.responses.parse({ model: "random", input: "paint", text: { format } });
  assert.ok(Paint.parse(answer.output_parsed));
});

test("the AI SDK generates objects of its schema", async () => {
  const provider = createOpenAICompatible({
    name: "fulmen",
    baseURL: BASE_URL,
    apiKey: seat.key,
    supportsStructuredOutputs: true,
  });
  const { object } = await generateObject({
    model: provider("random"),
    prompt: "paint",
    schema: Paint,
    maxRetries: 0,
  });
  assert.ok(Paint.parse(object));
});
