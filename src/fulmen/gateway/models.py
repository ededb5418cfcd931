"""Which model a name stands for."""

from collections.abc import Mapping, Sequence

from fulmen.gateway.errors import RequestRefused
from fulmen.gateway.exchange import Policy
from fulmen.gateway.external import External


class Models:
    """Policies that are served here, and models that are somewhere else.

    With a single policy and nothing else every name is its name: an unchanged agent asks for
    `gpt-4o-mini`, and is given the policy. As soon as there are several models, a name must be one
    of theirs, or `default` says which policy the other names mean.
    """

    def __init__(
        self,
        policies: Sequence[Policy],
        external: Mapping[str, External] | None = None,
        *,
        default: str | None = None,
    ) -> None:
        """`default` is the name of a policy. Raises ValueError if a name is given twice."""
        self._external = dict(external or {})
        self._policies = {policy.name: policy for policy in policies}
        names = [*(policy.name for policy in policies), *self._external]
        if len(set(names)) < len(names):
            raise ValueError(f"two models have the same name: {', '.join(sorted(names))}")
        only = policies[0].name if len(names) == 1 and policies else None
        self._default = self._policies.get(default or only or "")

    @property
    def names(self) -> list[str]:
        """All names that a client can ask for."""
        return [*self._policies, *self._external]

    def external(self, name: object) -> External | None:
        """The model somewhere else that has this name."""
        return self._external.get(name) if isinstance(name, str) else None

    def policy(self, name: str) -> Policy:
        """The policy that a name stands for.

        Raises:
            RequestRefused: 404, there is none.
        """
        policy = self._policies.get(name, self._default)
        if policy is None:
            raise RequestRefused(
                f"there is no model {name[:100]!r} here; there are {', '.join(self.names)}",
                status=404,
                param="model",
                code="model_not_found",
            )
        return policy
