"""What is read from disk is data, never code; no shell runs what nobody asked one to run."""

from __future__ import annotations

import ast
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from autotune.errors import UserError
from autotune.profiling.command import parse_worker
from autotune.space.yaml_reader import read_yaml

PACKAGE = Path(__file__).parents[1] / "autotune"
SOURCES = sorted(PACKAGE.rglob("*.py"))
# Modules that run what they read, and calls that do.
CODE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "runpy", "imp"}
CODE_CALLS = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "subprocess.getoutput"),
    *("torch.load", "torch.jit.load", "torch.package.PackageImporter", "numpy.load", "np.load"),
    *(
        "pandas.read_pickle",
        "pd.read_pickle",
        "pandas.read_hdf",
        "dist.all_gather_object",
        "dist.broadcast_object_list",
    ),
    *("yaml.load", "yaml.load_all", "yaml.full_load", "yaml.unsafe_load"),
}


def calls(tree: ast.AST) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def imported(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_reads_code_from_disk_or_calls_a_shell(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not imported(tree) & CODE_MODULES
    assert not calls(tree) & CODE_CALLS
    keywords = [node for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg == "shell"]
    assert not [k for k in keywords if isinstance(k.value, ast.Constant) and k.value.value is True]
    assert "allow_pickle" not in path.read_text(encoding="utf-8")


def test_the_checks_above_see_what_they_look_for() -> None:
    tree = ast.parse("import pickle\nfrom torch import nn\ntorch.load('x')\nyaml.load(text)\n")
    assert imported(tree) & CODE_MODULES == {"pickle"}
    assert calls(tree) & CODE_CALLS == {"torch.load", "yaml.load"}


@pytest.mark.parametrize(
    "tag", ["python/object/apply:os.system ['touch {}']", "python/name:os.system", "python/module:os"]
)
def test_space_file_runs_nothing(tmp_path: Path, tag: str) -> None:
    space, trace = tmp_path / "space.yaml", tmp_path / "trace"
    space.write_text(f"name: !!{tag.format(trace)}\n")
    with pytest.raises(UserError, match="not valid YAML"):
        read_yaml(space)
    assert not trace.exists()
    assert issubclass(yaml.SafeLoader, yaml.constructor.SafeConstructor)


def test_worker_command_is_words_and_no_shell_text(tmp_path: Path) -> None:
    words = parse_worker("echo $HOME; touch x && `id` | cat > y").argv
    assert words == ("echo", "$HOME;", "touch", "x", "&&", "`id`", "|", "cat", ">", "y")
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.startswith("$HOME; touch x &&")
    assert os.listdir(tmp_path) == []
