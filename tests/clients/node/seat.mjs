// One rollout's place at the gateway, for each test its own.

import assert from "node:assert/strict";

export const ROOT = process.env.FULMEN_CLIENTS_SERVER;
export const BASE_URL = `${ROOT}/v1`;
export const HELLO = "Hello, wörld! 你好 👋🏽\u2028done";
export const NAMES = ["add", "multiply"];
export const PARAMETERS = {
  type: "object",
  properties: { a: { type: "number" }, b: { type: "number" } },
  required: ["a", "b"],
};

const END = "<|im_end|>";

export const user = (text) => [{ role: "user", content: text }];

export async function collect(stream) {
  const all = [];
  for await (const one of stream) all.push(one);
  return all;
}

export class Seat {
  static async take() {
    const answer = await fetch(`${ROOT}/control/key`, { method: "POST" });
    return Object.assign(new Seat(), await answer.json());
  }

  // The recorded calls, as soon as there are that many.
  async calls(atLeast = 1) {
    const answer = await fetch(`${ROOT}/control/calls/${this.rollout}?at_least=${atLeast}`);
    return answer.json();
  }

  // The only call is exactly what the client was given.
  async recorded(text) {
    const [call] = await this.calls();
    assert.equal(call.completion, text + END);
    assert.equal(call.drift, null);
    assert.equal(call.superseded, false);
    return call;
  }

  // Each of so many calls begins with all tokens of the one before it.
  async continued(count) {
    const calls = await this.calls(count);
    assert.equal(calls.length, count);
    for (let place = 1; place < count; place++) {
      const [before, after] = calls.slice(place - 1);
      const seen = [...before.prompt_ids, ...before.completion_ids];
      assert.equal(after.parent, before.id);
      assert.equal(after.drift, null);
      assert.deepEqual(after.prompt_ids.slice(0, seen.length), seen);
    }
    return calls;
  }

  // Qwen3's format leaves thoughts out once there is a new question, and the record says so.
  async reasoningWasDropped() {
    const [first, second] = await this.calls(2);
    assert.equal(first.completion, `<think>\nTwo and two.\n</think>\n\nFour.${END}`);
    assert.ok(!second.prompt.includes("Two and two."));
    assert.deepEqual([second.parent, second.drift], [null, "template"]);
  }

  async aborted() {
    const [call] = await this.calls();
    assert.equal(call.finish_reason, "abort");
    return call;
  }
}
