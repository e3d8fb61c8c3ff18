"""Values that a study compares but must not tell: digests stand for them in its database.

Two studies never show that they hold the same value, and no table of digests made beforehand fits: each study has a
random salt. Whoever reads the database can still try guesses at one study's value; the digest makes each of them slow.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["SALT", "Secret", "is_salted", "sealed"]

SALT = "sealed_with"
"""Name of the salt among the values of an identity that has secrets."""

_ITERATIONS = 200_000
_LENGTH = 16


@dataclass(frozen=True)
class Secret:
    """A value that is not to be stored, and not shown."""

    value: str = field(repr=False)


def sealed(identity: Mapping[str, Any], stored: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """An identity as plain values, a digest in place of each secret.

    Args:
        stored: the identity to compare with: its salt is used, or none if an earlier version stored it without. None:
            a new salt.
    """
    found = {name: value for name, value in identity.items() if not isinstance(value, Secret)}
    hidden = {name: value.value for name, value in identity.items() if isinstance(value, Secret)}
    if not hidden:
        return found
    if stored is not None and not is_salted(stored) and any(name in stored for name in hidden):
        return found | {name: _unsalted(value) for name, value in hidden.items()}
    salt = str(stored[SALT]) if stored is not None and is_salted(stored) else secrets.token_hex(16)
    # The name goes in, so that equal values of two variables don't look equal.
    return found | {name: _salted(value, f"{salt}/{name}") for name, value in hidden.items()} | {SALT: salt}


def is_salted(identity: Mapping[str, Any]) -> bool:
    """Whether an identity has a salt."""
    return SALT in identity


def _salted(value: str, salt: str) -> str:
    digest = hashlib.pbkdf2_hmac("sha256", value.encode(), salt.encode(), _ITERATIONS, _LENGTH)
    return f"pbkdf2-sha256:{digest.hex()}"


def _unsalted(value: str) -> str:
    """As versions before the salt stored it."""
    return f"sha256:{hashlib.sha256(value.encode()).hexdigest()[:16]}"
