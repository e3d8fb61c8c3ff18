"""A study survives what can happen to its tuner, and is never continued as something it isn't."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from conftest import FAKE, LEGAL, REFUSED, Bench, wait_until

from autotune.errors import UserError
from autotune.search.folder import StudyFolder


def workers(bench: Bench) -> list[int]:
    """Living processes of the fake worker that were started for this bench."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if str(FAKE) in line and any(str(bench.path) in word for word in line):
            found.append(process.pid)
    return found


@pytest.mark.ranks
def test_after_kill_9_no_rank_lives_and_resume_measures_each_plan_once(bench: Bench) -> None:
    bench.edit_space("pp: [1, 2, 4]", "pp: [1, 2]")
    bench.edit_space("interleaved-1f1b, zb-h1, v-min", "zb-h1")
    bench.tell_worker({"when": {"schedule": "zb-h1"}, "do": "sleep", "deaf": True, "daemon": True})
    tuner = bench.start(launcher="torchrun")
    wait_until(lambda: bool(list(bench.study.glob("logs/*/pid-daemon-3"))), limit_s=60)
    assert workers(bench)
    tuner.kill()
    tuner.wait()
    killed = time.monotonic()
    wait_until(lambda: not workers(bench), limit_s=10)
    assert time.monotonic() - killed < 10
    in_flight = bench.launches()[-1]
    bench.tell_worker()
    done = bench.search("--resume", launcher="torchrun")
    assert done.returncode == 0, done.stderr
    counts = {plan: bench.launches().count(plan) for plan in bench.launches()}
    assert len(counts) == 3
    assert [plan for plan, count in counts.items() if count > 1] == [in_flight]
    assert bench.states() == {"ok": 3, "refused": 3}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_interrupt_ends_the_trial_writes_the_table_and_tells_by_its_exit_code(
    bench: Bench, number: int, code: int
) -> None:
    bench.tell_worker({"when": {"schedule": "zb-h1", "pp": 2}, "do": "sleep"})
    tuner = bench.start()
    wait_until(lambda: len(bench.launches()) == 4)
    os.kill(tuner.pid, number)
    out, err = tuner.communicate(timeout=20)
    assert tuner.returncode == code, err
    assert "--resume goes on" in out
    assert "Traceback" not in err
    assert not workers(bench)
    assert bench.states() == {"ok": 3, "predicted": LEGAL - 3, "refused": REFUSED}
    waiting = {row["reason"] for row in bench.table() if row["state"] == "predicted"}
    assert waiting == {"not run: the search was interrupted"}
    if number == signal.SIGINT:
        bench.tell_worker()
        assert bench.search("--resume").returncode == 0
        assert bench.states() == {"ok": LEGAL, "refused": REFUSED}
        assert len(bench.launches()) == LEGAL + 1


def test_existing_study_is_neither_continued_nor_deleted_unasked(bench: Bench) -> None:
    bench.search("--trials", "1")
    before = (bench.study / "trials.csv").read_bytes()
    done = bench.search()
    assert done.returncode == 2
    assert "--resume" in done.stderr
    assert "--fresh" in done.stderr
    assert (bench.study / "trials.csv").read_bytes() == before
    assert len(bench.launches()) == 1


def test_fresh_deletes_the_study_and_nothing_else(bench: Bench) -> None:
    bench.search("--trials", "3")
    (bench.study / "notes.txt").write_text("mine")
    assert bench.search("--trials", "1", "--fresh").returncode == 0
    assert (bench.study / "notes.txt").read_text() == "mine"
    assert bench.states() == {"ok": 1, "predicted": LEGAL - 1, "refused": REFUSED}
    assert not (bench.study / "logs" / "trial-0001").exists()


def test_resume_refuses_a_study_about_something_else_and_names_it(bench: Bench) -> None:
    bench.search("--trials", "1")
    before = (bench.study / "trials.csv").read_bytes()
    for old, new, named in (
        ("layers: 8", "layers: 16", "model.layers: 8 -> 16"),
        ("global_batch_size: 16", "global_batch_size: 32", "training.global_batch_size: 16 -> 32"),
        ("1MiB", "2MiB", "cluster.memory_limit_bytes: 1048576 -> 2097152"),
    ):
        bench.edit_space(old, new)
        done = bench.search("--resume")
        bench.edit_space(new, old)
        assert done.returncode == 2
        assert named in done.stderr
    done = bench.search("--resume", launcher="torchrun")
    assert "worker.starter: 'none' -> 'torchrun'" in done.stderr
    assert (bench.study / "trials.csv").read_bytes() == before


def test_table_without_its_database_is_not_overwritten(bench: Bench) -> None:
    bench.search("--trials", "1")
    (bench.study / "study.db").unlink()
    before = (bench.study / "trials.csv").read_bytes()
    done = bench.search("--resume")
    assert done.returncode == 2
    assert "study.db is not" in done.stderr
    assert (bench.study / "trials.csv").read_bytes() == before


def test_fresh_deletes_nothing_where_no_study_was_begun(bench: Bench) -> None:
    (bench.study / "logs").mkdir(parents=True)
    (bench.study / "logs" / "mine.txt").write_text("mine")
    assert bench.search("--fresh", "--trials", "1").returncode == 0
    assert (bench.study / "logs" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("start", [["--fresh"], ["--resume", "--storage", "sqlite:///other.db"]])
def test_what_a_lost_study_left_is_not_the_result_of_another(bench: Bench, start: list[str]) -> None:
    bench.tell_worker({"do": "succeed", "step_s": 0.001})
    bench.search("--trials", "2")
    assert bench.states()["ok"] == 2
    for name in ("study.db", "trials.csv"):
        (bench.study / name).unlink()
    bench.edit_space("layers: 8", "layers: 16")
    bench.tell_worker({"do": "silent"})
    done = bench.search("--trials", "2", *start)
    assert done.returncode == 1, done.stderr
    tried = [row for row in bench.table() if row["trial"]]
    assert [(row["state"], row["step_time_s"]) for row in tried] == [("no-result", "")] * 2


def test_clear_cut_short_leaves_a_study_that_can_be_cleared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = StudyFolder(tmp_path / "study")
    (folder.logs / "trial-0000").mkdir(parents=True)
    (folder.logs / "trial-0000" / "rank-0.json").write_text("{}")
    (folder.logs / "trial-mine").mkdir()
    (tmp_path / "mine").mkdir()
    (folder.logs / "trial-0001").symlink_to(tmp_path / "mine")
    for path in (folder.database, folder.csv, folder.space):
        path.write_text("")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda self, missing_ok=False: (_ for _ in ()).throw(OSError(5, "cut short")))
        with pytest.raises(UserError, match="cut short"):
            folder.clear()
    assert folder.holds_study()
    assert not (folder.logs / "trial-0000").exists()
    folder.clear()
    assert not folder.holds_study()
    assert (folder.logs / "trial-mine").is_dir()
    assert (tmp_path / "mine").is_dir()


def test_resume_of_nothing_begins_the_study(bench: Bench) -> None:
    assert bench.search("--resume", "--trials", "1").returncode == 0
    assert len(bench.launches()) == 1


def test_damaged_study_file_is_named_and_left_as_it_is(bench: Bench) -> None:
    bench.search("--trials", "1")
    database = bench.study / "study.db"
    database.write_bytes(b"this is not a database, it is a poem" * 100)
    before = database.read_bytes()
    done = bench.search("--resume")
    assert done.returncode == 2
    assert str(database) in done.stderr
    assert database.read_bytes() == before


def test_study_in_another_database_is_resumed_and_its_password_never_shown(bench: Bench) -> None:
    url = f"sqlite:///{bench.path / 'elsewhere.db'}"
    assert bench.search("--storage", url, "--trials", "2").returncode == 0
    assert not (bench.study / "study.db").exists()
    assert bench.search("--storage", url, "--resume", "--trials", "3").returncode == 0
    assert len(bench.launches()) == 3
    done = bench.search("--storage", "postgresql://me:topsecret@localhost:1/x", "--name", "other")
    assert done.returncode == 2
    assert "topsecret" not in done.stdout + done.stderr


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_read_only_results_folder_is_an_error_in_words(bench: Bench) -> None:
    (bench.path / "results").mkdir(mode=0o555)
    done = bench.search()
    assert done.returncode == 2
    assert "Permission denied" in done.stderr


def test_results_folder_that_is_a_file_is_an_error_in_words(bench: Bench) -> None:
    (bench.path / "results").write_text("")
    done = bench.search()
    assert done.returncode == 2
    assert "cannot create results/tiny" in done.stderr


def test_store_killed_between_outcome_and_closing_needs_no_second_run(bench: Bench) -> None:
    """The narrowest gap: the outcome is written, the trial is not closed."""
    import optuna

    bench.search("--trials", "1")
    url = f"sqlite:///{bench.study / 'study.db'}"
    storage = optuna.storages.RDBStorage(url)
    study = optuna.load_study(study_name="tiny", storage=storage)
    done = study.get_trials()[0]
    with storage.engine.begin() as connection:
        from sqlalchemy import text

        connection.execute(text("UPDATE trials SET state = 'RUNNING'"))
        connection.execute(text("DELETE FROM trial_values"))
    storage.engine.dispose()
    assert bench.search("--resume", "--trials", "1").returncode == 0
    assert len(bench.launches()) == 1
    assert optuna.load_study(study_name="tiny", storage=url).get_trials()[0].value == done.value


@pytest.mark.parametrize("damage", ["renamed", "emptied"])
def test_results_whose_database_lacks_the_study_are_not_overwritten(bench: Bench, damage: str) -> None:
    bench.tell_worker({"do": "succeed", "step_s": 0.001})
    assert bench.search("--trials", "1").returncode == 0
    folder = bench.study
    if damage == "renamed":
        folder = folder.rename(folder.with_name("copy"))
    else:
        (folder / "study.db").write_bytes(b"")
    before = (folder / "trials.csv").read_bytes()
    done = bench.search("--resume", "--name", folder.name)
    assert done.returncode == 2
    assert "can't be continued" in done.stderr or "holds no study to go on with" in done.stderr
    assert (folder / "trials.csv").read_bytes() == before
