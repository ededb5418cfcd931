"""A text-to-SQL agent in LangGraph's own style. Nothing here knows Fulmen.

The writer's query is run; the checker sees what came back; if it objects, the rewriter tries again.
"""

import functools
from typing import TypedDict

from database import run_query, shown
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph

WRITER = "Write one SQLite query that answers the question. Reply with the query only."
CHECKER = "Does the result answer the question? Reply RIGHT, or WRONG and why."
REWRITER = "The query was found wrong. Reply with a better SQLite query only."
MOST_QUERIES = 3
"""Queries written for one question at most: the writer's and two of the rewriter's."""


class Work(TypedDict):
    """What the nodes know and add to."""

    question: str
    schema: str
    database: str
    query: str
    result: str
    verdict: str
    queries: int


@functools.cache
def _model() -> ChatOpenAI:
    """One client for all tasks; where it sends to and as whom is in the environment."""
    return ChatOpenAI(model="sql")


async def _ask(instructions: str, *parts: str) -> str:
    reply = await _model().ainvoke([("system", instructions), ("user", "\n".join(parts))])
    return reply.text


def query_of(reply: str) -> str:
    """The query in a reply, without a Markdown fence around it or a semicolon after it.

    >>> query_of("```sql\\nSELECT 1;\\n```")
    'SELECT 1'
    """
    text = reply.strip()
    if "```" in text:
        text = text.split("```")[1].removeprefix("sqlite").removeprefix("sql")
    return text.strip().removesuffix(";").rstrip()


async def writer(state: Work) -> dict[str, object]:
    """A first query."""
    reply = await _ask(WRITER, state["schema"], state["question"])
    return {"query": query_of(reply), "queries": 1}


def execute(state: Work) -> dict[str, object]:
    """What the database answers, or why it does not."""
    return {"result": shown(run_query(state["database"], state["query"]))}


async def checker(state: Work) -> dict[str, object]:
    """Whether the result looks right."""
    return {"verdict": await _ask(CHECKER, state["question"], state["query"], state["result"])}


async def rewriter(state: Work) -> dict[str, object]:
    """Another query, knowing what was wrong with the last."""
    known = (state["schema"], state["question"], state["query"], state["result"], state["verdict"])
    return {"query": query_of(await _ask(REWRITER, *known)), "queries": state["queries"] + 1}


def accepted(state: Work) -> bool:
    """Whether the checker had nothing to say against the result."""
    return not state["verdict"].strip().upper().startswith("WRONG")


def exhausted(state: Work) -> bool:
    """Whether no other query may be written."""
    return state["queries"] >= MOST_QUERIES


@functools.cache
def graph() -> CompiledStateGraph:
    """The three agents, and the database between them."""
    flow = StateGraph(Work)
    flow.add_node("writer", writer)
    flow.add_node("execute", execute)
    flow.add_node("checker", checker)
    flow.add_node("rewriter", rewriter)
    flow.add_edge(START, "writer")
    flow.add_edge("writer", "execute")
    flow.add_edge("execute", "checker")
    flow.add_conditional_edges("checker", accepted, {True: END, False: "rewriter"})
    flow.add_conditional_edges("rewriter", exhausted, {True: END, False: "execute"})
    return flow.compile()


async def solve(task: dict) -> str:
    """Answer a question about a database with a query."""
    work = {name: task[name] for name in ("question", "schema", "database")}
    return (await graph().ainvoke(work))["query"]
