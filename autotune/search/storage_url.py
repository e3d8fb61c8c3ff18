"""The address of a study's database: what is legal, and how it may be shown, without its password."""

from __future__ import annotations

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from autotune.errors import UserError

__all__ = ["check_url", "shown_url", "without_secrets"]

_HIDDEN = "***"
# libpq and the MySQL drivers also take it from the query, and key files' passwords
_SECRET_KEYS = ("password", "passwd", "sslpassword", "ssl_key_password")

_EXAMPLES = "such as sqlite:///study.db or postgresql://user:password@host:5432/database"
_BACKENDS = ("sqlite", "postgresql", "mysql", "mariadb")
_MEANT = {"postgres": "postgresql", "postgresql2": "postgresql", "pgsql": "postgresql", "sqlite3": "sqlite"}
_MOST_PORT = 65535


def check_url(url: str) -> None:
    """Raises UserError if no study can lie at `url`.

    The message repeats nothing of it that may be part of a password: parts of one that was not escaped can be anywhere
    before the last `@`.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise UserError(f"--storage is no database URL{_why_none(url)}, {_EXAMPLES}") from None
    scheme = parsed.drivername
    backend = scheme.partition("+")[0]
    if backend not in _BACKENDS:
        meant = _MEANT.get(backend.lower(), backend.lower())
        hint = f"; write {meant}://" if meant in _BACKENDS else ""
        raise UserError(f"--storage: {scheme}:// is no database of a study; sqlite, postgresql and mysql are{hint}")
    if _has_bare_at(parsed):
        raise UserError(f"--storage {shown_url(url)}: an @ in a user's name or password is written %40")
    if parsed.port is not None and not 1 <= parsed.port <= _MOST_PORT:
        raise UserError(f"--storage {shown_url(url)}: {parsed.port} is no port; ports are 1 to {_MOST_PORT}")
    if backend == "sqlite" and _is_in_memory(parsed):
        raise UserError(
            "--storage: a database in memory can't hold a study, it ends with the search; name a file, such as "
            "sqlite:///study.db"
        )
    try:
        parsed.get_dialect()
    except (NoSuchModuleError, ImportError):
        raise UserError(
            f"--storage {shown_url(url)}: there is no driver {scheme}; leave it out: {backend}://"
        ) from None


def shown_url(url: str) -> str:
    """The URL with stars for its password."""
    parsed = make_url(url)
    hidden = {key: _HIDDEN for key in parsed.query if key.lower() in _SECRET_KEYS}
    parsed = parsed.update_query_dict(hidden)
    if _has_bare_at(parsed):
        # What stands before the last @ is part of the password, whatever it was read as.
        at_end = f"{parsed.host or ''}{'' if parsed.port is None else f':{parsed.port}'}/{parsed.database or ''}"
        shown = f"{parsed.drivername}://{parsed.username or ''}:{_HIDDEN}@{at_end.rpartition('@')[2]}"
        query = parsed.render_as_string(hide_password=True).partition("?")[2]
        return (f"{shown}?{query}" if query else shown).replace("%2A%2A%2A", _HIDDEN)
    return parsed.render_as_string(hide_password=True).replace("%2A%2A%2A", _HIDDEN)


def without_secrets(text: str, url: str) -> str:
    """A driver's message without the passwords of `url`."""
    for secret in sorted(_secrets(make_url(url)), key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    return text


def _why_none(url: str) -> str:
    """Of a URL that can't be read: what is wrong with its port, if that is it."""
    _, scheme_end, rest = url.partition("://")
    before, at, after = rest.partition("?")[0].rpartition("@")
    if not scheme_end:
        return ""
    if "@" in before:
        return ": an @ in a user's name or password is written %40"
    port = after.partition("/")[0].rpartition(":")[2]
    # Without a user, what looks like a port may be the password of one.
    return f": its port is {port!r}, which is no number" if at and not port.isdecimal() else ": its port is no number"


def _has_bare_at(url: URL) -> bool:
    """Whether what was read as the host, or after a password as the database, has the end of a name or password."""
    return "@" in (url.host or "") or (url.password is not None and "@" in (url.database or ""))


def _is_in_memory(url: URL) -> bool:
    return url.database in (None, "", ":memory:", "file::memory:") or url.query.get("mode") == "memory"


def _secrets(url: URL) -> set[str]:
    values = {str(url.password)} if url.password is not None else set()
    for key, value in url.query.items():
        if key.lower() in _SECRET_KEYS:
            values |= {value} if isinstance(value, str) else set(value)
    return values - {""}
