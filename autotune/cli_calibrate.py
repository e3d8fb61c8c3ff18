"""The command `calibrate`; `mount` adds it to the command line. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.cli_schedule_output import check_file
from autotune.errors import UserError

__all__ = ["calibrate", "mount"]


def mount(app: typer.Typer, **options: Any) -> None:
    """Adds the command to `app`; `options` go to typer's decorator."""
    app.command(**options)(calibrate)


def calibrate(
    out: Annotated[Path, typer.Option(metavar="FILE", help="Cluster file to write (YAML).")] = Path("cluster.yaml"),
    device: Annotated[str, typer.Option(help="cpu, or the accelerator in this machine, as spaces name it.")] = "cpu",
    devices_per_node: Annotated[int, typer.Option(min=1, max=1024, help="Devices of one machine.")] = 2,
    nodes: Annotated[int, typer.Option(min=1, max=100_000, help="Machines of the cluster.")] = 1,
    seconds: Annotated[float, typer.Option(min=0.01, help="Time given to each matmul shape.")] = 0.5,
    links: Annotated[bool, typer.Option("--links/--no-links", help="Measure messages between two ranks.")] = True,
    study: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Refit the efficiency to the finished trials of this study, too."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to standard output.")] = False,
) -> None:
    """Measure matmuls, memory and links of this machine and write a cluster file that predictions can use.

    Let nothing else run meanwhile. With --study the device's efficiency is then fitted to the step times of finished
    trials, and the error of predictions before and after is shown.
    """
    from autotune.profiling.calibrate import calibrate as measure
    from autotune.profiling.calibrate import cluster_file
    from autotune.profiling.profile_errors import ProfileError
    from autotune.space.cluster import ClusterSpec
    from autotune.space.devices import DEVICES

    if device not in DEVICES:
        raise UserError(f"--device: unknown device {device!r}; known: {', '.join(DEVICES)}")
    if not seconds < float("inf"):
        raise UserError(f"--seconds must be a number of seconds above 0, not {seconds:g}")
    check_file(out)
    defaults = DEVICES[device]
    cluster = ClusterSpec(
        nodes, devices_per_node, device, defaults.memory_bytes, defaults.intra_node, defaults.inter_node
    )
    try:
        found = measure(device, seconds, links and (device == "cpu" or devices_per_node > 1))
    except ProfileError as error:
        raise UserError(f"calibration failed: {error}") from error
    refitted = None
    if study is not None:
        found, refitted = _refitted(found, study)
    try:
        out.write_text(cluster_file(found, cluster), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}") from error
    if as_json:
        machine = asdict(found.machine)
        link = None if found.link is None else asdict(found.link)
        typer.echo(json.dumps({"file": str(out), "machine": machine, "link": link, "refit": refitted}, indent=2))
        return
    typer.echo("\n".join(_lines(found)))
    if refitted is not None:
        typer.echo(refitted)
    typer.echo(f"wrote {out}")


def _refitted(found: Any, study: Path) -> tuple[Any, str]:
    """The calibration with its efficiency fitted to a study's trials, and what that changed."""
    from dataclasses import replace

    from autotune.cli_figures import assumptions_of
    from autotune.profiling.refit import CHOICES_WITHOUT_LINKS, refit, timed_plans
    from autotune.results.table import read_csv
    from autotune.space.space import load_space

    space = load_space(study / "space.yaml")
    trials = timed_plans(read_csv(study / "trials.csv"))
    if not trials:
        raise UserError(f"{study} has no finished trial to refit to")
    cluster = space.cluster if found.link is None else replace(space.cluster, intra_node=found.link)
    assumptions = assumptions_of(space, None, "")
    # The links keep what was measured: the virtual clock of runs reads them, too.
    result = refit(
        trials,
        space.model,
        cluster,
        space.training,
        found.machine,
        assumptions=assumptions,
        choices=CHOICES_WITHOUT_LINKS,
    )
    if doubt := result.doubt:
        typer.echo(f"warning: --study {study}: the fit {doubt}", err=True)
    return replace(found, machine=result.machine), result.sentence()


def _lines(found: Any) -> list[str]:
    machine, link = found.machine, found.link
    lines = [
        f"{machine.name}: float32 {machine.peak_flops_float32 * machine.efficiency / 1e9:,.1f} GFLOP/s, half precision "
        f"{machine.peak_flops * machine.efficiency / 1e9:,.1f} GFLOP/s, {machine.kernel_s * 1e6:.1f} us a kernel, "
        f"memory {machine.memory_bytes_per_s / 1e9:,.1f} GB/s"
    ]
    if link is not None:
        lines.append(f"link: {link.latency_s * 1e6:.1f} us, {link.bandwidth_bytes_per_s / 1e9:.2f} GB/s")
    for dtype, rows in found.matmuls.items():
        lines.append(f"{dtype} matmuls, share of the peak by rows x inner x columns:")
        lines += [f"  {a:5} x {b:5} x {c:5}: {share:6.1%} in {taken * 1e3:.3f} ms" for a, b, c, taken, share in rows]
    return lines
