"""The agent that `training.py` trains: the example's own with the `openai` client.

It makes three calls at most: AutoGen's `max_tool_iterations` in the example, and what TRL makes.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

from calc import plain_agent

plain_agent.TURNS = 3
solve = plain_agent.solve
