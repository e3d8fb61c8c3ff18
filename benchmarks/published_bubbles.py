"""Bubble rates of linear and interleaved schedules beside the published ones (arXiv 2401.10241, tables 5 and 9).

    python benchmarks/published_bubbles.py

Conventions of that table: latency on every hop, links without contention; bubble rate over the longest span of a
device; interleaved 1F1B waits at the wrap-around hop only for the first microbatch of each group of p (see
`PassCosts.wrap_every`); memory by table 1, M_B = 34h + 5as and M_W = 32h per token.
"""

from __future__ import annotations

from dataclasses import dataclass

from autotune.schedules.costs import PassCosts
from autotune.schedules.placement import linear_placement, loop_placement
from autotune.schedules.registry import build
from autotune.schedules.simulate import simulate

__all__ = ["SETTINGS", "Setting", "rates"]

SEQUENCE_LENGTH = 1024
COLUMNS = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p")


@dataclass(frozen=True)
class Setting:
    """One row of table 5: sizes of table 3, times of table 9 in milliseconds, published rates as in COLUMNS."""

    model: str
    devices: int
    microbatches: int
    chunks: int
    hidden: int
    heads: int
    times: tuple[float, float, float]
    comm: float
    published: tuple[float, ...]

    def costs(self, name: str) -> PassCosts:
        """Costs of the setting for a schedule."""
        if name == "interleaved-1f1b":
            placement = loop_placement(self.devices, self.chunks)
            return PassCosts.uniform(placement, *self.times, self.comm, wrap_every=self.devices)
        whole = 34 * self.hidden + 5 * self.heads * SEQUENCE_LENGTH
        kept = 32 * self.hidden / whole
        return PassCosts.uniform(linear_placement(self.devices), *self.times, self.comm, kept=kept)


def _model(
    model: str, devices: int, chunks: int, hidden: int, heads: int, rows: list[tuple[int, tuple, float, tuple]]
) -> list[Setting]:
    return [
        Setting(model, devices, m, chunks, hidden, heads, times, comm, published) for m, times, comm, published in rows
    ]


SETTINGS = [
    *_model(
        "1.5B", 8, 3, 2304, 24,
        [
            (24, (18.522, 18.086, 9.337), 0.601, (0.2431, 0.1055, 0.1585, 0.1083, 0.1585, 0.0433)),
            (32, (18.513, 18.086, 9.331), 0.626, (0.1985, 0.0818, 0.1242, 0.0837, 0.1242, 0.0039)),
            (64, (18.546, 18.097, 9.321), 0.762, (0.1240, 0.0443, 0.0674, 0.0444, 0.0674, 0.0026)),
        ],
    ),
    *_model(
        "6.2B", 8, 4, 4096, 32,
        [
            (24, (29.718, 29.444, 19.927), 0.527, (0.2347, 0.0808, 0.1323, 0.0698, 0.1323, 0.0029)),
            (32, (29.802, 29.428, 19.530), 0.577, (0.1898, 0.0628, 0.1045, 0.0559, 0.1045, 0.0022)),
            (64, (29.935, 29.621, 19.388), 0.535, (0.1091, 0.0320, 0.0554, 0.0294, 0.0554, 0.0010)),
        ],
    ),
    *_model(
        "14.6B", 16, 3, 5120, 40,
        [
            (48, (11.347, 11.248, 8.132), 0.377, (0.2552, 0.1104, 0.1397, 0.0672, 0.1397, 0.0066)),
            (64, (11.307, 11.254, 8.101), 0.379, (0.2082, 0.0852, 0.1088, 0.0516, 0.1088, 0.0054)),
            (128, (11.325, 11.308, 8.109), 0.378, (0.1251, 0.0445, 0.0576, 0.0266, 0.0576, 0.0028)),
        ],
    ),
    *_model(
        "28.3B", 32, 2, 6144, 48,
        [
            (96, (10.419, 10.207, 7.715), 0.408, (0.2646, 0.1493, 0.1421, 0.0641, 0.1421, 0.0038)),
            (128, (10.408, 10.204, 7.703), 0.408, (0.2168, 0.1164, 0.1106, 0.0490, 0.1106, 0.0029)),
            (256, (10.402, 10.248, 7.698), 0.460, (0.1352, 0.0624, 0.0594, 0.0257, 0.0594, 0.0018)),
        ],
    ),
]  # fmt: skip


def rates(setting: Setting) -> list[float]:
    """Our bubble rate of every schedule of COLUMNS."""
    found = []
    for name in COLUMNS:
        costs = setting.costs(name)
        stages = setting.chunks if name == "interleaved-1f1b" else 1
        schedule = build(name, setting.devices, setting.microbatches, stages, costs=costs)
        found.append(simulate(schedule, costs).span_bubble_rate)
    return found


def main() -> None:
    """Print ours and the published rate for every setting and schedule."""
    print("model   p    m  " + "".join(f"{name:>22}" for name in COLUMNS))
    better = worse = 0
    for setting in SETTINGS:
        cells = []
        for ours, published in zip(rates(setting), setting.published, strict=True):
            difference = round(ours, 4) - published
            better, worse = better + (difference < 0), worse + (difference > 0)
            mark = "=" if difference == 0 else "<" if difference < 0 else ">"
            cells.append(f"{f'{ours:.4f} {mark} {published:.4f}':>22}")
        print(f"{setting.model:6}{setting.devices:3}{setting.microbatches:5}  " + "".join(cells))
    print(f"(ours, published) {better} below, {worse} above, {len(SETTINGS) * len(COLUMNS) - better - worse} equal")


if __name__ == "__main__":
    main()
