"""Imports go down only, and what must start fast imports nothing heavy."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "autotune"
# Each layer may import itself and the layers listed after it, as docs/architecture.md draws them.
LAYERS = ({"search", "report"}, {"export"}, {"profiling"}, {"results"}, {"cost"}, {"space"}, {"schedules"})
LIGHT = ("schedules", "space", "cost")
HEAVY = ("torch", "optuna", "pandas")
# Parts of `profiling` that run in the tuner, which never loads torch.
TUNER_SIDE = (
    "command",
    "launcher",
    "pool",
    "supervised",
    "supervisor",
    "process_tree",
    "watch",
    "heartbeat",
    "rank_entry",
    "protocol",
    "assess",
    "attempts",
    "cause",
    "log_lines",
    "log_reader",
    "outcome",
    "rank_files",
    "result_file",
    "virtual_clock",
    "cores",
)


def imports(path: Path, typing_too: bool = True) -> Iterator[tuple[str, int]]:
    """(module, line) of every import in a file; `if TYPE_CHECKING` blocks are left out if asked."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    skipped: set[int] = set()
    if not typing_too:
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                skipped |= {id(inner) for statement in node.body for inner in ast.walk(statement)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield (node.module or "", node.lineno)


def rank(layer: str) -> int:
    return next(index for index, layers in enumerate(LAYERS) if layer in layers)


def modules(layer: str) -> list[Path]:
    return sorted((PACKAGE / layer).rglob("*.py"))


@pytest.mark.parametrize("layer", sorted(set().union(*LAYERS)))
def test_imports_go_down_only(layer: str) -> None:
    wrong = []
    for path in modules(layer):
        for module, line in imports(path):
            parts = module.split(".")
            if parts[0] != "autotune" or len(parts) == 1:
                continue
            other = parts[1]
            if other.startswith("cli"):
                wrong.append(f"{path}:{line}: {module}")
            elif other in set().union(*LAYERS) and other != layer and rank(other) <= rank(layer):
                # search and report stand side by side: only types may cross
                sideways = rank(other) == rank(layer) and (module, line) not in set(imports(path, typing_too=False))
                if not sideways:
                    wrong.append(f"{path}:{line}: {module}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("layer", LIGHT)
def test_light_layers_never_import_torch_optuna_or_pandas(layer: str) -> None:
    wrong = [
        f"{path}:{line}: {module}"
        for path in modules(layer)
        for module, line in imports(path)
        if module.split(".")[0] in HEAVY
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", TUNER_SIDE)
def test_tuner_side_of_profiling_never_imports_torch(name: str) -> None:
    found = [module for module, _ in imports(PACKAGE / "profiling" / f"{name}.py") if module.split(".")[0] in HEAVY]
    assert not found


def test_every_folder_of_the_package_is_a_known_layer() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders == set().union(*LAYERS)
