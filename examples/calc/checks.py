"""What an intermediate reward of the Calc agent looks at (`air.toml`)."""


def calculator_error(call: object, tools: list) -> bool:  # noqa: ARG001 - as rules are given them
    """Whether the calculator could not work out what this call asked it for."""
    return any((use.result or "").startswith("error:") for use in tools)
