"""A search agent in the style of the OpenAI Agents SDK: one agent, one tool, no word of Fulmen.

The corpus is the file that `RAG_CORPUS` names, else the one beside this file. It is searched by
words, or by meaning with the index that `RAG_INDEX` names (see dense.py).
"""

import functools
import os
from pathlib import Path

from agents import Agent, Runner, function_tool
from retrieval import Index, open_index

INSTRUCTIONS = (
    "Answer the question with what you find. Search for one fact at a time until you know enough; "
    "then reply with the answer alone, in a few words: <answer>the answer</answer>."
)
PASSAGES = int(os.environ.get("RAG_PASSAGES", "2"))
TURNS = 5


@functools.cache
def _index() -> Index:
    """One index for all tasks."""
    corpus = os.environ.get("RAG_CORPUS") or Path(__file__).with_name("corpus.jsonl")
    dense = os.environ.get("RAG_INDEX")
    return open_index(Path(corpus), Path(dense) if dense else None)


@function_tool(strict_mode=False)
def search(query: str) -> str:
    """Find the passages that fit a query best."""
    found = _index().search(query, PASSAGES)
    return "\n".join(f"- {passage}" for passage in found) or "nothing found"


async def solve(task: dict) -> str:
    """Answer a question."""
    agent = Agent(name="rag", instructions=INSTRUCTIONS, tools=[search], model="rag")
    result = await Runner.run(agent, task["question"], max_turns=TURNS)
    return result.final_output
