"""Which model a request is for: by the agent that asks, or by the name that it asks for."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from fulmen.gateway.errors import RequestRefused
from fulmen.gateway.exchange import Policy
from fulmen.gateway.external import External


class Models:
    """Policies that are served here, and models that are somewhere else.

    With a single policy and nothing else every name is its name: an unchanged agent asks for
    `gpt-4o-mini`, and is given the policy. As soon as there are several models, a name must be one
    of theirs, or `default` says which policy the other names mean. An agent that has a model of
    its own gets that one, whatever name it asks for.
    """

    def __init__(
        self,
        policies: Sequence[Policy],
        external: Sequence[External] = (),
        *,
        default: str | None = None,
        agents: Sequence[tuple[str, str]] = (),
    ) -> None:
        """`default` is the name of a policy; `agents` are patterns (fnmatch) of agents' names,
        each with the name of their model, of which the first that fits counts.

        Raises:
            ValueError: a name is given twice.
        """
        self._policies = {policy.name: policy for policy in policies}
        self._external = {model.name: model for model in external}
        names = [*(policy.name for policy in policies), *(model.name for model in external)]
        if len(set(names)) < len(names):
            raise ValueError(f"two models have the same name: {', '.join(sorted(names))}")
        self._agents = tuple(agents)
        only = policies[0].name if len(names) == 1 and policies else None
        self._default = self._policies.get(default or only or "")

    @property
    def names(self) -> list[str]:
        """All names that a client can ask for."""
        return [*self._policies, *self._external]

    def external(self, name: object, agent: str = "") -> External | None:
        """The model somewhere else that is the agent's, or has this name."""
        return self._external.get(self._wanted(name, agent))

    def policy(self, name: str, agent: str = "") -> Policy:
        """The policy that is the agent's, or that a name stands for.

        Raises:
            RequestRefused: 404, there is none.
        """
        policy = self._policies.get(self._wanted(name, agent), self._default)
        if policy is None:
            raise RequestRefused(
                f"there is no model {name[:100]!r} here; there are {', '.join(self.names)}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return policy

    def _wanted(self, name: object, agent: str) -> str:
        fitting = (model for pattern, model in self._agents if fnmatchcase(agent, pattern))
        own = next(fitting, None) if agent else None
        return own or (name if isinstance(name, str) else "")
