"""The errors Fulmen raises, each saying what is wrong, where, and what to do.

FulmenError
├── ConfigError        a setting, a flag or a file given by the user
├── DataError          a task, a reward or a record that does not hold what it must
├── ModelError         a model folder that cannot be served or trained
├── StoreError         the durable record refused or could not keep something
│   ├── LeaseLost      a result came from an attempt that is no longer the current one
│   └── RunOver        the run has come to its end; nothing more is asked of workers
├── EngineError        the engine could not generate
│   └── ContextOverflow  prompt and answer do not fit the model's context
├── GrammarError       an answer's form that cannot be kept to
├── AgentError         the agent could not be loaded or is unusable
└── GraderError        the grader raised or returned something that is no reward
"""


class FulmenError(Exception):
    """`message` says what is wrong, with the values; `hint` says what to do about it.

    >>> str(FulmenError("tasks.jsonl:17: not valid JSON", hint="fix or delete the line"))
    'tasks.jsonl:17: not valid JSON; fix or delete the line'
    """

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message, self.hint = message, hint

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.hint), self.__dict__


def _rebuild(kind: type[FulmenError], message: str, hint: str) -> FulmenError:
    return kind(message, hint=hint)


class ConfigError(FulmenError):
    """A setting, a flag or a file given by the user."""


class DataError(FulmenError):
    """A task, a reward or a record that does not hold what it must."""


class ModelError(FulmenError):
    """A model folder that cannot be served or trained."""


class StoreError(FulmenError):
    """The durable record refused or could not keep something."""


class LeaseLost(StoreError):
    """A result came from an attempt that is no longer the current one; nothing was written."""


class RunOver(StoreError):
    """The run has come to its end, and its server closes; nothing more is asked of workers."""


class EngineError(FulmenError):
    """The engine could not generate."""


class ContextOverflow(EngineError):
    """Prompt and answer together do not fit the model's context."""


class GrammarError(FulmenError):
    """A grammar that cannot be compiled, or a completion that does not match one."""


class AgentError(FulmenError):
    """The agent could not be loaded or is unusable."""


class GraderError(FulmenError):
    """The grader raised or returned something that is no reward."""
