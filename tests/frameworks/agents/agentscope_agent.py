"""AgentScope's agent, whose tool asks nobody for permission."""

import os

from agentscope.agent import Agent
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from agentscope.permission import PermissionBehavior, PermissionDecision
from agentscope.tool import FunctionTool, Toolkit


async def calculator(expression: str) -> str:
    """Work out an arithmetic expression.

    Args:
        expression (str): What to work out.
    """
    return str(eval(expression))


ALLOWED = PermissionDecision(behavior=PermissionBehavior.ALLOW, message="it only calculates")


async def solve(task: dict) -> str:
    credential = OpenAICredential(api_key=os.environ["OPENAI_API_KEY"])
    agent = Agent(
        "calculator-agent",
        "Use the calculator.",
        OpenAIChatModel(credential, "gpt-5-mini"),
        Toolkit([FunctionTool(calculator, permission=ALLOWED)]),
    )
    answer = await agent.reply(UserMsg("user", f"What is {task['expression']}?"))
    return answer.get_text_content() or ""
