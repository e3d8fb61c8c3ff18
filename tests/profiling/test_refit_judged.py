"""A fit to finished trials is judged: used where it helps, doubted where it is poor, refused where it misleads."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from autotune.cli import app
from autotune.cost.devices import Machine, machine
from autotune.cost.predict import Predictor
from autotune.errors import UserError
from autotune.profiling.refit import Refit, Trial, refit
from autotune.results.columns import Row
from autotune.results.table import write_csv
from autotune.space.space import Space, load_space

QUICKSTART = Path(__file__).parents[2] / "search_spaces" / "quickstart.yaml"
CPU = machine("cpu")


def told_by(figures: Machine, space: Space) -> list[Trial]:
    predictor = Predictor(space.model, space.cluster, space.training, machine_figures=figures)
    return [(plan, predictor.predict(plan).step_time_s) for plan in space.plans()]


def fit(trials: list[Trial], space: Space) -> Refit:
    return refit(trials, space.model, space.cluster, space.training, CPU)


def of_chance(space: Space) -> list[Trial]:
    dice = random.Random(1)
    return [(plan, 10 ** dice.uniform(-3, 0)) for plan in space.plans()]


def blurred(trials: list[Trial], share: float) -> list[Trial]:
    dice = random.Random(1)
    return [(plan, taken * dice.uniform(1 - share, 1 + share)) for plan, taken in trials]


@pytest.fixture
def quickstart() -> Space:
    return load_space(QUICKSTART)


@pytest.fixture
def study(tmp_path: Path, quickstart: Space) -> Callable[[list[Trial]], Path]:
    """Makes the folder of a study with these trials."""

    def make(trials: list[Trial]) -> Path:
        folder = tmp_path / "study"
        folder.mkdir()
        (folder / "space.yaml").write_text(quickstart.to_yaml())
        rows = []
        for plan, taken in trials:
            fields: dict[str, Any] = {name: getattr(plan, name) for name in plan.__dataclass_fields__}
            rows.append(Row(state="ok", fidelity="run", step_time_s=taken, tokens_per_s=1024 / taken, **fields))
        write_csv(rows, folder / "trials.csv")
        return folder

    return make


def predict(space: Path, study: Path) -> Any:
    done = CliRunner().invoke(app, ["predict", str(space), "--json", "--calibrated-by", str(study)])
    if isinstance(done.exception, UserError):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done


def larger(folder: Path, times: int) -> Path:
    values = yaml.safe_load(QUICKSTART.read_text())
    values["model"] |= {"hidden": 128 * times, "ffn_hidden": 352 * times, "sequence_length": 64 * times}
    path = folder / "larger.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def test_a_share_of_the_links_is_fitted_where_efficiency_alone_cannot_explain_the_trials(quickstart: Space) -> None:
    found = fit(told_by(CPU.with_numbers(efficiency=0.5, link_efficiency=0.1), quickstart), quickstart)
    assert found.numbers == ("efficiency", "link_efficiency")
    assert found.machine.link_efficiency == pytest.approx(0.1, rel=0.05)
    assert found.machine.efficiency == pytest.approx(0.5, rel=0.05)
    assert found.doubt is None


def test_a_cpu_faster_than_its_nominal_peak_gets_a_higher_peak_and_no_share_above_1(quickstart: Space) -> None:
    truth = CPU.with_numbers(peak_flops_float32=4 * CPU.peak_flops_float32)
    found = fit(told_by(truth, quickstart), quickstart)
    assert found.machine.efficiency == 1.0
    assert found.machine.peak_flops_float32 == pytest.approx(truth.peak_flops_float32 * truth.efficiency, rel=0.01)
    assert found.numbers == ("peak_flops_float32",)


def test_times_that_no_machine_explains_give_a_poor_fit(quickstart: Space) -> None:
    found = fit(of_chance(quickstart), quickstart)
    assert (found.doubt or "").startswith("is poor: trials left out of it are predicted")


def test_a_fit_that_changes_nothing_and_one_of_too_few_trials_are_doubted(quickstart: Space) -> None:
    noisy = blurred(told_by(CPU, quickstart), 0.15)
    assert "hardly helps" in (fit(noisy, quickstart).doubt or "")
    assert "too few to leave any out" in (fit(noisy[:1], quickstart).doubt or "")


def test_a_poor_fit_is_used_with_a_warning_that_has_its_error(study: Any, quickstart: Space) -> None:
    done = predict(QUICKSTART, study(of_chance(quickstart)))
    assert "warning: --calibrated-by" in done.stderr
    assert "the fit is poor: trials left out of it are predicted" in done.stderr
    assert json.loads(done.stdout)


def test_a_fit_that_helps_is_used_on_its_own_space_without_a_warning(study: Any, quickstart: Space) -> None:
    assert "warning" not in predict(QUICKSTART, study(told_by(CPU.with_numbers(efficiency=0.4), quickstart))).stderr


def test_a_space_of_larger_passes_is_warned_of_where_the_fits_agree(
    study: Any, quickstart: Space, tmp_path: Path
) -> None:
    told = predict(larger(tmp_path, 4), study(told_by(CPU.with_numbers(efficiency=0.1), quickstart))).stderr
    assert "it was fitted to layers of" in told
    assert "MFLOP a microbatch and rank, this space's are of" in told


def test_a_space_on_which_equally_good_fits_disagree_is_refused(study: Any, quickstart: Space, tmp_path: Path) -> None:
    folder = study(blurred(told_by(CPU.with_numbers(kernel_s=100e-6), quickstart), 0.6))
    with pytest.raises(UserError, match=r"explain its trials equally well predict .* differ by a factor of"):
        predict(larger(tmp_path, 8), folder)
