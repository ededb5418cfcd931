"""Names of span attributes: OpenTelemetry's GenAI conventions, and the few of our own.

Copied as strings, because the conventions' package calls them incubating and moves them about.

Source: OpenTelemetry semantic conventions 1.44, `gen_ai`.
"""

OPERATION = "gen_ai.operation.name"
"""What a span is: the constants below, or another of the conventions' names."""
AGENT_NAME = "gen_ai.agent.name"
TOOL_NAME = "gen_ai.tool.name"
TOOL_CALL_ID = "gen_ai.tool.call.id"
"""The id by which the model asked for the tool; the gateway mints it."""
TOOL_ARGUMENTS = "gen_ai.tool.call.arguments"
TOOL_RESULT = "gen_ai.tool.call.result"
RESPONSE_ID = "gen_ai.response.id"
"""The id of a model's answer: that of our `Call`."""
REQUEST_MODEL = "gen_ai.request.model"
ERROR_TYPE = "error.type"

CHAT = "chat"
EXECUTE_TOOL = "execute_tool"
INVOKE_AGENT = "invoke_agent"
INVOKE_WORKFLOW = "invoke_workflow"

TOOL_OUTCOME = "fulmen.tool.outcome"
"""`ok`, `error`, `timeout` or `unknown`; on ended `execute_tool` spans."""
SOURCE = "fulmen.source"
"""The instrumentation scope that made the span."""
ERROR_MESSAGE = "fulmen.error.message"
"""Text of the exception, if one was recorded."""
