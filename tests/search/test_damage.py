"""A damaged study is told by its file, and what is there is left as it is."""

from __future__ import annotations

import os
import random
import shutil
import stat
import sys

import pytest
from conftest import LEGAL, SPACE, Bench

from autotune.errors import UserError
from autotune.profiling.command import DEFAULT_WORKER
from autotune.results.table import read_csv
from autotune.search.identity import identity
from autotune.search.opening import open_store, sqlite_url
from autotune.search.options import SearchOptions
from autotune.space.space import load_space


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """A study with three trials that ran once, and a copy of it to begin every test with."""
    bench = Bench(tmp_path_factory.mktemp("bench"))
    (bench.path / "tiny.yaml").write_text(SPACE)
    bench.tell_worker()
    assert bench.search("--trials", "3").returncode == 0
    shutil.copytree(bench.path / "results", bench.path / "whole")
    return bench


@pytest.fixture
def study(finished: Bench) -> Bench:
    shutil.rmtree(finished.path / "results")
    shutil.copytree(finished.path / "whole", finished.path / "results")
    return finished


@pytest.mark.parametrize("damage", ["a poem", "cut", "overwritten", "a folder"])
def test_damaged_database_is_named_and_nothing_is_overwritten(study: Bench, damage: str) -> None:
    bench = study
    database = bench.study / "study.db"
    data = database.read_bytes()
    if damage == "a poem":
        database.write_text("this is not a database, it is a poem\n" * 200)
    elif damage == "cut":
        database.write_bytes(data[: len(data) // 2])
    elif damage == "overwritten":
        database.write_bytes(data[:4096] + random.Random(1).randbytes(len(data) - 8192) + data[-4096:])
    else:
        database.unlink()
        database.mkdir()
    before = {path: path.read_bytes() for path in bench.study.rglob("*") if path.is_file() and path.name != ".lock"}
    done = bench.search("--resume")
    assert done.returncode == 2
    assert "study.db" in done.stderr
    assert {path: path.read_bytes() for path in before} == before


def test_no_byte_that_is_overwritten_brings_a_search_down(study: Bench) -> None:
    bench = study
    space = load_space(bench.path / "tiny.yaml")
    plans = {space.fingerprint(plan): plan for plan in space.plans()}
    data = (bench.study / "study.db").read_bytes()
    refused = 0
    for seed in range(40):
        chance = random.Random(seed)
        damaged = bytearray(data)
        for _ in range(chance.choice((1, 8, 64))):
            at, size = chance.randrange(len(data)), chance.choice((1, 4, 512))
            damaged[at : at + size] = chance.randbytes(size)
        folder = bench.path / f"copy-{seed}" / "tiny"
        folder.mkdir(parents=True)
        (folder / "study.db").write_bytes(damaged[: len(data)])
        options = SearchOptions(folder, resume=True, final_rounds=3)
        try:
            about = identity(space, DEFAULT_WORKER, "run", None)
            store = open_store(sqlite_url(folder / "study.db"), options, about, plans, space.cluster)
            with store:
                store.news()
        except UserError as error:
            refused += 1
            assert "study" in str(error)  # noqa: PT017
    assert refused > 10


@pytest.mark.parametrize("how", ["cut", "overwritten"])
def test_search_writes_a_damaged_table_anew(study: Bench, how: str) -> None:
    """The database is the study; the table is written from it."""
    bench = study
    table = bench.study / "trials.csv"
    whole = read_csv(table)
    if how == "cut":
        table.write_bytes(table.read_bytes()[:700])
    else:
        table.write_bytes(os.urandom(2000))
    shown = bench.run("results", "results/tiny")
    assert shown.returncode == 2
    assert "trials.csv" in shown.stderr
    assert "Traceback" not in shown.stderr
    assert bench.search("--trials", "3", "--resume").returncode == 0
    assert read_csv(table) == whole
    assert len(bench.launches()) == 3


def test_file_in_place_of_a_study_is_told(study: Bench) -> None:
    with pytest.raises(UserError, match=r"trials\.csv is a file; give the folder of the study, .*tiny$"):
        read_csv(study.study / "trials.csv" / "trials.csv")


def test_files_lie_only_in_the_study_and_follow_the_umask(bench: Bench) -> None:
    home = bench.path / "home"
    (home / "tmp").mkdir(parents=True)
    shutil.copy(bench.path / "tiny.yaml", home)
    before = {path for path in bench.path.rglob("*") if bench.study not in path.parents}
    environment = {"HOME": str(home), "TMPDIR": str(home / "tmp")}
    old = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    mask = os.umask(0o027)
    try:
        assert bench.search("--trials", "2").returncode == 0
    finally:
        os.umask(mask)
        for name, value in old.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    made = {path for path in bench.path.rglob("*") if bench.study not in path.parents} - before
    assert made == {bench.path / "results", bench.study, bench.path / "script.json.starts"}
    for path in [bench.study, *bench.study.rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o750 if path.is_dir() else 0o640), path


def test_children_learn_nothing_of_the_database(bench: Bench) -> None:
    """Whatever stands in its address, such as a password, is on no command line and in no environment of a trial."""
    spy = bench.path / "spy.py"
    spy.write_text(
        "import os, pathlib, sys\n"
        "out, seen, pid = pathlib.Path(sys.argv[1]), b'', os.getpid()\n"
        "while b'autotune.cli' not in (line := pathlib.Path(f'/proc/{pid}/cmdline').read_bytes()):\n"
        "    seen += line + pathlib.Path(f'/proc/{pid}/environ').read_bytes()\n"
        "    pid = int(pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[1])\n"
        "(out / 'seen').write_bytes(seen)\n"
        "(out / 'result.json').write_text('{\"step_time_s\": 0.5}')\n"
    )
    url = f"sqlite:///{bench.path}/topsecret.db"
    os.environ["AUTOTUNE_STORAGE"] = url
    try:
        done = bench.run(
            *("search", "tiny.yaml", "--trials", "1", "--final", "0", "--sampler", "grid"),
            *("--worker", f"{sys.executable} {spy} {{out}}", "--launcher", "none"),
        )
    finally:
        del os.environ["AUTOTUNE_STORAGE"]
    assert done.returncode == 0, done.stderr
    assert (bench.path / "topsecret.db").exists()
    seen = next(bench.study.glob("logs/*/seen")).read_bytes()
    assert b"AUTOTUNE_TRIAL_ID" in seen
    assert b"topsecret" not in seen


def test_exotic_words_of_a_worker_reach_the_table_and_never_the_terminal(bench: Bench) -> None:
    error = (
        'ValueError: \x1b[2J\x1b]0;title\x07 NUL\x00, "quotes", half \ud800 a pair, [bold]no markup[/bold], '
        + "x" * 10**6
    )
    bench.tell_worker(
        {"when": {"schedule": "zb-h1"}, "do": "fail", "rank": 0, "error": "first\r\n" + error},
        {
            "when": {"schedule": "v-min"},
            "do": "fail",
            "rank": 0,
            "state": "oom",
            "error": error[:200] + "\nlast \x9b31m",
        },
    )
    done = bench.search("--final", "0")
    texts = [done.stdout, done.stderr]
    texts.append(bench.run("results", "results/tiny", "--all").stdout)
    for text in texts:
        assert not set(text) & (set(map(chr, range(32))) - set("\n\t") | set(map(chr, range(0x7F, 0xA0))))
    assert "[bold]no markup[/bold]" in texts[2]
    rows = read_csv(bench.study / "trials.csv")
    assert len([row for row in rows if row.state != "refused"]) == LEGAL
    reason = next(row.reason for row in rows if row.state == "failed")
    assert '"quotes", half \\ud800 a pair' in reason
    assert len(reason) < 6000
