"""The `predict` fidelity against real runs of the quickstart model on 4 CPU ranks: nothing measured, nothing fitted.

    python benchmarks/prediction_without_running.py [--plans 24]

Memory of every rank comes from formulas alone. Step times rest on nominal figures of a CPU core, so their order says
more than their size: calibrate, or use the `profile` fidelity (`prediction_accuracy.py`), where seconds matter.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from prediction_accuracy import QUICKSTART, evenly, median_error, request_of, run_all, spearman, whole_space

from autotune.cost.predict import Predictor
from autotune.space.space import load_space


def main() -> None:
    """Runs the plans and prints both truths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", type=int, default=24)
    options = parser.parse_args()
    space = whole_space(load_space(QUICKSTART), 4)
    requests = [request_of(space, plan, number, 3) for number, plan in enumerate(evenly(space.plans(), options.plans))]
    with tempfile.TemporaryDirectory() as folder:
        measured = run_all(requests, Path(folder))
    predictor = Predictor(space.model, space.cluster, space.training)
    predictions = [predictor.predict(request.plan, exact=True) for request in requests]
    errors = []
    for prediction, truth in zip(predictions, measured, strict=True):
        assert truth.peak_memory_bytes is not None
        errors.append(prediction.peak_memory_bytes / truth.peak_memory_bytes - 1)
        print(
            f"{prediction.plan.describe():48} memory {prediction.peak_memory_bytes / 2**20:7.2f} MiB predicted "
            f"{truth.peak_memory_bytes / 2**20:7.2f} measured ({errors[-1]:+6.1%})  "
            f"step {prediction.step_time_s * 1e3:7.1f} ms predicted {truth.step_time_s * 1e3:7.1f} measured"
        )
    order = spearman([p.step_time_s for p in predictions], [truth.step_time_s for truth in measured])
    print(
        f"peak memory: median error {median_error(errors):.1%}, bias {statistics.median(errors):+.1%}, "
        f"largest {max(map(abs, errors)):.1%}; step time: rank correlation {order:.2f}"
    )


if __name__ == "__main__":
    main()
