"""What makes a resumed study another one."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import Bench

from autotune.errors import UserError
from autotune.profiling.command import DEFAULT_WORKER, parse_worker
from autotune.search.identity import Changes, changes, identity
from autotune.search.sealed import SALT, sealed
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


WITH_SECRET = replace(parse_worker("train {megatron_args}"), env=(("TOKEN", "1234"), ("OTHER", "1234")))


def about(**env: str) -> dict[str, Any]:
    return identity(load_space(QUICKSTART), replace(WITH_SECRET, env=tuple(env.items())))


def test_a_secret_of_the_worker_s_environment_is_in_no_study_and_two_studies_have_different_digests_of_it() -> None:
    one, other = (sealed(identity(load_space(QUICKSTART), WITH_SECRET)) for _ in range(2))
    assert "1234" not in json.dumps([value for name, value in one.items() if name.startswith("worker.env.")])
    digests = [one["worker.env.TOKEN"], one["worker.env.OTHER"], other["worker.env.TOKEN"]]
    assert len(set(digests)) == 3
    plain = hashlib.sha256(b"1234").hexdigest()
    assert not any(plain[:16] in digest for digest in digests)
    assert "1234" not in repr(about(TOKEN="1234")["worker.env.TOKEN"])


def test_environment_is_compared_by_the_salt_of_the_study_and_what_changed_is_named() -> None:
    stored = json.loads(json.dumps(sealed(about(TOKEN="1234", OTHER="a"))))
    assert not changes(stored, sealed(about(TOKEN="1234", OTHER="a"), stored))
    changed = changes(stored, sealed(about(TOKEN="4321", OTHER="a"), stored))
    assert changed == Changes(others=("worker.env.TOKEN: another value",))
    now = about(OTHER="a", MORE="b")
    assert changes(stored, sealed(now, stored)).others == (
        "worker.env.MORE: (not there) -> (a value)",
        "worker.env.TOKEN: (a value) -> (not there)",
    )
    nothing = sealed(about(), stored)
    assert len(changes(stored, nothing).others) == 2
    assert len(changes(nothing, sealed(about(TOKEN="1"), nothing)).others) == 1


def test_a_study_whose_digests_have_no_salt_goes_on() -> None:
    digest = f"sha256:{hashlib.sha256(b'1234').hexdigest()[:16]}"
    earlier = sealed(about()) | {"worker.env.TOKEN": digest}
    assert not changes(earlier, sealed(about(TOKEN="1234"), earlier))
    assert changes(earlier, sealed(about(TOKEN="4321"), earlier)).others == ("worker.env.TOKEN: another value",)


def test_a_study_whose_digests_have_no_salt_is_resumed_and_gets_one_when_its_lists_change(bench: Bench) -> None:
    words = bench.search_command()
    worker = replace(parse_worker(words[words.index("--worker") + 1], "none"), env=(("TOKEN", "1234"),))
    digest = f"sha256:{hashlib.sha256(b'1234').hexdigest()[:16]}"

    def stored() -> dict[str, Any]:
        with closing(sqlite3.connect(bench.study / "study.db")) as connection:
            return json.loads(connection.execute("SELECT identity FROM autotune_studies").fetchone()[0])  # type: ignore[no-any-return]

    bench.here(worker=worker, trials=1)
    earlier = {name: value for name, value in stored().items() if name != SALT} | {"worker.env.TOKEN": digest}
    with closing(sqlite3.connect(bench.study / "study.db")) as connection, connection:
        connection.execute("UPDATE autotune_studies SET identity = ?", (json.dumps(earlier),))
    bench.here(worker=worker, trials=2, resume=True)
    assert stored() == earlier
    with pytest.raises(UserError, match=r"worker\.env\.TOKEN: another value"):
        bench.here(worker=replace(worker, env=(("TOKEN", "4321"),)), trials=3, resume=True)
    bench.edit_space("micro_batch_size: [2]", "micro_batch_size: [2, 1]")
    bench.here(worker=worker, trials=3, resume=True)
    assert stored()["worker.env.TOKEN"] != digest
    bench.here(worker=worker, trials=4, resume=True)
    assert len(bench.launches()) == 4
