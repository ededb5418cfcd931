/**
 * The calculator agent with Vercel's `ai`: task on standard input, answer on standard output.
 *
 *     fulmen train --agent "node ai_agent.ts" …
 *
 * Node 22.18 or later runs this as it is.
 */

import { text } from "node:stream/consumers";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, tool } from "ai";
import { calculator, DESCRIPTION, INSTRUCTIONS, PARAMETERS, type Task, TURNS } from "./calc.ts";

const provider = createOpenAICompatible({
  name: "policy",
  baseURL: process.env["OPENAI_BASE_URL"]!,
  apiKey: process.env["OPENAI_API_KEY"]!,
});

/** Answer a word problem. */
async function solve(task: Task): Promise<string> {
  const answer = await generateText({
    model: provider("calc"),
    system: INSTRUCTIONS,
    prompt: task.question,
    tools: {
      calculator: tool({
        description: DESCRIPTION,
        inputSchema: jsonSchema<{ expression: string }>(PARAMETERS),
        strict: false,
        execute: ({ expression }) => calculator(expression),
      }),
    },
    stopWhen: stepCountIs(TURNS),
  });
  return answer.text;
}

console.log(await solve(JSON.parse(await text(process.stdin))));
