"""What the cost model says of every plan of a space before any is run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from autotune.cost.assumptions import Assumptions
from autotune.cost.devices import Machine
from autotune.cost.predict import Predictor
from autotune.errors import UserError
from autotune.results.predicted import Predicted
from autotune.space.plan import Plan
from autotune.space.space import Space

__all__ = ["Forecast", "Forecaster", "forecast_all"]


@dataclass(frozen=True)
class Forecast:
    """What is expected of one plan.

    Attributes:
        refusal: why it can't fit, even if the estimate is too high by the model's proven error; None if it may fit.
    """

    predicted: Predicted
    refusal: str | None


class Forecaster:
    """Predicts the plans of one space; about a millisecond each.

    Args:
        assumptions: what software will run them; None: this package's worker.
        figures: of one device; None: the space's, or else the catalogue's.
        refuse: whether plans whose memory can't fit are refused. The proven error is
            `autotune.cost.memory.MEMORY_ERROR`: no published run, and no run of this package's worker on CPU ranks,
            needs less than its prediction by more than that (docs/cost-model.md).

    Raises:
        UserError: the catalogue has no figures for the space's device.
    """

    def __init__(
        self,
        space: Space,
        assumptions: Assumptions | None = None,
        figures: Machine | None = None,
        refuse: bool = True,
    ) -> None:
        self._predictor = Predictor(space.model, space.cluster, space.training, assumptions, figures or space.machine)
        self._limit = space.cluster.memory_limit_bytes if refuse else None

    @property
    def figures(self) -> Machine:
        """The device's figures."""
        return self._predictor.machine

    @property
    def assumptions(self) -> Assumptions:
        """What is taken for granted about the software."""
        return self._predictor.assumptions

    def identity(self) -> dict[str, Any]:
        """Everything beside the space that decides a forecast, as plain values."""
        return {
            "assumptions": asdict(self.assumptions),
            "machine": asdict(self.figures),
            "refuse": self._limit is not None,
        }

    def forecast(self, plan: Plan) -> Forecast:
        """What to expect of `plan`.

        Raises:
            UserError: its schedule can't be built.
        """
        prediction = self._predictor.predict(plan)
        return Forecast(Predicted.of(prediction), prediction.refusal(self._limit))


def forecast_all(
    forecaster: Forecaster | None, plans: Iterable[Plan], stop: Callable[[], object] = lambda: False
) -> Mapping[Plan, Forecast]:
    """Forecasts of all plans until `stop`; those whose schedule can't be built are left out: running them says why."""
    found: dict[Plan, Forecast] = {}
    if forecaster is None:
        return found
    for plan in plans:
        if stop():
            break
        with contextlib.suppress(UserError):
            found[plan] = forecaster.forecast(plan)
    return found
