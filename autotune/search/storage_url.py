"""The address of a study's database, as it may be shown: without its password, however it is given."""

from __future__ import annotations

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from autotune.errors import UserError

__all__ = ["check_url", "shown_url", "without_secrets"]

_HIDDEN = "***"
# libpq and the MySQL drivers also take it from the query, and key files' passwords
_SECRET_KEYS = ("password", "passwd", "sslpassword", "ssl_key_password")


def check_url(url: str) -> None:
    """Raises UserError if `url` is no database URL; the message doesn't repeat it, since it may hold a password."""
    try:
        make_url(url)
    except (ArgumentError, ValueError):
        raise UserError(
            "--storage is no database URL, such as sqlite:///study.db or postgresql://user:password@host:5432/database"
        ) from None


def shown_url(url: str) -> str:
    """The URL with stars for its password."""
    parsed = make_url(url)
    hidden = {key: _HIDDEN for key in parsed.query if key.lower() in _SECRET_KEYS}
    return parsed.update_query_dict(hidden).render_as_string(hide_password=True).replace("%2A%2A%2A", _HIDDEN)


def without_secrets(text: str, url: str) -> str:
    """A driver's message without the passwords of `url`."""
    for secret in sorted(_secrets(make_url(url)), key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    return text


def _secrets(url: URL) -> set[str]:
    values = {str(url.password)} if url.password is not None else set()
    for key, value in url.query.items():
        if key.lower() in _SECRET_KEYS:
            values |= {value} if isinstance(value, str) else set(value)
    return values - {""}
