"""A layer split that torchtitan's options can't say, as a config module that wraps the user's own."""

from __future__ import annotations

import json
from collections.abc import Sequence

__all__ = ["SPLIT_MODULE", "split_module", "stage_modules"]

SPLIT_MODULE = "autotune_split"

_TEMPLATE = '''\
"""Layer split of {summary}.

torchtitan 0.3.0 loads `plan` by `--module autotune_split --config plan`: the config function BASE_CONFIG of
BASE_MODULE, with the modules of every stage set.
"""

import importlib
import os

STAGES = {stages}


def plan():
    base = os.environ["BASE_MODULE"]
    for name in (f"torchtitan.models.{{base}}.config_registry", f"{{base}}.config_registry", base):
        try:
            module = importlib.import_module(name)
            break
        except ModuleNotFoundError as error:
            if error.name is None or not f"{{name}}.".startswith(f"{{error.name}}."):
                raise
    else:
        raise SystemExit(f"BASE_MODULE {{base!r}} can't be imported")
    config = getattr(module, os.environ["BASE_CONFIG"])()
    config.parallelism.module_fqns_per_model_part = STAGES
    return config
'''


def stage_modules(layer_split: Sequence[int]) -> list[list[str]]:
    """Names of torchtitan's modules in every stage: the embedding leads the first, norm and head end the last.

    >>> stage_modules((1, 2))
    [['tok_embeddings', 'layers.0'], ['layers.1', 'layers.2', 'norm', 'lm_head']]
    """
    starts = [sum(layer_split[:stage]) for stage in range(len(layer_split))]
    stages = [
        [f"layers.{layer}" for layer in range(start, start + size)]
        for start, size in zip(starts, layer_split, strict=True)
    ]
    stages[0].insert(0, "tok_embeddings")
    stages[-1] += ["norm", "lm_head"]
    return stages


def split_module(summary: str, layer_split: Sequence[int]) -> str:
    """Text of `autotune_split.py`."""
    rows = "".join(f"    {json.dumps(names)},\n" for names in stage_modules(layer_split))
    return _TEMPLATE.format(summary=summary, stages=f"[\n{rows}]")
