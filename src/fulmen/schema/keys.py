"""Rollout keys: what an agent uses as its API key.

A key is a signed, expiring statement: "the bearer is attempt 2 of rollout r". It opens the gateway
for that attempt and nothing else. It carries what the gateway must know (sampling, seed), so that
no look-up is needed when a call arrives.
"""

import base64
import hmac
from functools import lru_cache
from hashlib import sha256

from fulmen.schema.clock import steady_time
from fulmen.schema.codec import from_msgpack, to_msgpack
from fulmen.schema.errors import DataError
from fulmen.schema.records import Record, Sampling

PREFIX = "fulmen-"


class KeyClaims(Record, frozen=True, kw_only=True):
    """What a key states."""

    rollout_id: str
    attempt: int
    expires: float
    """Unix time, seconds."""
    seed: int = 0
    sampling: Sampling = Sampling()
    trained: bool = True
    """False for evaluation and for guests of `fulmen serve`."""


class KeyRefused(DataError):
    """The key is forged, damaged or expired; the message never repeats it."""


def mint_key(claims: KeyClaims, secret: bytes) -> str:
    """Sign claims into a key that any HTTP client can carry.

    >>> claims = KeyClaims(rollout_id="r1", attempt=1, expires=2e9)
    >>> read_key(mint_key(claims, b"secret"), b"secret", now=0.0) == claims
    True
    """
    body = to_msgpack(claims)
    return PREFIX + _encode(body) + "." + _encode(_sign(body, secret))


def read_key(key: str, secret: bytes, *, now: float | None = None) -> KeyClaims:
    """Check a key and return its claims.

    Raises:
        KeyRefused: no rollout key, a wrong signature, or past its time.
    """
    body_text, _, signature_text = key.removeprefix(PREFIX).partition(".")
    try:
        body, signature = _decode(body_text), _decode(signature_text)
    except ValueError as error:
        raise KeyRefused("the API key is not a rollout key") from error
    if not (key.startswith(PREFIX) and hmac.compare_digest(signature, _sign(body, secret))):
        raise KeyRefused("the API key is not a rollout key of this server")
    claims = from_msgpack(KeyClaims, body)
    if claims.expires < (steady_time() if now is None else now):
        raise KeyRefused(
            f"the key of rollout {claims.rollout_id}, attempt {claims.attempt}, has expired"
        )
    return claims


def _sign(body: bytes, secret: bytes) -> bytes:
    # Of a copy, because the one-shot function lets go of the interpreter, and the store's thread
    # then waits for its turn at every key.
    signing = _signer(secret).copy()
    signing.update(body)
    return signing.digest()


@lru_cache(maxsize=8)
def _signer(secret: bytes) -> hmac.HMAC:
    return hmac.new(secret, digestmod=sha256)


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _decode(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)


__all__ = ["KeyClaims", "KeyRefused", "mint_key", "read_key"]
