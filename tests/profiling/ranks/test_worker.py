"""The worker as a command: what it writes when it is done, and when it fails."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from autotune.errors import UserError
from autotune.profiling.device import CpuDevice
from autotune.profiling.failure import failure_state
from autotune.profiling.mesh import MeshCache
from autotune.profiling.protocol import RankReport, TrialRequest
from autotune.profiling.training import Training
from autotune.schedules.schedule import Schedule

sys.path.insert(0, str(Path(__file__).parent))
from cases import Case

WORKER = [sys.executable, "-m", "autotune.profiling.worker"]


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return str(free.getsockname()[1])


def start(request: TrialRequest, out: Path, ranks: range | None = None, **environment: str) -> list[subprocess.Popen]:
    """The worker's ranks as plain processes that meet on a free port."""
    (out / "request.json").write_text(json.dumps(request.to_dict()))
    port = free_port()
    world = request.plan.devices
    return [
        subprocess.Popen(
            [*WORKER, "--request", str(out / "request.json"), "--out", str(out)],
            env=os.environ
            | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "OMP_NUM_THREADS": "1"}
            | {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
            | environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (range(world) if ranks is None else ranks)
    ]


def finish(processes: list[subprocess.Popen], timeout_s: float = 120.0) -> list[int]:
    """Exit codes; a rank that doesn't end in time is killed and fails the test."""
    try:
        return [process.wait(timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def report(out: Path, rank: int) -> RankReport:
    return RankReport.from_dict(json.loads((out / f"rank-{rank}.json").read_text()))


@pytest.mark.ranks
def test_every_rank_reports_complete_numbers(tmp_path):
    request = replace(Case("zb-h1", 2, 1, 2, "gpt2").request(), warmup_steps=1, measured_steps=3)
    assert finish(start(request, tmp_path)) == [0, 0, 0, 0]
    reports = [report(tmp_path, rank) for rank in range(4)]
    for rank, found in enumerate(reports):
        assert (found.rank, found.state, found.error, found.failed_at) == (rank, "ok", "", None)
        assert len(found.step_wall_s) == len(found.optimizer_cpu_s) == len(found.passes) == 3
        assert min(found.step_wall_s) > 0
        assert min(found.optimizer_cpu_s) > 0
        stage = rank // 2
        for step, wall_s in zip(found.passes, found.step_wall_s, strict=True):
            assert [(entry.kind, entry.stage) for entry in step] == [("B", stage), ("F", stage), ("W", stage)]
            assert all(entry.cpu_s > 0 for entry in step)
            assert sum(entry.cpu_s for entry in step) * request.plan.microbatches < 2 * wall_s
        assert found.peak_memory_bytes > found.activation_peak_bytes > 0
        # Parameters, gradients and two moments in float32 are there at the peak.
        assert found.peak_memory_bytes >= 16 * found.parameters
        assert (found.torch, found.device) == (torch.__version__, "cpu")
    assert [len(found.losses) for found in reports] == [0, 0, 3, 3]
    assert reports[2].losses == reports[3].losses
    assert {path.name for path in tmp_path.iterdir()} == {"request.json", *(f"rank-{rank}.json" for rank in range(4))}


@pytest.mark.ranks
def test_collective_bytes_are_those_counted_by_hand(tmp_path):
    request = replace(Case("1f1b", 1, 2, 2, "llama").request(), measured_steps=1, measure_memory=False)
    assert finish(start(request, tmp_path)) == [0, 0, 0, 0]
    found, spec, plan = report(tmp_path, 0), request.model, request.plan
    assert found.peak_memory_bytes is None
    # A gather or a sum-and-scatter of (batch, sequence, hidden) float32 over 2 ranks sends half of it.
    boundary = plan.micro_batch_size * spec.sequence_length * spec.hidden * 4 // 2
    forward = 4 * spec.layers + 2  # two gathers and two sums a layer, the embedding's sum, the head's gather
    # The loss exchanges the highest logit of every token, then two sums: over 2 ranks an all-reduce sends its size.
    loss = 3 * plan.micro_batch_size * spec.sequence_length * 4
    norms = (2 * spec.layers + 1) * spec.hidden * 4 // plan.dp
    assert found.collective_bytes["tp"] == plan.microbatches * (2 * forward * boundary + loss) + norms
    assert found.collective_calls["tp"] == plan.microbatches * (2 * forward + 2 * 2) + 2  # an all-reduce counts as two
    # FSDP gathers every parameter and reduces every gradient once: half of each is sent.
    assert found.collective_bytes["dp"] == pytest.approx(found.parameters * 4, rel=0.02)
    assert "tied" not in found.collective_bytes


@pytest.mark.ranks
def test_a_failing_rank_reports_itself_first_and_its_peer_follows_at_once(tmp_path):
    request = Case("1f1b", 2, 1, 1, "llama").request()
    huge = replace(request, model=replace(request.model, vocab=2**42))
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    port = free_port()
    peer = start(request, tmp_path / "0", range(1), MASTER_PORT=port)
    failing = start(huge, tmp_path / "1", range(1, 2), MASTER_PORT=port)
    # Well within the 120 s that a collective may take.
    assert finish(peer + failing, timeout_s=60) == [1, 1]
    follower, first = report(tmp_path / "0", 0), report(tmp_path / "1", 1)
    assert (first.state, follower.state) == ("oom", "failed")
    assert first.failed_at < follower.failed_at
    assert "Traceback" in first.error or "Error" in first.error


@pytest.mark.ranks
def test_a_schedule_in_the_wrong_order_is_refused_before_any_group_is_made(tmp_path):
    request = Case("1f1b", 2, 1, 1, "llama").request()
    good = request.schedule
    order = (good.order[0][-1:] + good.order[0][:-1], good.order[1])
    broken = replace(request, schedule=Schedule(good.name, good.microbatches, good.placement, order))
    # One rank alone: had it tried to make a group it would wait for the other.
    assert finish(start(broken, tmp_path, range(1)), timeout_s=60) == [1]
    assert report(tmp_path, 0).state == "failed"
    assert "runs before" in report(tmp_path, 0).error


@pytest.mark.ranks
def test_running_out_of_memory_is_reported_as_such(tmp_path):
    request = Case("1f1b", 1, 1, 2, "llama").request()
    # A table of 2 x 2^46 float32 values: no machine has it.
    huge = replace(request, model=replace(request.model, vocab=2**42))
    assert set(finish(start(huge, tmp_path))) == {1}
    assert {report(tmp_path, rank).state for rank in range(2)} == {"oom"}
    assert "allocate" in report(tmp_path, 0).error


def test_out_of_memory_is_told_by_type_and_source_not_by_words():
    with pytest.raises(RuntimeError) as allocator:
        torch.empty(2**50, dtype=torch.uint8)
    assert failure_state(allocator.value) == "oom"
    assert failure_state(MemoryError()) == "oom"
    assert failure_state(torch.OutOfMemoryError("CUDA out of memory")) == "oom"
    assert failure_state(RuntimeError("the user's text: DefaultCPUAllocator: can't allocate memory")) == "failed"
    assert failure_state(ValueError("out of memory")) == "failed"


GOOD = Case("zb-v", 2, 2, 1, "gpt2").request()


@pytest.mark.parametrize(
    ("request_", "ranks", "message"),
    [
        (GOOD, 8, "8 ranks run a plan of 4 devices"),
        (replace(GOOD, schedule=Case("zb-v", 4, 1, 1, "gpt2").request().schedule), 4, "the plan pp 2"),
        (replace(GOOD, schedule=Case("zb-h1", 2, 2, 1, "gpt2").request().schedule), 4, "2 stages, the layer split 4"),
        (replace(GOOD, plan=replace(GOOD.plan, microbatches=5)), 4, "4 microbatches, the plan 5"),
        (replace(GOOD, plan=replace(GOOD.plan, layer_split=(1, 1, 1, 2))), 4, "doesn't add up to 4 layers"),
        (replace(GOOD, training=replace(GOOD.training, global_batch_size=9)), 4, "8 samples a step, the global batch"),
        (replace(GOOD, model=replace(GOOD.model, max_positions=7)), 4, "7 learned positions"),
        (
            replace(GOOD, plan=replace(GOOD.plan, tp=3), model=replace(GOOD.model, sequence_length=8)),
            12,
            "sequence length 8 is not a multiple of tp 3",
        ),
    ],
)
def test_a_request_whose_parts_disagree_is_refused(request_, ranks, message, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    with pytest.raises(UserError, match=message):
        Training(request_, CpuDevice(), MeshCache("cpu", timedelta(seconds=1)))
