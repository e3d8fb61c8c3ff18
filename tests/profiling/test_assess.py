"""Every way a trial can end gets its own state and the words that help; only a complete result is ok."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_launcher import FAKE, fake, make_request, wait_until

from autotune.profiling import rank_entry
from autotune.profiling.assess import assess
from autotune.profiling.command import parse_worker
from autotune.profiling.launcher import launch
from autotune.profiling.protocol import TrialRequest
from autotune.profiling.rank_files import last_lines
from autotune.profiling.supervisor import Ending
from autotune.results.measurement import TrialOutcome
from autotune.schedules import registry
from autotune.space.plan import Plan

EXITED = Ending("exited", 0, None, 1_700_000_000.0, 12.5, 0)


def write_report(folder: Path, number: int, request: TrialRequest | None = None, **values: Any) -> None:
    report = {
        "version": 1,
        "rank": number,
        "request_id": (request or make_request()).id,
        "state": "ok",
        "step_wall_s": [0.2, 0.1, 0.3],
        "peak_memory_bytes": 1000 + number,
        "losses": [2.0, 1.9, 1.8] if number == 1 else [],
        "torch": "2.13.0",
        "device": "fake",
    }
    (folder / f"rank-{number}.json").write_text(json.dumps(report | values))


def passes(stage: int, kinds: str = "F BW", **times: float) -> list[list[dict[str, Any]]]:
    """Times of three steps."""
    return [[{"kind": kind, "stage": stage, "cpu_s": 0.1, "wall_s": 0.1} | times for kind in kinds.split()]] * 3


def write_exit(folder: Path, rank: int, exit_code: int | None, number: int | None, ended_at: float) -> None:
    values = {"rank": rank, "exit_code": exit_code, "signal": number, "ended_at": ended_at, "peak_rss_bytes": 5}
    (folder / f"rank-{rank}.exit.json").write_text(json.dumps(values))


def run_fake(
    tmp_path: Path, request: TrialRequest, rule: dict, limit_s: float = 60, starter: str = "none"
) -> TrialOutcome:
    """The outcome of a real launch of the fake worker; `none` is quick, `torchrun` as a search does it."""
    folder = tmp_path / "trial"
    return assess(request, launch(request, fake(tmp_path, rule, starter=starter), folder, limit_s), folder)


def test_step_time_is_the_slowest_ranks_median_and_memory_the_largest_of_all_ranks(tmp_path: Path) -> None:
    write_report(tmp_path, 0)
    write_report(tmp_path, 1, step_wall_s=[0.4, 0.05, 0.2])
    outcome = assess(make_request(), EXITED, tmp_path)
    assert (outcome.state, outcome.reason, outcome.started) == ("ok", "", "2023-11-14T22:13:20+00:00")
    measured = outcome.measurement
    assert measured is not None
    # slowest rank of each step: 0.4, 0.1, 0.3
    assert (measured.step_time_s, measured.step_time_min_s, measured.step_time_max_s) == (0.3, 0.1, 0.4)
    assert measured.step_time_std_s == pytest.approx(
        math.sqrt(((0.4 - 0.8 / 3) ** 2 + (0.1 - 0.8 / 3) ** 2 + (0.3 - 0.8 / 3) ** 2) / 2)
    )
    assert measured.peak_memory_bytes_per_rank == (1000, 1001)
    assert measured.peak_memory_bytes == 1001
    assert measured.loss == 1.8


def test_loss_is_found_on_whichever_rank_holds_the_last_stage(tmp_path: Path) -> None:
    write_report(tmp_path, 0, losses=[3.0, 3.0, 2.5])
    write_report(tmp_path, 1, losses=[])
    measured = assess(make_request(), EXITED, tmp_path).measurement
    assert measured is not None
    assert measured.loss == 2.5


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"step_wall_s": [0.1, 0.2]}, "measured 2 steps, not 3"),
        ({"step_wall_s": [0.1, 0.2, 0.0]}, "step times"),
        ({"losses": []}, "no rank reports a loss"),
        ({"passes": passes(1)}, "only ranks"),
        ({"peak_memory_bytes": None}, "only ranks [0]"),
        ({"rank": 0}, "rank-1.json is the report of rank 0"),
        ({"step_wall_s": [0.1, 0.2, math.inf]}, "step times"),
        ({"step_wall_s": ["a", "b", "c"]}, "can't be used"),
        ({"losses": [2.0, 1.9]}, "the losses of 2 steps, not 3"),
        ({"peak_memory_bytes": 0}, "a peak of 0 bytes"),
        ({"optimizer_cpu_s": [0.1]}, "timed 1 optimizer steps, not 3"),
        ({"optimizer_cpu_s": [0.1, math.nan, 0.1]}, "outside of its passes"),
        ({"request_id": ""}, "rank-1.json is the report of another request (request_id ''"),
        ({"request_id": make_request(dp=2).id}, "another request"),
    ],
)
def test_ok_reports_that_are_incomplete_or_impossible_are_invalid(
    tmp_path: Path, wrong: dict[str, Any], why: str
) -> None:
    write_report(tmp_path, 0)
    write_report(tmp_path, 1, **wrong)
    outcome = assess(make_request(), EXITED, tmp_path)
    assert outcome.state == "invalid"
    assert why in outcome.reason
    assert outcome.measurement is None


def test_a_copy_of_one_ranks_report_is_no_report_of_another(tmp_path: Path) -> None:
    for number in range(2):
        write_report(tmp_path, number, rank=0, peak_memory_bytes=1000, losses=[2.0, 2.0, 2.0])
    outcome = assess(make_request(), EXITED, tmp_path)
    assert (outcome.state, outcome.reason) == ("invalid", "rank-1.json is the report of rank 0")


def timed_request(schedule: str = "1f1b", pp: int = 2, tp: int = 1, dp: int = 1) -> TrialRequest:
    """One whose passes are timed in `write_timed`, by more ranks than the one core they get there."""
    plan = Plan(pp, tp, dp, 1, 4, schedule, 1, (1,) * pp)
    cluster = replace(make_request().cluster, devices_per_node=plan.devices)
    request = make_request(pp=pp, dp=dp)
    return replace(request, plan=plan, schedule=registry.build(schedule, pp, 4, 1), cluster=cluster)


def write_timed(
    folder: Path, request: TrialRequest, kinds: str = "F BW", wrong: dict[str, Any] | None = None
) -> TrialOutcome:
    """The outcome of complete reports with virtual-clock figures, of which rank 1's are changed by `wrong`."""
    sent = {axis: 100 for axis in ("tp", "dp") if getattr(request.plan, axis) > 1}
    for rank in range(request.plan.devices):
        stage = rank // (request.plan.tp * request.plan.dp)
        values = {
            "passes": passes(stage, kinds),
            "optimizer_cpu_s": [0.01] * 3,
            "collective_bytes": sent,
            "collective_calls": sent,
            "losses": [2.0] * 3,
        }
        write_report(folder, rank, request, **(values | (wrong or {} if rank == 1 else {})))
    return assess(request, EXITED, folder, cores=1)


@pytest.mark.parametrize(
    ("schedule", "tp", "dp", "kinds"), [("1f1b", 2, 2, "F BW"), ("zb-h1", 1, 1, "F B W"), ("gpipe", 1, 2, "F BW")]
)
def test_complete_figures_give_the_virtual_clock(tmp_path: Path, schedule: str, tp: int, dp: int, kinds: str) -> None:
    outcome = write_timed(tmp_path, timed_request(schedule, 2, tp, dp), kinds)
    assert (outcome.state, outcome.reason) == ("ok", "")
    assert outcome.measurement is not None
    assert outcome.measurement.clock == "virtual"


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"optimizer_cpu_s": []}, "rank 1 did not time what is outside of its passes"),
        ({"collective_bytes": None}, "counted 0 bytes in 100 collectives over tp 2"),
        ({"collective_calls": None}, "counted 100 bytes in 0 collectives over tp 2"),
        ({"collective_bytes": {"tp": 100}}, "counted 0 bytes in 100 collectives over dp 2"),
    ],
)
def test_virtual_clock_without_its_figures_is_invalid(tmp_path: Path, wrong: dict[str, Any], why: str) -> None:
    outcome = write_timed(tmp_path, timed_request(tp=2, dp=2), wrong=wrong)
    assert outcome.state == "invalid"
    assert why in outcome.reason


@pytest.mark.parametrize(
    ("timed", "why"),
    [
        (passes(1, "F B"), "rank 1 did not time pass W of stage 1"),
        (passes(1, "F B W")[:2], "timed the passes of 2 steps, not 3"),
        (passes(1, "F B W BW"), "timed pass BW of stage 1, which its schedule does not have"),
        (passes(1, "F B W W"), "timed pass W of stage 1"),
        (passes(0, "F B W"), "did not time pass B of stage 1"),
        (passes(1, "F B W", cpu_s=0.0), "reports 0.0 s of CPU"),
        (passes(1, "F B W", wall_s=-1.0), "-1.0 s of wall time for pass F of stage 1"),
        (passes(1, "F B W", cpu_s=math.inf), "reports inf s of CPU"),
    ],
)
def test_passes_must_be_those_of_the_ranks_schedule(tmp_path: Path, timed: list[Any], why: str) -> None:
    outcome = write_timed(tmp_path, timed_request("zb-h1"), "F B W", {"passes": timed})
    assert outcome.state == "invalid"
    assert why in outcome.reason


def test_memory_limit_that_nobody_checked_is_no_silent_ok(tmp_path: Path) -> None:
    request = replace(make_request(), cluster=replace(make_request().cluster, memory_limit_bytes=900))
    for rank in range(2):
        write_report(tmp_path, rank, request, peak_memory_bytes=None)
    own = assess(request, EXITED, tmp_path)
    assert (own.state, own.measurement) == ("invalid", None)
    assert own.reason == "no rank measured its memory, so the memory limit of 900 bytes was not checked"
    custom = assess(request, EXITED, tmp_path, worker=parse_worker("train"))
    assert custom.state == "ok"
    assert custom.reason == "the worker tells no memory, so the memory limit of 900 bytes was not checked"
    assert custom.measurement is not None


@pytest.mark.parametrize("loss", ["NaN", "Infinity"])
def test_loss_that_is_no_number_is_non_finite(tmp_path: Path, loss: str) -> None:
    write_report(tmp_path, 0)
    write_report(tmp_path, 1, losses=[2.0, float(loss), 2.0])
    outcome = assess(make_request(), EXITED, tmp_path)
    assert outcome.state == "non-finite"
    assert outcome.reason == f"rank 1 reports a loss of {float(loss)}"
    assert outcome.measurement is None


def test_plan_over_the_memory_limit_is_oom_with_its_numbers(tmp_path: Path) -> None:
    request = make_request()
    request = replace(request, cluster=replace(request.cluster, memory_limit_bytes=900))
    write_report(tmp_path, 0, request)
    write_report(tmp_path, 1, request)
    outcome = assess(request, EXITED, tmp_path)
    assert outcome.state == "oom"
    assert "rank 1 peaked at 1001 bytes, 101 bytes over the limit of 900" in outcome.reason
    assert outcome.measurement is not None


def test_exit_code_0_without_a_result_is_not_success(tmp_path: Path) -> None:
    outcome = run_fake(tmp_path, make_request(), {"do": "silent"})
    assert outcome.state == "no-result"
    assert "exit code 0 but no result of ranks 0, 1" in outcome.reason
    assert "leaving without a word" in outcome.reason


def test_cause_is_the_first_failing_rank_not_its_followers(tmp_path: Path) -> None:
    outcome = run_fake(
        tmp_path,
        make_request(),
        {"do": "fail", "rank": 1, "error": "ValueError: head 3\nis crooked"},
        starter="torchrun",
    )
    assert outcome.state == "failed"
    assert outcome.reason.startswith("rank 1 failed first: ValueError: head 3\nis crooked")
    assert "closed by peer" not in outcome.reason


def test_followers_that_report_earlier_in_the_file_list_are_still_followers(tmp_path: Path) -> None:
    write_report(tmp_path, 0, state="failed", error="closed by peer", failed_at=100.2)
    write_report(tmp_path, 1, state="oom", error="out of memory", failed_at=100.1)
    outcome = assess(make_request(), EXITED, tmp_path)
    assert (outcome.state, outcome.reason) == ("oom", "rank 1 on fake ran out of memory: out of memory")


def test_message_that_quotes_oom_is_no_oom(tmp_path: Path) -> None:
    write_report(tmp_path, 0, state="failed", error="KeyError: 'oom CUDA out of memory'", failed_at=1.0)
    assert assess(make_request(), EXITED, tmp_path).state == "failed"


def test_failing_allocation_under_an_address_space_limit_is_oom(tmp_path: Path) -> None:
    outcome = run_fake(tmp_path, make_request(), {"do": "memory_error", "limit": 256 << 20})
    assert outcome.state == "oom"
    assert "MemoryError" in outcome.reason


CGROUP = Path("/sys/fs/cgroup/memory")


@pytest.mark.skipif(not os.access(CGROUP, os.W_OK) or os.getuid() != 0, reason="needs a writable memory cgroup (v1)")
def test_rank_that_the_kernel_kills_for_memory_is_oom(tmp_path: Path) -> None:
    group = CGROUP / f"autotune-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(64 << 20))
    except OSError:
        pytest.skip("memory cgroups can't be made here")
    try:
        request, folder = make_request(pp=1), tmp_path / "trial"
        worker = fake(tmp_path, {"do": "hog"}, starter="none")
        inside = f'echo $$ > {group}/cgroup.procs && exec "$@"'
        worker = type(worker)(("sh", "-c", inside, "sh", *worker.argv), "none")
        outcome = assess(request, launch(request, worker, folder, 60), folder)
        assert outcome.state == "oom"
        assert "SIGKILL" in outcome.reason
        assert "out-of-memory killer" in outcome.reason
    finally:
        group.rmdir()


def test_rank_that_someone_kills_is_killed_and_named(tmp_path: Path) -> None:
    outcome = run_fake(
        tmp_path, make_request(), {"do": "crash", "rank": 1, "signal": signal.SIGKILL}, starter="torchrun"
    )
    assert outcome.state == "killed"
    assert "rank 1 was killed by SIGKILL" in outcome.reason
    assert "memory" in outcome.reason


def test_rank_that_ends_with_a_code_and_no_report_shows_its_last_lines(tmp_path: Path) -> None:
    write_exit(tmp_path, 0, None, signal.SIGTERM, 10.1)
    write_exit(tmp_path, 1, 3, None, 10.0)
    (tmp_path / "rank-1.log").write_text("starting\n\x1b[31mRuntimeError: lost my marbles\x1b[0m\n")
    outcome = assess(make_request(), Ending("exited", 1, None, 0.0, 1.0), tmp_path)
    assert outcome.state == "failed"
    assert outcome.reason == (
        "rank 1 failed first, with exit code 3 and no report: starting\nRuntimeError: lost my marbles"
    )


def test_trial_over_its_time_is_timeout_and_says_who_is_missing(tmp_path: Path) -> None:
    outcome = run_fake(tmp_path, make_request(), {"do": "sleep"}, limit_s=1)
    assert outcome.state == "timeout"
    assert "no result of ranks 0, 1" in outcome.reason
    assert "about to sleep" in outcome.reason


def test_half_a_report_is_no_result(tmp_path: Path) -> None:
    write_report(tmp_path, 0)
    write_report(tmp_path, 1)
    whole = (tmp_path / "rank-1.json").read_bytes()
    (tmp_path / "rank-1.json").write_bytes(whole[:40])
    outcome = assess(make_request(), EXITED, tmp_path)
    assert outcome.state == "no-result"
    assert "no result of rank 1" in outcome.reason


def test_launcher_that_cannot_start_is_launcher_with_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "launcher.log").write_text("RendezvousConnectionError: port 0 refused\n")
    outcome = assess(make_request(), Ending("exited", 1, None, 0.0, 1.0), tmp_path)
    assert outcome.state == "launcher"
    assert "port 0 refused" in outcome.reason


def test_launcher_or_supervisor_that_is_killed_says_nothing_about_the_plan(tmp_path: Path) -> None:
    killed = assess(make_request(), Ending("exited", None, signal.SIGKILL, 0.0, 1.0), tmp_path)
    assert (killed.state, killed.reason) == ("launcher", "the launcher was killed by SIGKILL")
    assert assess(make_request(), Ending("launcher", None, None, 0.0, 1.0, 0, "gone"), tmp_path).state == "launcher"


def test_deaf_rank_that_the_supervisor_kills_at_the_limit_is_no_killed_rank(tmp_path: Path) -> None:
    write_exit(tmp_path, 0, None, signal.SIGKILL, 1001.5)
    ending = Ending("timeout", None, None, 990.0, 12.0, 0, "", cut_at=1000.0)
    assert assess(make_request(), ending, tmp_path).state == "timeout"
    write_exit(tmp_path, 0, None, signal.SIGKILL, 999.5)
    assert assess(make_request(), ending, tmp_path).state == "killed"


def test_last_lines_of_a_huge_log_are_read_from_its_end(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    with open(log, "wb") as file:
        file.truncate(5 << 30)  # a sparse file: 5 GiB that take no space
        file.seek(0, os.SEEK_END)
        file.write(b"\nfirst \xff\nlast\n\n")
    assert last_lines(log, 2).splitlines() == ["first \ufffd", "last"]


def test_fake_worker_is_where_the_tests_say() -> None:
    assert FAKE.exists()


@pytest.mark.parametrize(
    ("number", "asked", "state", "told"),
    [
        (signal.SIGKILL, False, "killed", "rank 1 was killed by SIGKILL"),
        (signal.SIGSEGV, False, "killed", "rank 1 was killed by SIGSEGV"),
        (signal.SIGTERM, False, "launcher", "rank 1 was ended from outside by SIGTERM"),
        # by its launcher, because rank 0 failed
        (signal.SIGTERM, True, "failed", "rank 0 failed first: RuntimeError: Connection closed by peer"),
        # libraries abort ranks that lost a peer
        (signal.SIGABRT, False, "failed", "rank 0 failed first"),
    ],
)
def test_rank_ended_by_a_signal_is_the_cause_though_its_peer_told_first_that_it_lost_it(
    tmp_path: Path, number: int, asked: bool, state: str, told: str
) -> None:
    write_report(tmp_path, 0, state="failed", error="RuntimeError: Connection closed by peer", failed_at=10.0)
    write_exit(tmp_path, 0, 1, None, 10.2)
    write_exit(tmp_path, 1, None, number, 10.3)
    path = tmp_path / "rank-1.exit.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"asked": asked}))
    outcome = assess(make_request(), replace(EXITED, exit_code=1), tmp_path)
    assert (outcome.state, told in outcome.reason) == (state, True), outcome.reason


@pytest.fixture
def sigint_as_usual() -> Iterator[None]:
    """Not ignored, as background jobs of a script inherit it: a shell can't trap what it was started to ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint_as_usual")
def test_signal_that_comes_as_soon_as_there_is_a_rank_is_passed_on(tmp_path: Path) -> None:
    command = "trap 'exit 3' INT; echo ready; while :; do sleep 0.05; done"
    # The rank runs for half a second before its parent comes to waiting for it.
    late = (
        "import os, runpy, sys, time; fork = os.fork; os.fork = lambda: (pid := fork(), pid and time.sleep(0.5))[0]; "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    rank = subprocess.Popen(
        [sys.executable, "-c", late, rank_entry.__file__, "--no-hooks", str(tmp_path), "sh", "-c", command],
        env=os.environ | {"RANK": "0"},
    )
    wait_until(lambda: (tmp_path / "rank-0.log").exists() and "ready" in (tmp_path / "rank-0.log").read_text())
    rank.send_signal(signal.SIGINT)
    assert rank.wait(timeout=60) == 3
    told = json.loads((tmp_path / "rank-0.exit.json").read_text())
    assert (told["exit_code"], told["signal"], told["interrupted"]) == (3, None, True)


@pytest.mark.usefixtures("sigint_as_usual")
def test_rank_that_sigint_ended_while_its_python_started_was_killed_whatever_its_exit_code(tmp_path: Path) -> None:
    command = "trap 'echo KeyboardInterrupt; exit 1' INT; echo ready; while :; do sleep 0.05; done"
    entry = Path(rank_entry.__file__)
    environment = os.environ | {"RANK": "0"}
    rank = subprocess.Popen(
        [sys.executable, "-I", "-S", str(entry), "--no-hooks", str(tmp_path), "sh", "-c", command], env=environment
    )
    wait_until(lambda: (tmp_path / "rank-0.log").exists() and "ready" in (tmp_path / "rank-0.log").read_text())
    rank.send_signal(signal.SIGINT)
    assert rank.wait(timeout=30) == 1
    write_exit(tmp_path, 1, None, signal.SIGTERM, 1e12)
    outcome = assess(make_request(), replace(EXITED, exit_code=1), tmp_path)
    assert (outcome.state, "rank 0 was killed by SIGINT" in outcome.reason) == ("killed", True), outcome.reason
    # The same end without a signal is the rank's own failure.
    write_exit(tmp_path, 0, 1, None, 1.0)
    assert assess(make_request(), replace(EXITED, exit_code=1), tmp_path).state == "failed"
