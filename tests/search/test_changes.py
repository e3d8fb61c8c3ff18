"""What a study may change between two runs: rows hold where nothing they depend on changed, else it is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import optuna
import pytest
from conftest import Bench, Notes, wait_until

from autotune.errors import UserError
from autotune.profiling.hosts import Hosts
from autotune.results.table import read_csv
from autotune.search.identity import Changes, changes

SMALL = "schedule: [1f1b, zb-h1]"


@pytest.fixture
def small(bench: Bench) -> Bench:
    """Three legal plans: no pipeline, 1f1b and zb-h1 at pp 2."""
    bench.edit_space("pp: [1, 2, 4]", "pp: [1, 2]")
    bench.edit_space("tp: [1, 3]", "tp: [1]")
    bench.edit_space("schedule: [1f1b, interleaved-1f1b, zb-h1, v-min]", SMALL)
    return bench


def test_widened_lists_keep_every_row_and_measure_what_is_new(small: Bench) -> None:
    small.here()
    before = {row["fingerprint"]: row for row in small.table()}
    small.edit_space(SMALL, "schedule: [1f1b, zb-h1, v-min]")
    small.edit_space("micro_batch_size: [2]", "micro_batch_size: [2, 4]")
    notes = Notes()
    result = small.here(notes, resume=True)
    assert result.ended == "complete"
    assert len(small.launches()) == len(set(small.launches())) == result.legal == 8
    after = {row["fingerprint"]: row for row in small.table()}
    assert all(after[fingerprint]["started"] == row["started"] for fingerprint, row in before.items())
    assert "search.schedule: ['1f1b', 'zb-h1'] -> ['1f1b', 'zb-h1', 'v-min']" in notes
    # The lists as they are now are the study's: the next resume has nothing to say of them.
    again = Notes()
    small.here(again, resume=True)
    assert "search lists changed" not in again
    assert len(small.launches()) == 8


def test_narrowed_lists_keep_rows_that_left_the_space_out_of_the_table_until_they_are_back(small: Bench) -> None:
    small.here()
    small.edit_space(SMALL, "schedule: [1f1b]")
    notes = Notes()
    result = small.here(notes, resume=True)
    assert [row["schedule"] for row in small.table()] == ["1f1b", "1f1b"]
    assert result.legal == result.evaluated == 2
    assert "1 measured plans are no longer in the space" in notes
    small.edit_space("schedule: [1f1b]", SMALL)
    small.here(resume=True)
    assert small.states() == {"ok": 3}
    assert len(small.launches()) == 3


def test_another_memory_limit_judges_rows_anew_if_they_are_adopted_and_launches_nothing(small: Bench) -> None:
    small.tell_worker({"when": {"schedule": "zb-h1"}, "do": "succeed", "peak": 2 << 20})
    small.here(refuse_by_estimate=False)
    assert small.states() == {"ok": 2, "oom": 1}
    small.edit_space("memory_limit: 1MiB", "memory_limit: 4MiB")
    with pytest.raises(UserError, match=r"(?s)memory_limit_bytes: 1048576 -> 4194304.*--adopt takes over the rows"):
        small.here(resume=True)
    small.here(resume=True, adopt=True)
    assert small.states() == {"ok": 3}
    small.edit_space("memory_limit: 4MiB", "memory_limit: 1001B")
    result = small.here(resume=True, adopt=True, refuse_by_estimate=False)
    assert result.best is None
    # Of 4 ranks the last peaks at 1003 bytes, 2 over this limit.
    assert {row["reason"].split(" on ")[0] for row in small.table() if row["schedule"] == "1f1b"} == {
        "peaked at 1003 bytes, 2 bytes over the limit of 1001"
    }
    assert small.states() == {"oom": 3}
    assert len(small.launches()) == 3


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("layers: 8", "layers: 16", "model.layers"),
        ("global_batch_size: 16", "global_batch_size: 32", "training.global_batch_size"),
    ],
)
def test_where_no_row_can_hold_adoption_says_so(small: Bench, old: str, new: str, named: str) -> None:
    small.here(trials=1)
    before = (small.study / "trials.csv").read_bytes()
    small.edit_space(old, new)
    small.edit_space("memory_limit: 1MiB", "memory_limit: 2MiB")
    with pytest.raises(UserError) as told:
        small.here(resume=True, adopt=True)
    assert f"no row can be taken over by --adopt: what is measured depends on {named}" in str(told.value)
    assert "--fresh" in str(told.value)
    assert (small.study / "trials.csv").read_bytes() == before


def test_differences_are_sorted_by_what_follows_from_them() -> None:
    stored = {"fidelity": "run", "model.layers": 8, "search.pp": [1], "cluster.memory_limit_bytes": 1, "clock": "wall"}
    predictor = {f"predictor.value{number}": number for number in range(40)}
    found = changes(stored, {**predictor, **stored, "model.layers": 9, "search.pp": [2], "clock": "virtual"})
    assert found.others == (
        "clock: 'wall' -> 'virtual'",
        "model.layers: 8 -> 9",
        "the predictor changed: 40 values",
    )
    assert found.lists == ("search.pp: [1] -> [2]",)
    assert found.harmless == ()


def test_beside_another_fidelity_nothing_else_is_told() -> None:
    stored = {"fidelity": "run", "worker.starter": "none", "search.pp": [1], "clock": "wall"}
    found = changes(stored, {"fidelity": "predict", "worker.starter": "torchrun", "search.pp": [2]})
    assert found == Changes(others=("fidelity: 'run' -> 'predict'",))


def test_a_refusal_of_harmless_changes_does_not_speak_of_another_study(small: Bench) -> None:
    small.here(trials=1)
    small.edit_space("memory_limit: 1MiB", "memory_limit: 4MiB")
    with pytest.raises(UserError, match="began with other values, so its results aren't continued unasked") as told:
        small.here(resume=True)
    assert "something else" not in str(told.value)


def test_nodes_that_cannot_be_reached_leave_nothing_behind_and_delete_nothing(
    small: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise UserError("node nohost can't be reached")

    monkeypatch.setattr("autotune.profiling.node_check._ask", unreachable)
    before = everything_in(small.path)
    with pytest.raises(UserError, match="nohost"):
        small.here(hosts=Hosts(("nohost",)))
    assert everything_in(small.path) == before
    small.study.mkdir(parents=True)
    with pytest.raises(UserError, match="nohost"):
        small.here(hosts=Hosts(("nohost",)), storage=f"sqlite:///{small.path / 'x.db'}")
    assert everything_in(small.path) - before == {"results", "results/tiny"}
    small.here(trials=1)
    done = everything_in(small.path)
    with pytest.raises(UserError, match="nohost"):
        small.here(hosts=Hosts(("nohost",)), fresh=True)
    assert everything_in(small.path) == done


def test_a_fresh_start_whose_database_refuses_deletes_nothing(small: Bench) -> None:
    small.here(trials=1)
    done = everything_in(small.path)
    pytest.importorskip("psycopg")
    with pytest.raises(UserError, match="refused"):
        small.here(fresh=True, storage="postgresql://nobody@127.0.0.1:1/none")
    assert everything_in(small.path) == done


def test_a_fresh_start_deletes_no_database_that_a_search_in_another_folder_uses(small: Bench) -> None:
    small.here(trials=1)
    done = everything_in(small.study)
    storage = f"sqlite:///{small.study / 'study.db'}"
    small.tell_worker({"do": "sleep"})
    # The same study, joined from a folder elsewhere.
    joined = small.start("--resume", "--results-dir", "elsewhere", "--storage", storage)
    wait_until(lambda: len(small.launches()) == 2, limit_s=60)
    with pytest.raises(UserError, match=f"another search .process {joined.pid}.* is running on this study"):
        small.here(fresh=True)
    joined.kill()
    joined.communicate()
    assert done <= everything_in(small.study)
    # Another study in the same file, which is over.
    small.tell_worker()
    small.here(trials=1, storage=storage, folder=small.path / "results" / "other")
    with pytest.raises(UserError, match=r"also holds other studies \('other'\).*give this search another --name"):
        small.here(fresh=True)
    assert done <= everything_in(small.study)
    small.here(trials=1, resume=True)


@pytest.mark.parametrize("elsewhere", [True, False])
def test_a_fresh_start_leaves_nothing_of_the_study_before(small: Bench, elsewhere: bool) -> None:
    database = small.path / "elsewhere.db" if elsewhere else small.study / "study.db"
    storage = f"sqlite:///{database}"
    small.here(trials=2, storage=storage)
    small.here(trials=1, storage=storage, fresh=True)
    assert sum(row.state == "ok" for row in read_csv(small.study / "trials.csv")) == 1
    assert (small.study / "study.db").exists() != elsewhere


def test_a_start_that_failed_at_its_space_file_leaves_an_empty_folder_empty(
    small: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise UserError("no space left")

    small.study.mkdir(parents=True)
    monkeypatch.setattr("autotune.search.folder.StudyFolder.write_text", full)
    with pytest.raises(UserError, match="no space left"):
        small.here()
    assert everything_in(small.study) == set()


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_a_study_of_somebody_else_under_the_same_name_is_left_alone(small: Bench, direction: str) -> None:
    url = f"sqlite:///{small.path / 'other.db'}"
    study = optuna.create_study(storage=url, study_name="tiny", direction=direction)
    study.add_trial(optuna.trial.create_trial(value=1.0))
    told = "has other objectives: minimize" if direction == "minimize" else "was not made by autotune"
    with pytest.raises(UserError, match=told):
        small.here(resume=True, storage=url)
    assert [trial.value for trial in study.get_trials()] == [1.0]
    assert not small.study.exists()


def everything_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize(
    "options",
    [
        {"storage": "postgresql://me@localhost:1/x"},
        {"storage": "sqlite:////no/such/folder/x.db"},
        {"storage": "nonsense"},
        {"storage": "oracle://me@localhost/x", "resume": True},
    ],
)
def test_a_search_that_could_not_start_leaves_nothing_behind(small: Bench, options: dict[str, object]) -> None:
    before = everything_in(small.path)
    with pytest.raises(UserError):
        small.here(**options)
    assert everything_in(small.path) == before


def test_a_refused_resume_leaves_the_folder_as_it_was(small: Bench) -> None:
    small.here(trials=1)
    (small.study / ".lock").unlink()
    before = everything_in(small.path)
    with pytest.raises(UserError, match=r"there is no sqlite:///.*typo\.db"):
        small.here(resume=True, storage=f"sqlite:///{small.path / 'typo.db'}")
    small.edit_space("layers: 8", "layers: 16")
    with pytest.raises(UserError, match=r"model\.layers"):
        small.here(resume=True)
    assert everything_in(small.path) == before


def test_claims_of_a_study_that_was_deleted_behind_our_back_do_not_haunt_the_next(small: Bench) -> None:
    url = f"sqlite:///{small.path / 'shared.db'}"
    small.here(storage=url)
    optuna.delete_study(study_name="tiny", storage=url)
    shutil.rmtree(small.study)
    result = small.here(storage=url)
    assert result.count("ok") == 3
    assert len(small.launches()) == 6
