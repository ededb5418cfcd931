/**
 * The calculator agent with npm's `openai`: task on standard input, answer on standard output.
 *
 *     fulmen train --agent "node openai_agent.ts" …
 *
 * The client finds its base URL and key in the environment. Node 22.18 or later runs this as it is.
 */

import { text } from "node:stream/consumers";
import { pathToFileURL } from "node:url";
import OpenAI from "openai";
import { call, DESCRIPTION, INSTRUCTIONS, PARAMETERS, type Task, TURNS } from "./calc.ts";

const CALCULATOR: OpenAI.ChatCompletionTool = {
  type: "function",
  function: { name: "calculator", description: DESCRIPTION, parameters: PARAMETERS, strict: false },
};

/** Answer a word problem. */
export async function solve(client: OpenAI, task: Task, signal?: AbortSignal): Promise<string> {
  const messages: OpenAI.ChatCompletionMessageParam[] = [
    { role: "system", content: INSTRUCTIONS },
    { role: "user", content: task.question },
  ];
  let content = "";
  for (let turn = 0; turn < TURNS; turn++) {
    const asked = { model: "calc", messages, tools: [CALCULATOR] };
    const { message } = (await client.chat.completions.create(asked, { signal })).choices[0]!;
    content = message.content ?? "";
    const calls = (message.tool_calls ?? []).filter((made) => made.type === "function");
    if (calls.length === 0) break;
    messages.push({ role: "assistant", content: message.content, tool_calls: calls });
    for (const made of calls) {
      const result = call(made.function.arguments);
      messages.push({ role: "tool", tool_call_id: made.id, content: result });
    }
  }
  return content;
}

if (import.meta.url === pathToFileURL(process.argv[1] ?? "").href) {
  console.log(await solve(new OpenAI(), JSON.parse(await text(process.stdin))));
}
