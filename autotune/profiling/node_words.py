"""What the tuner's end and a node's end of a trial say to each other: JSON lines over the remote shell's streams.

The head writes, to every node alike: first the header (one line), then `{"do": ...}`

| do | meaning |
|---|---|
| `beat` | I live; answer at once |
| `start` | all nodes are there: start the command, ranks meet at `port` |
| `stacks` | have the ranks write down where they stand |
| `progress` | count progress anew |
| `write` | write the file `name` with `text` into the launch's folder |

and closes the stream, or falls silent, for the end of everything. A node writes `{"node": N, "event": ...}`

| event | meaning |
|---|---|
| `ready` | its supervisor runs; the first node's names a free `port` |
| `refused` | it can't take part; `message` says why |
| `beat` | the answer, with its clock `at` and the `progress` of its ranks |
| `rank-failed` | the first rank of this node has failed |
| `stopped` | `ranks` that a signal has stopped, once their stacks are saved |
| `ended` | no process of its part is left; `exit_code` and `signal` of its command, `at` which moment it ended |
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["BEAT_S", "NODE_RANK", "PORT", "SILENCE_S", "Lines", "fill_tokens", "line_of"]

BEAT_S = 1.0
"""Between two beats of the head."""

SILENCE_S = 6.0
"""An end that hears nothing for so long takes the other for dead. A trial is over on all nodes within 10 s."""

PORT = "@autotune-port@"
"""Stands in a command for a port that is free on the first node, which is asked when the launch begins."""

NODE_RANK = "@autotune-node-rank@"
"""Stands in a command for the number of the node that runs it."""


class Lines:
    """Cuts what arrives in pieces into lines."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The lines that `piece` completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        return lines


def line_of(values: Mapping[str, Any]) -> bytes:
    """One message as a line."""
    return json.dumps(values).encode() + b"\n"


def fill_tokens(texts: Iterable[str], node: int, port: int) -> tuple[str, ...]:
    """`texts` with what only is known when the launch begins."""
    return tuple(text.replace(PORT, str(port)).replace(NODE_RANK, str(node)) for text in texts)
