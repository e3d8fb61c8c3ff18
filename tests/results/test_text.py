"""What others wrote is shown without letting it speak to the terminal."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.results.text import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m and \x1b[2J\x1b[Hcleared", "red and cleared"),
        ("\x1b]0;new title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1bPqsixel\x1b\\after", "after"),
        ("bell\x07, back\x08, null\x00, \x9b31mC1", "bell\\x07, back\\x08, null\\x00, \\x9b31mC1"),
        ("over\rwritten, two\r\nlines\tand a tab", "over\\x0dwritten, two\nlines\tand a tab"),
        ("half \ud83d a pair, \u202eright to left", "half \\ud83d a pair, \\u202eright to left"),
        ("broken off \x1b[3", "broken off 3"),
        ("e\u0301, \U0001f4a5, Ж, 日本", "e\u0301, \U0001f4a5, Ж, 日本"),
    ],
)
def test_sequences_vanish_and_controls_are_written_out(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(st.characters(codec=None, exclude_categories=[]) | st.sampled_from("\x1b[]\x9b\x07\\m")))
def test_nothing_that_commands_a_terminal_is_left(text: str) -> None:
    left = printable(text)
    assert all(unicodedata.category(c) not in ("Cc", "Cs") or c in "\n\t" for c in left)
    assert printable(left) == left
    left.encode("utf-8")
