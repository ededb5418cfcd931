"""Keys of those who use the store from another machine: an admin, or a worker.

Both follow from the store's secret, so a run that goes on has the same ones. A rollout key
(`fulmen.schema.keys`) is neither.
"""

import base64
import hmac
from hashlib import sha256
from typing import Literal, NamedTuple, TypeAlias

Role: TypeAlias = Literal["admin", "worker"]

_PREFIX = "fulmen_"


class RoleKeys(NamedTuple):
    """The keys of a store."""

    admin: str
    """Does everything."""
    worker: str
    """Claims, and reports what came of it."""

    def role_of(self, key: str) -> Role | None:
        """Whose key it is; None: nobody's. Takes as long for a wrong key as for a right one.

        >>> keys = make_role_keys(b"secret")
        >>> keys.role_of(keys.worker), keys.role_of("guess")
        ('worker', None)
        """
        given = key.encode(errors="replace")
        admin = hmac.compare_digest(given, self.admin.encode())
        worker = hmac.compare_digest(given, self.worker.encode())
        return "admin" if admin else "worker" if worker else None

    def __repr__(self) -> str:
        """Without the keys: what is printed may be kept."""
        return "RoleKeys(…)"


def make_role_keys(secret: bytes) -> RoleKeys:
    """The keys of the store with this secret."""
    return RoleKeys(_make("admin", secret), _make("worker", secret))


def _make(role: Role, secret: bytes) -> str:
    digest = hmac.digest(secret, b"role key of the " + role.encode(), sha256)
    return f"{_PREFIX}{role}_" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
