"""What `search` and `predict` predict with, from their options: the software's assumptions and the device's figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.errors import UserError

if TYPE_CHECKING:
    from autotune.cost.assumptions import Assumptions
    from autotune.cost.devices import Machine
    from autotune.profiling.command import WorkerCommand
    from autotune.space.cluster import Link
    from autotune.space.space import Space

__all__ = ["Assume", "CalibratedBy", "Stack", "assumptions_of", "figures_of", "stack_of"]

Stack = Annotated[
    str | None,
    typer.Option(
        help="Software that predictions are for: worker, worker-cuda, megatron, zero-bubble. Default: megatron for a "
        "worker with {megatron_args}, else worker on CPUs and worker-cuda on accelerators."
    ),
]
Assume = Annotated[
    str,
    typer.Option(metavar="NAME=VALUE;...", help="Assumptions of predictions to change; see docs/cost-model.md."),
]
CalibratedBy = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="Figures of the device for predictions: a file of `autotune calibrate`, or a study's folder, to whose "
        "finished trials they are fitted. Default: those of the space's cluster.file, if it names one.",
    ),
]


def stack_of(device: str, worker: WorkerCommand) -> str:
    """The stack that fits what runs the plans.

    A command that takes Megatron-LM's arguments is Megatron-LM. One that takes torchtitan's trains as this package's
    worker does (FSDP2, eager kernels, sequence parallelism), and of any other nothing is known.
    """
    if worker.trainer_arguments == "megatron_args":
        return "megatron"
    return "worker" if device == "cpu" else "worker-cuda"


def assumptions_of(space: Space, stack: str | None, changes: str, worker: WorkerCommand | None = None) -> Assumptions:
    """What predictions of a space take for granted.

    Args:
        stack: the name given; None: the one that fits the worker.
        changes: `name=value;name=value`.
        worker: what runs the plans; None: the space's.

    Raises:
        UserError: no such stack, assumption or value.
    """
    from autotune.cost.assumptions import stack as named_stack
    from autotune.cost.published import with_settings
    from autotune.profiling.command import worker_of

    name = stack or stack_of(space.cluster.device, worker or worker_of(space.worker))
    return with_settings(named_stack(name), changes)


def figures_of(space: Space, source: Path, assumptions: Assumptions) -> Machine:
    """The device's figures from a cluster file, or fitted to the trials of a study.

    A cluster file's share of the links' bandwidth belongs to the links it measured, so that of the space is kept.

    Raises:
        UserError: the file or the study can't be read, or is of another device than the space.
    """
    from autotune.cost.devices import catalogue
    from autotune.space.machine import Machine

    if not source.exists():
        raise UserError(f"--calibrated-by {source}: there is no such file or folder")
    if source.is_dir():
        return _fitted(space, source, assumptions)
    from autotune.profiling.calibrate import read_calibrated

    device, found = read_calibrated(source)
    if device is not None and device != space.cluster.device:
        raise UserError(f"--calibrated-by {source}: its figures are of {device}, not of {space.cluster.device}")
    here = space.machine or catalogue().get(space.cluster.device) or Machine
    return replace(found, link_efficiency=here.link_efficiency)


def _fitted(space: Space, study: Path, assumptions: Assumptions) -> Machine:
    """The figures fitted to a study's trials; standard error tells what the fit doesn't cover.

    A poor fit is used with a warning: without it predictions are no better. One that leaves the space's times open is
    refused: it would pass for a calibration.
    """
    from autotune.cost.devices import machine
    from autotune.profiling.refit import Fitter, refit, timed_plans
    from autotune.profiling.refit_reach import MOST_APART, reach
    from autotune.results.table import read_csv
    from autotune.space.space import load_space

    ran = load_space(study / "space.yaml")
    trials = timed_plans(read_csv(study / "trials.csv"))
    if not trials:
        raise UserError(f"--calibrated-by {study}: no plan of it ran within its limits")
    if ran.cluster.device != space.cluster.device:
        raise UserError(f"--calibrated-by {study}: it ran on {ran.cluster.device}, not on {space.cluster.device}")
    figures = ran.machine or machine(ran.cluster.device)
    fitted = refit(trials, ran.model, ran.cluster, ran.training, figures, assumptions=assumptions)
    typer.echo(fitted.sentence(), err=True)
    if doubt := fitted.doubt:
        typer.echo(f"warning: --calibrated-by {study}: the fit {doubt}", err=True)
    fitter = Fitter(ran.model, ran.cluster, ran.training, assumptions, figures)
    found = reach(fitted, fitter, trials, space)
    if found.misleads:
        raise UserError(
            f"--calibrated-by {study}: {'; '.join(found.remarks)}. Fits that explain its trials equally well predict "
            f"step times here that differ by a factor of {found.apart:.1f}, and at most {MOST_APART:g} can be used: "
            "give a study of passes of this size, a file of `autotune calibrate`, or none"
        )
    for remark in found.remarks:
        typer.echo(f"warning: --calibrated-by {study}: {remark}", err=True)
    here = (space.machine or machine(space.cluster.device)).link_efficiency
    if _links(ran) != _links(space) and fitted.machine.link_efficiency != here:
        typer.echo(
            f"warning: --calibrated-by {study}: its links are others than this space's, whose share stays {here:g}",
            err=True,
        )
        return fitted.machine.with_numbers(link_efficiency=here)
    return fitted.machine


def _links(space: Space) -> tuple[Link, Link]:
    return space.cluster.intra_node, space.cluster.inter_node
