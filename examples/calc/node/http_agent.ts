/**
 * The calculator agent as a server that works on many tasks at once.
 *
 *     node http_agent.ts 8900
 *     fulmen train --agent http://127.0.0.1:8900/ …
 *
 * Each request brings a task and where its model calls go: base URL and key are this rollout's own.
 */

import { createServer } from "node:http";
import { json } from "node:stream/consumers";
import type { AddressInfo } from "node:net";
import OpenAI from "openai";
import type { Task } from "./calc.ts";
import { solve } from "./openai_agent.ts";

type Asked = { task: Task; base_url: string; api_key: string };

const server = createServer(async (request, response) => {
  const left = new AbortController();
  response.on("close", () => left.abort()); // the rollout was stopped, or is answered
  response.setHeader("content-type", "application/json");
  try {
    const { task, base_url, api_key } = (await json(request)) as Asked;
    const client = new OpenAI({ baseURL: base_url, apiKey: api_key });
    response.end(JSON.stringify({ output: await solve(client, task, left.signal) }));
  } catch (error) {
    response.end(JSON.stringify({ error: String(error) }));
  }
});

server.listen(Number(process.argv[2] ?? 8900), "127.0.0.1", () => {
  console.log(`http://127.0.0.1:${(server.address() as AddressInfo).port}/`);
});
