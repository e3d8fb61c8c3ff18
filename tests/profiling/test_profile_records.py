"""Stages of any depth from two that were measured, and the cache they are kept in."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.profiling import profile_cache
from autotune.profiling.host_fit import fit_host
from autotune.profiling.profile_cache import _MEASURED, ProfileCache, default_cache_folder, fingerprint
from autotune.profiling.profile_records import DeviceFigures, PassFigures, StageFigures, device_at, stage_at
from autotune.space.model import ModelSpec

MODEL = ModelSpec(
    layers=4, hidden=16, heads=2, kv_heads=2, head_dim=8, ffn_hidden=32, vocab=50, sequence_length=8, name="one"
)


def stage(seconds: float, held: float, peak: float) -> StageFigures:
    item = PassFigures(seconds, peak, 2 * seconds, 4 * seconds)
    return StageFigures({"F": item, "BW": item}, held, 0.0, 1.0)


def test_stage_is_a_line_over_its_layers() -> None:
    measured = {1: stage(1.0, 10.0, 7.0), 3: stage(2.0, 26.0, 7.0)}
    assert stage_at(1, measured) is measured[1]
    assert stage_at(2, measured).passes["F"].seconds == pytest.approx(1.5)
    deep = stage_at(11, measured)
    assert deep.passes["BW"] == PassFigures(6.0, 7.0, 12.0, 24.0)
    assert deep.held_bytes == pytest.approx(90.0)


def test_peak_of_a_pass_does_not_grow_beyond_the_depths_measured() -> None:
    falling = {1: stage(1.0, 1.0, 9.0), 3: stage(1.0, 1.0, 5.0)}
    assert stage_at(2, falling).passes["F"].peak_bytes == 9.0
    assert stage_at(20, falling).passes["F"].peak_bytes == 5.0


def test_peak_that_grows_with_the_layers_goes_on_growing() -> None:
    growing = {1: stage(1.0, 1.0, 9.0), 2: stage(1.0, 1.0, 12.0), 3: stage(1.0, 1.0, 16.0)}
    assert stage_at(2, growing) is growing[2]
    assert stage_at(8, growing).passes["F"].peak_bytes == 36.0


def test_noise_never_makes_a_time_negative() -> None:
    assert stage_at(40, {1: stage(1.0, 1.0, 0.0), 3: stage(0.9, 1.0, 0.0)}).passes["F"].seconds == 0.0


def test_device_is_a_line_over_its_layers() -> None:
    values = {field.name: 2.0 for field in dataclasses.fields(DeviceFigures)}
    low = DeviceFigures(**values)
    high = DeviceFigures(**dict.fromkeys(values, 6.0))
    assert device_at(5, {1: low, 3: high}) == DeviceFigures(**dict.fromkeys(values, 10.0))
    assert device_at(5, {1: low, 3: high}).lasting_bytes == 30.0


def test_stages_are_read_back_as_they_were_written() -> None:
    figures = stage(1.5, 2.5, 3.5)
    assert StageFigures.from_dict(figures.to_dict()) == figures


def test_host_cost_is_found_in_what_calls_and_bytes_cost() -> None:
    samples = [(calls, size, 3e-4 * calls + 2e-9 * size) for calls, size in ((4, 1e5), (5, 9e5), (7, 2e6), (1, 4e6))]
    host = fit_host(samples)
    assert host.call_s == pytest.approx(3e-4)
    assert host.byte_s == pytest.approx(2e-9)
    assert host.seconds(10, 1e6) == pytest.approx(5e-3)


def test_host_cost_is_never_negative() -> None:
    host = fit_host([(1.0, 1e6, 1e-3), (2.0, 1e6, 5e-4), (3.0, 1e6, 1e-4)])
    assert host.call_s >= 0
    assert host.byte_s >= 0
    nothing = fit_host([(1.0, 1e6, -1e-3)])
    assert (nothing.call_s, nothing.byte_s) == (0.0, 0.0)


def test_fingerprint_knows_what_decides_the_numbers() -> None:
    key = {"tp": 1, "layers": 3}
    mine = fingerprint(key, MODEL, "float32", "cpu")
    assert mine == fingerprint(dict(key), dataclasses.replace(MODEL, name="two", layers=9), "float32", "cpu")
    others = [
        fingerprint({"tp": 2, "layers": 3}, MODEL, "float32", "cpu"),
        fingerprint(key, dataclasses.replace(MODEL, hidden=32), "float32", "cpu"),
        fingerprint(key, MODEL, "bfloat16", "cpu"),
        fingerprint(key, MODEL, "float32", "h100"),
    ]
    assert len({mine, *others}) == 5


def test_cache_keeps_records_and_forgives_damage(tmp_path: Path) -> None:
    cache = ProfileCache(tmp_path / "deep" / "folder")
    assert cache.load("ab12") is None
    cache.store("ab12", {"x": 1.25})
    assert ProfileCache(tmp_path / "deep" / "folder").load("ab12") == {"x": 1.25}
    (file,) = (tmp_path / "deep").rglob("ab12.json")
    file.write_text('{"x": 1.', encoding="utf-8")
    assert cache.load("ab12") is None
    assert [path.name for path in file.parent.iterdir()] == ["ab12.json"]


def test_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    with pytest.raises(UserError, match="cannot write the profile cache"):
        ProfileCache(tmp_path / "file").store("ab", {})


def test_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AUTOTUNE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_folder() == tmp_path / "autotune"
    monkeypatch.setenv("AUTOTUNE_CACHE", str(tmp_path / "own"))
    assert default_cache_folder() == tmp_path / "own"


@pytest.mark.parametrize("module", ["autotune.profiling.profile_plan", "autotune.cli_calibrate"])
def test_tuner_profiles_without_loading_torch(module: str) -> None:
    code = f"import {module}, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_module_whose_work_is_measured_counts_in_the_fingerprint() -> None:
    folder = Path(profile_cache.__file__).parent
    # What no figure depends on: types, the reading of questions and errors, and how many cores there are (hardware).
    beside = {"cores", "failure", "profile_server", "protocol"}

    def imported(module: str) -> set[str]:
        tree = ast.parse((folder / f"{module}.py").read_text(encoding="utf-8"))
        names = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
        return {name.rpartition(".")[2] for name in names if name.startswith("autotune.profiling.")}

    found, waiting = set(), ["profile_server", "host_cost"]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting.extend(imported(module))
    assert found - beside <= set(_MEASURED)
    assert set(_MEASURED) <= found
