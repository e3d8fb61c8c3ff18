"""A database's password is in nothing that is shown."""

from __future__ import annotations

import pytest

from autotune.errors import UserError
from autotune.search.storage_url import check_url, shown_url, without_secrets


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sqlite:////tmp/a.db", "sqlite:////tmp/a.db"),
        ("postgresql://me:s3cret@host:5432/db", "postgresql://me:***@host:5432/db"),
        ("postgresql://me:s%40cret@host/db", "postgresql://me:***@host/db"),
        ("postgresql://me:s3@cret@host:5432/db", "postgresql://me:***@host:5432/db"),
        ("postgresql://me:s3@cr/et@host/db?connect_timeout=3", "postgresql://me:***@host/db?connect_timeout=3"),
        ("postgresql://host/db?user=me&password=s3cret", "postgresql://host/db?password=***&user=me"),
        ("mysql+pymysql://host/db?passwd=s3cret&charset=utf8", "mysql+pymysql://host/db?charset=utf8&passwd=***"),
    ],
)
def test_the_address_is_shown_without_its_password(url: str, shown: str) -> None:
    assert shown_url(url) == shown


def test_what_a_driver_says_is_shown_without_the_password() -> None:
    url = "postgresql://me:s%40cret@host/db?sslpassword=other"
    said = "bad dsn 'password=s@cret sslpassword=other'"
    assert without_secrets(said, url) == "bad dsn 'password=*** sslpassword=***'"


@pytest.mark.parametrize("url", ["", "s3cret", "postgresql://me:s3cret@host:port/db"])
def test_what_is_no_address_is_refused_unrepeated(url: str) -> None:
    with pytest.raises(UserError, match="no database URL") as refused:
        check_url(url)
    assert "s3cret" not in str(refused.value)
    assert refused.value.__cause__ is None


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("foo://x", "foo:// is no database of a study; sqlite, postgresql and mysql are$"),
        ("redis://localhost:6379", "redis:// is no database of a study"),
        ("postgres://me:s3cret@host/db", "postgres:// is no database .*; write postgresql://$"),
        ("postgresql+nonsense://me:s3cret@host/db", r"there is no driver postgresql\+nonsense"),
        ("sqlite://", "a database in memory can't hold a study"),
        ("sqlite:///:memory:", "a database in memory can't hold a study"),
        ("sqlite:///file:x?mode=memory&uri=true", "a database in memory can't hold a study"),
        ("postgresql://me:s3cret@host:99999/db", "99999 is no port"),
        ("postgresql://me:s3cret@host:54x2/db", "its port is '54x2', which is no number"),
        ("postgresql://me:s3cret/db", "its port is no number"),
        ("postgresql://me:s3@cret@host:5432/db", r"me:\*\*\*@host:5432/db: an @ in .* is written %40"),
        ("postgresql://me:s3@cr:et@host:5432/db", "an @ in .* is written %40"),
    ],
)
def test_an_address_where_no_study_can_lie_is_told_by_its_fault(url: str, told: str) -> None:
    with pytest.raises(UserError, match=told) as refused:
        check_url(url)
    assert not any(part in str(refused.value) for part in ("s3", "cret", "cr:", "et@"))


@pytest.mark.parametrize(
    "url",
    ["sqlite:///a@b.db", "postgresql://me@host/my@db", "mysql+pymysql://h/d", "postgresql://u:p%40q@[::1]:5432/d"],
)
def test_addresses_that_can_be_used_pass(url: str) -> None:
    check_url(url)
