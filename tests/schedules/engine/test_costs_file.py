"""Files of real costs: read into sources, and every mistake named."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.schedules.engine.costs_file import read_costs
from autotune.schedules.placement import make_placement

V4 = make_placement("v", 4, 2)


def written(folder: Path, text: str) -> Path:
    path = folder / "costs.yaml"
    path.write_text(text)
    return path


def test_a_device_share_is_cut_into_equal_stages_with_latencies_by_node(tmp_path: Path) -> None:
    file = read_costs(
        written(
            tmp_path,
            "latency: {intra_node: 0.1, inter_node: 0.5, devices_per_node: 2}\n"
            "device: {forward: 1, backward: 2, weight: 3, activation: 8, kept: 4}\n",
        )
    )
    (cut,) = file.source(4, balance=False)(V4)
    assert cut.costs.forward == (0.5,) * 8
    assert cut.costs.kept == (2.0,) * 8
    assert cut.costs.latency(0, 1) == 0.1
    assert cut.costs.latency(1, 2) == 0.5
    assert cut.costs.latency(3, 3) == 0.0


def test_stages_fit_placements_of_their_number_only(tmp_path: Path) -> None:
    stage = "  - {forward: 1, backward: 1, weight: 1}\n"
    file = read_costs(written(tmp_path, "stages:\n" + 8 * stage + "memory_limit: [2, 2, 3, 4]\n"))
    source = file.source(4, balance=False)
    assert len(source(V4)) == 1
    assert source(make_placement("linear", 4, 1)) == []
    assert file.memory_limit == [2, 2, 3, 4]


def test_layers_are_cut_evenly_and_balanced_when_asked(tmp_path: Path) -> None:
    file = read_costs(
        written(
            tmp_path,
            "layers: {count: 16, forward: 1, backward: 1, weight: 1}\nhead: {forward: 3, backward: 3, weight: 3}\n",
        )
    )
    linear = make_placement("linear", 4, 1)
    (even,) = file.source(4, balance=False)(linear)
    assert even.layer_split == (4, 4, 4, 4)
    assert even.costs.forward == (4, 4, 4, 7)
    splits = [cut.layer_split for cut in file.source(4, balance=True)(linear)]
    assert splits[0] == (4, 4, 4, 4)
    assert splits[1][-1] < 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("latency: 0\n", "exactly one of device, stages and layers, not none"),
        ("device: {forward: 1, backward: 1}\n", "device.weight"),
        ("device: {forward: 1, backward: 1, weight: -1}\n", "device.weight"),
        ("device: {forward: 1, backward: 1, weight: 1, kept: 2}\n", "kept 2 is more than the activation 1"),
        ("device: {forward: 1, backward: 1, weight: 1, speed: 2}\n", "device.speed"),
        ("stages: [{forward: 1, backward: 1, weight: 1}]\nhead: {forward: 1}\n", "embedding and head go with layers"),
        ("layers: [\n", "not valid YAML"),
        ("7\n", "must hold keys"),
    ],
)
def test_mistakes_name_the_field_and_the_rule(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_costs(written(tmp_path, text))


def test_a_missing_file_and_balance_without_layers_are_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="can't read"):
        read_costs(tmp_path / "none.yaml")
    file = read_costs(written(tmp_path, "device: {forward: 1, backward: 1, weight: 1}\n"))
    with pytest.raises(UserError, match="needs the costs of layers"):
        file.source(4, balance=True)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("device: {forward: 1e300, backward: 1e300, weight: 1e300}\n", "device.forward"),
        ("device: {forward: 1e-300, backward: 0, weight: 0}\n", "0 or from 1e-09"),
        ("device: {forward: 1, backward: .nan, weight: 1}\n", "device.backward"),
        ("device: {forward: 1, backward: 1, weight: 1, activation: 1e300}\n", "device.activation"),
        ("latency: 1e-9\ndevice: {forward: 10, backward: 1, weight: 1}\n", "from 1e-09 to 10: none may be"),
    ],
)
def test_costs_that_cannot_be_calculated_with_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_costs(written(tmp_path, text))
