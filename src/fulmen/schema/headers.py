"""Headers by which a request to the gateway says who sends it."""

AGENT = "x-fulmen-agent"
"""Name of the agent, percent-encoded where it is not printable ASCII."""
TRACEPARENT = "traceparent"
"""The span that was open when the request was sent (W3C Trace Context)."""
