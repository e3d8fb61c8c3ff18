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
