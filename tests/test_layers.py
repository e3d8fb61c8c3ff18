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


def source_of(module: str) -> Path | None:
    """The file of a module of the package; None when `module` names no module (but, say, a function of one)."""
    path = PACKAGE.parent.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


def loaded_with(start: Path) -> set[Path]:
    """Files of the package that importing every module of the folder `start` can load, those in functions too.

    An import of `a.b.c` runs the packages `a` and `a.b` as well; `from a import b` may mean a module b. A file beside
    it whose name it spells out (`rank_entry.py`) is a script it starts.
    """
    found = set()
    waiting = sorted(start.rglob("*.py"))
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {module for module, _ in imports(path, typing_too=False)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in names:
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith(".py"):
                waiting += [script for script in (path.parent / node.value,) if script.is_file()]
        for name in names:
            parts = name.split(".")
            if parts[0] == "autotune":
                prefixes = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
                waiting += [file for prefix in prefixes if (file := source_of(prefix)) is not None]
    return found


def test_nothing_that_the_tuner_loads_imports_torch() -> None:
    files = loaded_with(PACKAGE / "search")
    wrong = [
        f"{path}:{line}: {module}"
        for path in sorted(files)
        for module, line in imports(path, typing_too=False)
        if module.split(".")[0] == "torch" or (path.parent.name == "profiling" and module.split(".")[0] in HEAVY)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_tuner_side_reaches_the_launcher_but_not_the_worker() -> None:
    loaded = {path.stem for path in loaded_with(PACKAGE / "search") if path.parent.name == "profiling"}
    assert {"launcher", "pool", "supervisor", "rank_entry", "process_tree"} <= loaded
    assert not {"worker", "mesh", "device"} & loaded


def test_a_module_that_search_comes_to_import_is_looked_at(tmp_path: Path) -> None:
    folder = tmp_path / "tuner"
    folder.mkdir()
    (folder / "new.py").write_text("def later():\n    from autotune.profiling import worker\n")
    assert PACKAGE / "profiling" / "worker.py" in loaded_with(folder)
    (folder / "new.py").write_text("if TYPE_CHECKING:\n    from autotune.profiling import worker\n")
    assert loaded_with(folder) == {folder / "new.py"}


def test_every_folder_of_the_package_is_a_known_layer() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders == set().union(*LAYERS)
