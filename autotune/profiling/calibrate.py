"""Figures of the machine at hand: what its matmuls, memory and links really do, as a cluster file. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from autotune.cost.devices import Machine, catalogue
from autotune.errors import UserError
from autotune.profiling.host_ranks import run_ranks
from autotune.profiling.profile_cache import hardware
from autotune.space.cluster import ClusterSpec, Link
from autotune.space.cluster_file import read_device, read_machine_section
from autotune.space.machine import LEGAL, out_of_range
from autotune.space.resolve import resolve_machine

__all__ = ["Calibration", "calibrate", "cluster_file", "fit_link", "fit_matmuls", "read_calibrated", "read_machine"]

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Calibration:
    """What was measured.

    Attributes:
        machine: the cost model's figures of one device.
        link: between two devices of this machine, with the bandwidth that messages reach; None when it was not
            measured, as where there is one GPU alone.
        matmuls: dtype -> (rows, inner, columns, seconds, share of the peak) of every shape.
        messages: (bytes, seconds) one way.
    """

    machine: Machine
    link: Link | None
    matmuls: dict[str, tuple[tuple[int, int, int, float, float], ...]]
    messages: tuple[tuple[int, float], ...]


def calibrate(device: str, seconds: float = 0.5, links: bool = True, timeout_s: float = TIMEOUT_S) -> Calibration:
    """Measure this machine. Other load on it spoils the figures.

    Args:
        device: `cpu`, or the name of the GPUs in it.
        seconds: time given to each matmul shape; larger ones are left out.
        links: also measure messages between two ranks (gloo on CPU, NCCL between two GPUs).

    Raises:
        ProfileError: a measurement failed.
        UserError: the device is not in this machine.
    """
    question = {"device": device, "seconds": seconds}
    found = run_ranks("autotune.profiling.machine_bench", 1, question, timeout_s)
    if problem := found.get("problem"):
        raise UserError(problem)
    machine, matmuls = _machine(device, found)
    messages: tuple[tuple[int, float], ...] = ()
    if links and (device == "cpu" or found["devices"] > 1):
        answer = run_ranks("autotune.profiling.link_bench", 2, question, timeout_s)
        messages = tuple((int(one["bytes"]), one["seconds"]) for one in answer["messages"])
    link = fit_link(messages) if messages else None
    if link is not None:
        machine = machine.with_numbers(link_efficiency=1.0)  # what is reached, nothing is to be taken off once more
    return Calibration(machine, link, matmuls, messages)


def fit_matmuls(samples: Iterable[Mapping[str, float]]) -> tuple[float, float]:
    """(FLOP/s of large matmuls, fixed seconds of each), fitted to times by least squares of the relative errors.

    Time = FLOPs / rate + fixed time; `samples` have `rows`, `inner`, `columns` and `seconds`.
    """
    points = [(2.0 * s["rows"] * s["inner"] * s["columns"], s["seconds"]) for s in samples]
    inverse_rate, fixed = _relative_line(points)
    return 1.0 / inverse_rate, fixed


def fit_link(messages: Sequence[tuple[int, float]]) -> Link:
    """Latency and bandwidth, fitted to one-way times of messages by least squares of the relative errors."""
    inverse_bandwidth, latency = _relative_line([(float(size), seconds) for size, seconds in messages])
    return Link(latency_s=latency, bandwidth_bytes_per_s=1.0 / inverse_bandwidth)


def cluster_file(calibration: Calibration, cluster: ClusterSpec) -> str:
    """The text of a cluster file (YAML): `cluster` has the keys of a space file's section of that name, `machine` the
    cost model's figures of a device, `measured` what they were fitted to.

    Args:
        cluster: what is not measured: nodes, devices, memory limit and the link between nodes; the link inside a node,
            too, when none was measured.

    Where a link was measured, all bandwidths are those that are reached and `link_efficiency` is 1: the share of the
    nominal one between nodes that predictions assume is taken off here.

    Raises:
        UserError: a figure came out beyond its legal range, which no cluster file may hold.
    """
    import yaml

    _require_legal(calibration.machine)
    inside, share = calibration.link or cluster.intra_node, 1.0
    if calibration.link is not None:
        share = (catalogue().get(cluster.device) or Machine).link_efficiency
    machine = {key: value for key, value in asdict(calibration.machine).items() if value is not None}
    values = {
        "cluster": {
            "nodes": cluster.nodes,
            "devices_per_node": cluster.devices_per_node,
            "device": cluster.device,
            "memory_limit": cluster.memory_limit_bytes,
            "links": {
                "intra_node": {"latency": inside.latency_s, "bandwidth": inside.bandwidth_bytes_per_s},
                "inter_node": {
                    "latency": cluster.inter_node.latency_s,
                    "bandwidth": share * cluster.inter_node.bandwidth_bytes_per_s,
                },
            },
        },
        "machine": machine,
        "measured": {
            "hardware": hardware(cluster.device),
            "links": "intra_node" if calibration.link else "none",
            "matmuls": {dtype: [list(row) for row in rows] for dtype, rows in calibration.matmuls.items()},
            "messages": [list(row) for row in calibration.messages],
        },
    }
    head = (
        "# Written by `autotune calibrate`. Matmuls are rows, inner, columns, seconds, share of the peak;\n"
        "# messages are bytes and seconds one way. The link between nodes is not measured"
        + (
            ": its bandwidth is\n# the share of the nominal one that is assumed to be reached.\n"
            if share < 1
            else ".\n"
        )
    )
    return head + yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=110)


def _require_legal(machine: Machine) -> None:
    for name in LEGAL:
        value = getattr(machine, name)
        if value is not None and (problem := out_of_range(name, value)):
            raise UserError(
                f"calibration failed: {name} {problem}, but came out as {value:g}; try again on an idle machine"
            )


def read_machine(path: Path) -> Machine:
    """The device's figures from a cluster file, for a `Predictor`.

    Raises:
        UserError: the file can't be read, has mistakes, or no section `machine`.
    """
    return resolve_machine(read_machine_section(path), device="device")


def read_calibrated(path: Path) -> tuple[str | None, Machine]:
    """The device that a cluster file is of, if it says so, and its figures.

    Raises:
        UserError: as `read_machine`.
    """
    return read_device(path), read_machine(path)


def _machine(
    device: str, found: dict[str, Any]
) -> tuple[Machine, dict[str, tuple[tuple[int, int, int, float, float], ...]]]:
    """The figures of a device from its measurements.

    A catalogued accelerator keeps its data sheet's peaks, and `efficiency` is what its matmuls reach of them. A CPU has
    no such peak: the rate of large matmuls takes its place and `efficiency` is 1. The fixed time of a kernel is that of
    the dtype whose matmuls are faster; both dtypes are measured, one efficiency is kept: that of half precision on
    accelerators, where it is what is trained, and each dtype's own peak on CPUs.
    """
    fitted = {dtype: fit_matmuls(samples) for dtype, samples in found["matmuls"].items()}
    known = catalogue().get(device)
    if device == "cpu" or known is None:
        peaks = {dtype: rate for dtype, (rate, _) in fitted.items()}
        efficiency = 1.0
    else:
        peaks = {"float32": known.peak_flops_float32, "bfloat16": known.peak_flops}
        efficiency = min(1.0, fitted["bfloat16"][0] / known.peak_flops)
    kept = known or Machine(device, 1.0, 1.0, None, 1.0, 1.0, 0.0)
    machine = kept.with_numbers(
        peak_flops=peaks["bfloat16"],
        peak_flops_float32=peaks["float32"],
        memory_bytes_per_s=found["memory_bytes_per_s"],
        efficiency=efficiency,
        kernel_s=min(fixed for _, fixed in fitted.values()),
        # A measured rate is what is reached; nothing is to be taken off once more.
        memory_efficiency=1.0,
    )
    if found["memory_bytes"] is not None:
        machine = machine.with_numbers(memory_bytes=float(found["memory_bytes"]))
    return machine, {dtype: _shares(samples, peaks[dtype]) for dtype, samples in found["matmuls"].items()}


def _shares(samples: Iterable[Mapping[str, float]], peak: float) -> tuple[tuple[int, int, int, float, float], ...]:
    rows = []
    for s in samples:
        size = (int(s["rows"]), int(s["inner"]), int(s["columns"]))
        rows.append((*size, s["seconds"], round(2.0 * size[0] * size[1] * size[2] / s["seconds"] / peak, 4)))
    return tuple(rows)


def _relative_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(slope, value at 0) of the line whose relative errors have the least squares; neither is below 0.

    Raises:
        UserError: fewer than two points, or no slope in them.
    """
    if len(points) < 2:
        raise UserError(f"a line needs two measured points, not {len(points)}")
    # y = s x + c divided by y: 1 = s (x / y) + c (1 / y).
    u, v = [x / y for x, y in points], [1.0 / y for _, y in points]
    uu, uv, vv = (sum(a * b for a, b in zip(*pair, strict=True)) for pair in ((u, u), (u, v), (v, v)))
    su, sv = sum(u), sum(v)
    determinant = uu * vv - uv * uv
    slope, start = (su * vv - sv * uv) / determinant, (sv * uu - su * uv) / determinant
    if start < 0:
        slope, start = su / uu, 0.0
    if slope <= 0:
        raise UserError(
            "larger sizes took no longer: the machine was too busy to be measured; try again when it is idle"
        )
    return slope, start
