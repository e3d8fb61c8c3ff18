"""Text of others, such as a rank's last words, made fit to be shown: nothing in it commands a terminal."""

from __future__ import annotations

import re

__all__ = ["first_line", "printable"]

# Sequences as a whole: colours and cursor (CSI), titles and links (OSC and its kin), then single escapes.
_SEQUENCES = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"
    r"|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|\x1b[ -/]*[0-~]"
)
# What is left of control characters; single surrogates, which no encoding holds; marks that turn the order of text.
_UNSHOWABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """`text` without terminal sequences, other control characters written out (`\\x07`); line breaks and tabs stay."""
    text = _SEQUENCES.sub("", text.replace("\r\n", "\n"))
    return _UNSHOWABLE.sub(lambda match: _escaped(ord(match[0])), text)


def first_line(text: str) -> str:
    """What a reason begins with: its other lines may quote a whole traceback."""
    return text.split("\n", 1)[0].rstrip()


def _escaped(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
