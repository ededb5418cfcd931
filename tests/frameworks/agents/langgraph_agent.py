"""LangChain's tool agent, and a LangGraph of two nodes."""

from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def calculator(expression: str) -> str:
    """Work out an arithmetic expression."""
    return str(eval(expression))


def _messages(task: dict) -> dict:
    return {"messages": [{"role": "user", "content": f"What is {task['expression']}?"}]}


def _agent(model):
    return create_agent(
        model, [calculator], system_prompt="Use the calculator.", name="calculator-agent"
    )


agent = _agent(ChatOpenAI(model="gpt-5-mini"))
claude = _agent(ChatAnthropic(model_name="claude-haiku-4-5"))


async def solve(task: dict) -> str:
    state = await agent.ainvoke(_messages(task))
    return state["messages"][-1].text


async def solve_with_claude(task: dict) -> str:
    state = await claude.ainvoke(_messages(task))
    return state["messages"][-1].text


model = ChatOpenAI(model="gpt-5-mini")
WRITE, REVIEW = SystemMessage("Write the answer."), SystemMessage("Review the answer.")


async def writer(state: MessagesState) -> dict:
    asked = model.bind_tools([calculator])
    return {"messages": [await asked.ainvoke([WRITE, *state["messages"]])]}


async def reviewer(state: MessagesState) -> dict:
    return {"messages": [await model.ainvoke([REVIEW, *state["messages"]])]}


builder = StateGraph(MessagesState)
builder.add_node("writer", writer)
builder.add_node("tools", ToolNode([calculator], handle_tool_errors=True))
builder.add_node("reviewer", reviewer)
builder.add_edge(START, "writer")
builder.add_conditional_edges("writer", tools_condition, {"tools": "tools", END: "reviewer"})
builder.add_edge("tools", "writer")
builder.add_edge("reviewer", END)
graph = builder.compile()


async def solve_with_graph(task: dict) -> str:
    state = await graph.ainvoke(_messages(task))
    return state["messages"][-1].text
