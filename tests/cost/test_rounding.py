"""Parts of a step are never below 0 by rounding, and a real negative part is not hidden."""

from __future__ import annotations

from pathlib import Path

from autotune.cost.predict import Predictor
from autotune.cost.prediction import without_rounding
from autotune.space.space import load_space


def test_no_part_of_any_predicted_step_is_below_zero() -> None:
    space = load_space(Path(__file__).parents[2] / "search_spaces/dense-34b-64xh100.yaml")
    predictor = Predictor(space.model, space.cluster, space.training, machine_figures=space.machine)
    for plan in space.plans():
        assert min(vars(predictor.predict(plan).breakdown).values()) >= 0.0, plan.describe()


def test_only_rounding_is_taken_away() -> None:
    assert without_rounding(-1.8e-15, 3.0) == 0.0
    assert without_rounding(0.5, 3.0) == 0.5
    assert without_rounding(-1e-6, 3.0) == -1e-6
