"""The commands `predict` and `validate`; `mount` adds them to the command line. Imports no torch."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from autotune.cli_figures import Assume, CalibratedBy, Stack, assumptions_of, figures_of
from autotune.errors import UserError

__all__ = ["mount", "predict", "validate"]


def mount(app: typer.Typer) -> None:
    """Adds the commands to `app`."""
    app.command()(predict)
    app.command()(validate)


def predict(
    space: Annotated[Path, typer.Argument(help="space file (YAML), or a JSON file with keys space and plan")],
    plan: Annotated[
        str | None, typer.Option(help="one plan as JSON: every field of Plan, or some to select by")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="where the time and the memory of the plan go")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    top: Annotated[
        int,
        typer.Option(
            min=1,
            help="plans to print: fastest that fit first, then those that fit only if their prediction is too high",
        ),
    ] = 10,
    stack: Stack = None,
    assume: Assume = "",
    calibrated_by: CalibratedBy = None,
    machine: Annotated[str, typer.Option(help="machine numbers to change: name=value;name=value")] = "",
) -> None:
    """Predict step time and peak memory of one plan, or rank all plans of a space, without running anything."""
    from autotune.cost.explain import explain as explained
    from autotune.cost.explain import over_limit_legend, summary_line, to_dict

    loaded, fixed = _load(space)
    predictor = _predictor(loaded, stack, assume, calibrated_by, machine)
    limit = loaded.cluster.memory_limit_bytes
    plans = [fixed] if fixed is not None else _matching(loaded, plan)

    def tell(predictions: list[Any]) -> None:
        told = [explained(one, limit) if explain else summary_line(one, limit) for one in predictions]
        refusals = ["" if explain else one.refusal(limit) for one in predictions]
        between = "\n" if explain and len(told) > 1 else ""
        for text, refusal in zip(told, refusals, strict=True):
            typer.echo((f"{text}\n  {refusal}" if refusal else text) + between)
        if limit is not None and any(one.is_over(limit) for one in predictions):
            typer.echo(over_limit_legend(limit))

    if len(plans) == 1:
        only = predictor.predict(plans[0], exact=True)
        if as_json:
            typer.echo(json.dumps(to_dict(only, limit), indent=2))
        else:
            tell([only])
        return
    ranked = sorted(map(predictor.predict, _told(plans)), key=lambda one: _rank(one, limit))
    if as_json:
        typer.echo(json.dumps([to_dict(prediction, limit) for prediction in ranked[:top]], indent=2))
        return
    typer.echo(f"{_counts(ranked, limit)}; the first {min(top, len(ranked))}:")
    tell([predictor.predict(one.plan, exact=True) if explain else one for one in ranked[:top]])


def _rank(prediction: Any, limit: float | None) -> tuple[bool, bool, float]:
    """Plans that fit before those that fit only if the prediction is too high, and these before refused ones."""
    return prediction.refusal(limit) is not None, not prediction.fits(limit), prediction.step_time_s


def _counts(predictions: list[Any], limit: float | None) -> str:
    """How many plans fit, how many don't but aren't refused, and how many are refused."""
    from autotune.cost.memory import OVER_LIMIT

    fit = sum(one.fits(limit) for one in predictions)
    over = sum(one.is_over(limit) for one in predictions)
    refused = len(predictions) - fit - over
    return f"{len(predictions)} plans: {fit} fit, {over} {OVER_LIMIT}, {refused} refused for memory"


def validate(
    data: Annotated[
        Path | None,
        typer.Option(help="folder with your own tables.csv, models.csv and runs.csv; default: published runs"),
    ] = None,
    rows: Annotated[bool, typer.Option(help="print every row")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Compare predictions with published (or your own) measured runs: error of each row, mean and maximum."""
    from dataclasses import asdict

    from autotune.cost.validate import render
    from autotune.cost.validate import validate as compare

    figures = compare(data)
    if as_json:
        typer.echo(json.dumps([asdict(f) | {"mean": f.mean, "maximum": f.maximum} for f in figures], indent=2))
    else:
        typer.echo(render(figures, rows))


def _load(path: Path) -> tuple[Any, Any]:
    """The space, and the plan when the file names one."""
    from autotune.space.plan import Plan
    from autotune.space.rules import plan_problems
    from autotune.space.space import load_space

    if path.suffix != ".json":
        from autotune.profiling.command import worker_of
        from autotune.search.worker_plans import for_worker

        loaded = load_space(path)
        return for_worker(loaded, worker_of(loaded.worker)), None
    values = _plan_file(path)
    plan, space = Plan.from_dict(values["plan"]), path.parent / values["space"]
    loaded = load_space(space)
    if problems := plan_problems(plan, loaded.model, loaded.cluster, loaded.training):
        raise UserError(f"{path}: this plan can't run in {space}: {'; '.join(problems)}")
    return loaded, plan


def _plan_file(path: Path) -> dict[str, Any]:
    """What a plan file holds: `space`, a path, and `plan`, every field of a Plan. Raises UserError."""
    from autotune.space.plan import Plan

    form = 'a plan file is JSON such as {"space": "my-space.yaml", "plan": {"pp": 4, ...}}'
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON ({error}); {form}") from None
    if not isinstance(values, dict) or not isinstance(values.get("space"), str):
        raise UserError(f"{path}: space must be the path of a space file; {form}")
    if not isinstance(plan := values.get("plan"), dict):
        raise UserError(f"{path}: plan must be an object with the fields of a plan; {form}")
    fields = list(Plan.__dataclass_fields__)
    if missing := [name for name in fields if name not in plan]:
        raise UserError(f"{path}: the plan lacks {', '.join(missing)}; its fields are {', '.join(fields)}")
    if unknown := [name for name in plan if name not in fields]:
        raise UserError(f"{path}: the plan has no field {unknown[0]!r}; its fields are {', '.join(fields)}")
    if not isinstance(plan["layer_split"], list):
        raise UserError(f"{path}: layer_split must list the layers of every stage, not {plan['layer_split']!r}")
    if not isinstance(plan["schedule"], str) or not isinstance(plan["recompute"], str):
        raise UserError(f"{path}: schedule and recompute are texts")
    return values


def _told(plans: list[Any]) -> Iterator[Any]:
    """The plans; where predicting them takes long, how far it has come goes to standard error."""
    told = time.monotonic() - SAY_EVERY_S + SILENT_S
    for number, plan in enumerate(plans):
        if time.monotonic() >= told + SAY_EVERY_S:
            told = time.monotonic()
            typer.echo(f"predicted {number} of {len(plans)} plans", err=True)
        yield plan


SILENT_S, SAY_EVERY_S = 3.0, 10.0


def _no_legal_plan(space: Any) -> str:
    """That a space has no legal plan, and why: each rule that refuses points, with an example."""
    from autotune.space.describe import describe_space

    why = [f"  {entry['rule']}: {entry['example']}" for entry in describe_space(space)["refused_by_rule"]]
    return "\n".join(["the space has no legal plan:", *why])


def _matching(space: Any, selection: str | None) -> list[Any]:
    """Legal plans of the space whose fields have the selected values."""
    plans = list(space.plans())
    if selection is None:
        chosen = plans
    else:
        try:
            wanted = json.loads(selection)
        except (ValueError, RecursionError) as error:
            raise UserError(f'--plan is no JSON ({error}); write fields such as {{"pp": 4, "tp": 2}}') from None
        if not isinstance(wanted, dict):
            raise UserError('--plan must be a JSON object such as {"pp": 4, "tp": 2}')
        known = list(plans[0].to_dict()) if plans else []
        unknown = [key for key in wanted if known and key not in known]
        if unknown:
            raise UserError(f"--plan: no field {unknown[0]!r}; a plan has {', '.join(known)}")
        chosen = [plan for plan in plans if all(plan.to_dict()[key] == value for key, value in wanted.items())]
    if not chosen:
        raise UserError(f"no plan of the {len(plans)} legal ones matches" if plans else _no_legal_plan(space))
    return chosen


def _predictor(space: Any, stack: str | None, assume: str, calibrated_by: Path | None, numbers: str) -> Any:
    from autotune.cost.devices import machine
    from autotune.cost.predict import Predictor

    assumptions = assumptions_of(space, stack, assume)
    if calibrated_by is None:
        figures = space.machine or machine(space.cluster.device)
    else:
        figures = figures_of(space, calibrated_by, assumptions)
    changes = dict(_numbers(numbers, list(figures.__dataclass_fields__)))
    return Predictor(space.model, space.cluster, space.training, assumptions, figures.with_numbers(**changes))


def _numbers(text: str, known: list[str]) -> Iterator[tuple[str, float]]:
    from autotune.space.machine import out_of_range

    for setting in filter(None, (part.strip() for part in text.split(";"))):
        name, _, value = setting.partition("=")
        if name not in known or name == "name":
            raise UserError(f"--machine: no number {name!r}; known: {', '.join(known[1:])}")
        try:
            number = float(value)
        except ValueError:
            raise UserError(f"--machine: {name} must be a number, not {value!r}") from None
        if problem := out_of_range(name, number):
            raise UserError(f"--machine: {name} {problem}, not {value.strip()}")
        yield name, number
