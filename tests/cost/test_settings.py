"""Assumptions given on the command line are checked like everything a user gives."""

from __future__ import annotations

import pytest

from autotune.cost.assumptions import Assumptions
from autotune.cost.published import with_settings
from autotune.errors import UserError


def test_settings_become_values_of_their_type() -> None:
    found = with_settings(Assumptions(), "attention=unfused; sharding=none; dropout=true;dp_overlap=1;gradient_bytes=4")
    assert (found.attention, found.sharding, found.dropout, found.dp_overlap) == ("unfused", "none", True, 1.0)
    assert found.gradient_bytes == 4
    assert with_settings(found, "gradient_bytes=none").gradient_bytes is None


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("attention=foo", "flash, unfused"),
        ("sharding=true", "none, zero1, fsdp"),
        ("dropout=maybe", "true or false"),
        ("dropout=1", "true or false"),
        ("workspace_bytes=-1", "at least 0"),
        ("tp_overlap=nan", "at least 0"),
        ("nothing=1", "known"),
    ],
)
def test_a_value_an_assumption_cannot_have_is_refused_with_the_legal_ones(setting: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        with_settings(Assumptions(), setting)
