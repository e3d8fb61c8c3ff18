"""What makes a resumed study another one."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.profiling.command import DEFAULT_WORKER, parse_worker
from autotune.search.identity import Changes, changes, identity
from autotune.space.space import load_space

QUICKSTART = Path(__file__).parents[2] / "search_spaces" / "quickstart.yaml"


def test_a_study_on_cpu_keeps_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    space = load_space(QUICKSTART)
    monkeypatch.setattr("autotune.search.identity.usable_cores", lambda: 2.0)
    crowded = identity(space, DEFAULT_WORKER)
    monkeypatch.setattr("autotune.search.identity.usable_cores", lambda: 8.0)
    assert changes(crowded, identity(space, DEFAULT_WORKER)) == Changes(others=("clock: 'virtual' -> 'wall'",))
    assert "clock" not in identity(space, DEFAULT_WORKER, "predict")


@pytest.mark.parametrize("command", ["train --out {out}", "train {megatron_args}"])
def test_a_worker_that_times_no_passes_is_judged_by_the_wall_clock_whatever_the_cores(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    space, worker = load_space(QUICKSTART), parse_worker(command)
    monkeypatch.setattr("autotune.search.identity.usable_cores", lambda: 2.0)
    crowded = identity(space, worker)
    monkeypatch.setattr("autotune.search.identity.usable_cores", lambda: 8.0)
    now = identity(space, worker)
    assert not changes(crowded, now)
    assert not changes({**crowded, "clock": "virtual"}, now)  # earlier versions stored one


def test_the_worker_of_this_package_keeps_its_clock_in_a_command_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapped = parse_worker("numactl python -m autotune.profiling.worker --request {request} --out {out}")
    monkeypatch.setattr("autotune.search.identity.usable_cores", lambda: 2.0)
    assert identity(load_space(QUICKSTART), wrapped)["clock"] == "virtual"


def test_one_node_that_is_named_is_as_good_as_none() -> None:
    space = load_space(QUICKSTART)
    alone = identity(space, DEFAULT_WORKER)
    assert not changes(alone, identity(space, DEFAULT_WORKER, nodes=1))
    assert not changes({**alone, "nodes": 1}, alone)  # earlier versions stored it
    assert "nodes: (not there) -> 2" in changes(alone, identity(space, DEFAULT_WORKER, nodes=2)).others
