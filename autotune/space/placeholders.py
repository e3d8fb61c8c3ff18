"""What may stand in braces in a worker's command, and how it is filled in."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

__all__ = ["PLACEHOLDERS", "WORD_LISTS", "Value", "fill_text", "fill_words", "placeholders_in", "unknown_placeholders"]

Value = str | tuple[str, ...]
"""A text, or a list of words of a command."""

PLACEHOLDERS = {
    "pp": "pipeline-parallel degree",
    "tp": "tensor-parallel degree",
    "dp": "data-parallel degree",
    "micro_batch_size": "samples of one microbatch",
    "microbatches": "microbatches of one step and data-parallel replica",
    "global_batch_size": "samples of one optimizer step",
    "sequence_length": "tokens of one sample",
    "schedule": "name of the pipeline schedule",
    "stages_per_device": "stages a device holds",
    "layer_split": "layers of every stage in model order, with commas: `2,3,3,2`",
    "recompute": "`none` or `full`",
    "devices": "devices of the plan: pp x tp x dp",
    "nnodes": "nodes of the cluster",
    "nproc": "devices of one node: ranks that a launcher starts there",
    "node_rank": "number of the node, from 0; with starter none it has the command started on every node (--hosts)",
    "hosts": "names of the nodes, with commas (--hosts); `localhost` without",
    "master_addr": "the first of them, as the others reach it",
    "port": "a TCP port that was free on the first node when the trial began",
    "warmup_steps": "optimizer steps before the measured ones",
    "measured_steps": "optimizer steps that are measured",
    "steps": "warmup_steps + measured_steps, how long the trial trains",
    "trial": "number of the trial in the study",
    "python": "the Python that runs the tuner",
    "out": "the trial's folder",
    "request": "path of `request.json`: plan, schedule, model, cluster and training",
    "plan_json": "path of `plan.json`: the plan alone",
    "result_json": "path that the reader `json` looks for a result at",
    "megatron_args": "arguments of Megatron-LM's `pretrain_gpt.py` for the plan and the model, as words",
    "torchtitan_args": "overrides of torchtitan for the plan, as words; they belong at the end of its command",
}
"""Every placeholder of a worker's command and what it stands for."""

WORD_LISTS = ("megatron_args", "torchtitan_args")
"""Placeholders that stand for several words."""

# {name} is a placeholder, {{name}} is {name} itself and ${name} is left to a shell.
_PLACEHOLDER = re.compile(r"\{\{([a-z][a-z0-9_]*)\}\}|(?<!\$)\{([a-z][a-z0-9_]*)\}")


def placeholders_in(text: str) -> tuple[str, ...]:
    """The names in braces, in their order."""
    return tuple(match[2] for match in _PLACEHOLDER.finditer(text) if match[2] is not None)


def unknown_placeholders(text: str) -> tuple[str, ...]:
    """The names in braces that stand for nothing."""
    return tuple(name for name in placeholders_in(text) if name not in PLACEHOLDERS)


def fill_words(words: tuple[str, ...], values: Mapping[str, Value]) -> tuple[str, ...]:
    """The words of a command with their placeholders filled in; a word that is a list of words becomes those.

    Raises:
        KeyError: a placeholder has no value.
    """
    filled: list[str] = []
    for word in words:
        match = _PLACEHOLDER.fullmatch(word)
        value = values[match[2]] if match and match[2] is not None else None
        if isinstance(value, tuple):
            filled += value
        else:
            filled.append(fill_text(word, values))
    return tuple(filled)


def fill_text(text: str, values: Mapping[str, Value], quoted: bool = False) -> str:
    """One text with its placeholders filled in.

    Args:
        quoted: for a shell: every word of a value is quoted.

    Raises:
        KeyError: a placeholder has no value.
    """

    def value(match: re.Match[str]) -> str:
        if match[1] is not None:
            return f"{{{match[1]}}}"
        found = values[match[2]]
        if isinstance(found, tuple):
            return shlex.join(found)
        return shlex.quote(found) if quoted else found

    return _PLACEHOLDER.sub(value, text)
