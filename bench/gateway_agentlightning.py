"""Agent Lightning's LLM proxy, run by `gateway.py` with the Python that has it installed.

Its server runs in a thread beside an in-memory store: spans need no further hop. One argument, the
base URL of the backend; prints port and path as JSON once ready, and ends with standard input.
"""

import asyncio
import json
import socket
import sys

from agentlightning import InMemoryLightningStore, LLMProxy  # pyright: ignore


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def serve(backend: str) -> None:
    """Until standard input ends."""
    store = InMemoryLightningStore(thread_safe=True)
    rollout = await store.start_rollout(input={"question": "bench"})
    model = {"model": "openai/bench", "api_base": backend, "api_key": "none"}
    port = free_port()
    proxy = LLMProxy(
        port=port,
        host="127.0.0.1",
        launch_mode="thread",
        store=store,
        model_list=[{"model_name": "bench", "litellm_params": model}],
    )
    await proxy.start()
    path = f"/rollout/{rollout.rollout_id}/attempt/{rollout.attempt.attempt_id}/v1"
    print("\n" + json.dumps({"port": port, "path": path}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    spans = await store.query_spans(rollout.rollout_id)
    print("\n" + json.dumps({"calls": len(spans)}), flush=True)
    await proxy.stop()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1]))
