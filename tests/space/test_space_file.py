"""Mistakes in a space file are told all at once, each with its place, its value and what would be right."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import UserError
from autotune.space.devices import DEVICES
from autotune.space.machine import Machine
from autotune.space.rules import RULES
from autotune.space.sections import SECTIONS, LinkSection, LinksSection, MachineSection
from autotune.space.space import Space, load_space
from autotune.space.units import format_bytes, parse_bandwidth, parse_size, parse_time

ROOT = Path(__file__).parents[2]

GOOD = """
model: {layers: 4, hidden: 64, heads: 4, ffn_hidden: 128, vocab: 256, sequence_length: 32}
cluster: {devices_per_node: 4}
training: {global_batch_size: 8}
"""


@pytest.fixture
def load(tmp_path: Path) -> Any:
    def load_text(text: str) -> Space:
        path = tmp_path / "my-space.yaml"
        path.write_text(text)
        return load_space(path)

    return load_text


@pytest.fixture
def refusal(load: Any) -> Any:
    def text_of(text: str) -> str:
        with pytest.raises(UserError) as caught:
            load(text)
        return str(caught.value)

    return text_of


def test_the_shortest_file_has_documented_defaults(load: Any) -> None:
    space = load(GOOD)
    assert space.name == "my-space"
    assert space.search.pp == (1, 2, 4)
    assert space.search.tp == (1, 2, 4)
    assert space.search.micro_batch_size == (1, 2, 4)
    assert space.search.schedule == ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "v-half", "v-min")
    assert space.cluster.memory_limit_bytes is None
    assert space.cluster.intra_node == DEVICES["cpu"].intra_node
    assert (space.trial.warmup_steps, space.trial.measured_steps, space.trial.timeout_s) == (1, 3, 600.0)
    assert (space.model.kv_heads, space.model.head_dim, space.model.max_positions) == (4, 16, 0)


def test_a_scalar_is_a_list_of_one(load: Any) -> None:
    one = load(GOOD + "search: {pp: 2, tp: 1, micro_batch_size: 2, schedule: 1f1b, recompute: full}")
    many = load(GOOD + "search: {pp: [2], tp: [1], micro_batch_size: [2], schedule: [1f1b], recompute: [full]}")
    assert one == many


def test_a_value_given_twice_counts_once(load: Any) -> None:
    assert load(GOOD + "search: {pp: [2, 2, 1]}").search.pp == (2, 1)


def test_the_baseline_is_added_and_said(load: Any) -> None:
    space = load(GOOD + "search: {schedule: [zb-h1]}")
    assert space.search.schedule == ("1f1b", "zb-h1")
    assert any("1f1b was added" in note for note in space.notes)
    alone = load(GOOD + "search: {schedule: [zb-h1], baseline: false}")
    assert alone.search.schedule == ("zb-h1",)
    assert alone.notes == ()


def test_memory_limits_and_links_are_read_with_units(load: Any) -> None:
    text = GOOD.replace(
        "{devices_per_node: 4}",
        "{devices_per_node: 4, memory_limit: 8GiB, links: {intra_node: {latency: 5us, bandwidth: 200Gbit/s}}}",
    )
    cluster = load(text).cluster
    assert cluster.memory_limit_bytes == 8 * 1024**3
    assert cluster.intra_node.latency_s == pytest.approx(5e-6)
    assert cluster.intra_node.bandwidth_bytes_per_s == 25e9
    assert cluster.inter_node == DEVICES["cpu"].inter_node


def test_an_accelerator_brings_its_memory_unless_the_file_lifts_the_limit(load: Any) -> None:
    h100 = GOOD.replace("devices_per_node: 4", "devices_per_node: 4, device: h100")
    assert load(h100).cluster.memory_limit_bytes == 80 * 10**9
    free = GOOD.replace("devices_per_node: 4", "devices_per_node: 4, device: h100, memory_limit: null")
    assert load(free).cluster.memory_limit_bytes is None


@pytest.mark.parametrize(
    ("text", "place", "nearest"),
    [
        (GOOD + "serach: {pp: 1}", "serach", "search"),
        (GOOD + "search: {micro_batchsize: 1}", "search.micro_batchsize", "micro_batch_size"),
        (GOOD.replace("hidden:", "hiden:"), "model.hiden", "hidden"),
        (GOOD.replace("devices_per_node", "device_per_node"), "cluster.device_per_node", "devices_per_node"),
        (GOOD + "trial: {time_out_s: 3}", "trial.time_out_s", "timeout_s"),
        (
            GOOD.replace("devices_per_node: 4", "devices_per_node: 4, links: {intranode: {}}"),
            "cluster.links.intranode",
            "intra_node",
        ),
        (
            GOOD.replace("devices_per_node: 4", "devices_per_node: 4, links: {intra_node: {latancy: 1us}}"),
            "cluster.links.intra_node.latancy",
            "latency",
        ),
        (
            GOOD.replace("devices_per_node: 4", "devices_per_node: 4, machine: {peak_flop: 1}"),
            "cluster.machine.peak_flop",
            "peak_flops",
        ),
        (GOOD.replace("heads: 4", "heads: 4, rope_scaling: {kin: linear}"), "model.rope_scaling.kin", "kind"),
        (GOOD + "worker: {command: run, reader: {kinds: json}}", "worker.reader.kinds", "kind"),
    ],
)
def test_an_unknown_key_is_refused_with_its_place_and_the_nearest_known_one(
    refusal: Any, text: str, place: str, nearest: str
) -> None:
    message = refusal(text)
    assert "my-space.yaml:" in message
    assert f"{place}: unknown key" in message
    assert f"did you mean {nearest}?" in message


@pytest.mark.parametrize(
    ("change", "place", "value", "legal"),
    [
        ("search: {pp: [1, two]}", "search.pp[1]", "'two'", "whole number"),
        ("search: {pp: [1, true]}", "search.pp[1]", "True", "whole number"),
        ("search: {tp: 0}", "search.tp[0]", "0", "at least 1"),
        ("search: {pp: []}", "search.pp", "[]", "at least one value"),
        ("search: {schedule: [1f1b, zb-h3]}", "search.schedule[1]", "zb-h3", "zb-h1"),
        ("search: {recompute: [none, selective]}", "search.recompute[1]", "'selective'", "none, full"),
        ("search: {baseline: maybe}", "search.baseline", "'maybe'", "true or false"),
        ("search: [1]", "search", "[1]", "mapping"),
        ("trial: {measured_steps: 1}", "trial.measured_steps", "1", "at least 3"),
        ("trial: {timeout_s: soon}", "trial.timeout_s", "'soon'", "number"),
        ("trial: {timeout_s: 0s}", "trial.timeout_s", "'0s'", "above 0"),
        ("trial: {hang_timeout_s: -1}", "trial.hang_timeout_s", "-1", "above 0"),
        ("trial: {timeout_s: .inf}", "trial.timeout_s", "inf", "15us, 2ms, 1.5s"),
        ("name: a/b", "name", "'a/b'", "letters"),
        ("name: ../up", "name", "'../up'", "letters"),
    ],
)
def test_a_wrong_value_is_refused_with_line_place_value_and_legal_values(
    refusal: Any, change: str, place: str, value: str, legal: str
) -> None:
    message = refusal(GOOD + change)
    assert f"my-space.yaml:5: {place}: " in message
    assert value in message
    assert legal in message


@pytest.mark.parametrize(
    ("old", "new", "place", "told"),
    [
        ("devices_per_node: 4", "devices_per_node: 4, device: h10", "cluster.device", "did you mean h100?"),
        ("devices_per_node: 4", "devices_per_node: 4, device: gpu", "cluster.device", "did you mean cuda?"),
        ("devices_per_node: 4", "devices_per_node: 4, memory_limit: 8 gigs", "cluster.memory_limit", "8GiB"),
        ("devices_per_node: 4", "nodes: 2", "cluster.devices_per_node", "missing"),
        ("global_batch_size: 8", "dtype: float16", "training.dtype", "float32, bfloat16"),
        ("heads: 4", "heads: 4, kv_heads: 3", "model.kv_heads", "doesn't divide heads = 4"),
        ("heads: 4", "heads: 5", "model.heads", "doesn't divide hidden = 64"),
        ("heads: 4", "heads: 4, head_dim: 15", "model.head_dim", "even"),
        ("layers: 4, ", "", "model.layers", "missing"),
        ("heads: 4", "heads: 4, activation: swigluu", "model.activation", "did you mean swiglu?"),
        ("heads: 4", "heads: 4, gelu_tanh: true", "model.gelu_tanh", "activation: gelu"),
        ("heads: 4", "heads: 4, max_positions: 64", "model.max_positions", "positions: learned"),
        ("heads: 4", "heads: 4, positions: learned, max_positions: 31", "model.max_positions", "32"),
        ("heads: 4", "heads: 4, hf_config: nowhere.json", "model.hf_config", "nowhere.json"),
        ("heads: 4", "heads: 4, hf_config: nowhere.json", "model.heads", "not both"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(refusal: Any, old: str, new: str, place: str, told: str) -> None:
    message = refusal(GOOD.replace(old, new))
    assert f"{place}: " in message
    assert told in message


def test_all_problems_of_all_sections_are_told_at_once(refusal: Any) -> None:
    text = """
model: {layers: 0, hidden: 64, heads: 5, ffn_hidden: 1, vocab: 2, sequence_length: 8}
cluster: {devices_per_node: 4, device: tpu, memory_limit: -3}
trainng: {}
search: {schedule: zb-h9, pp: [x, -1]}
"""
    message = refusal(text)
    for place in (
        "model.layers",
        "cluster.device",
        "cluster.memory_limit",
        "trainng",
        "training",
        "search.pp[0]",
        "search.pp[1]",
        "search.schedule[0]",
    ):
        assert f"{place}: " in message
    assert "8 problems" in message


def test_a_key_set_twice_is_refused_with_both_lines(refusal: Any) -> None:
    message = refusal(GOOD + "search:\n  pp: 1\n  tp: 1\n  pp: 2\n")
    assert "my-space.yaml:8: search.pp" in message
    assert "line 6" in message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "empty"),
        ("- 1\n- 2\n", "mapping"),
        ("model: [1, 2", "not valid YAML"),
        ("a: 1\n---\nb: 2\n", "not valid YAML"),
        ("model: !!python/object/apply:os.system ['true']\n", "not valid YAML"),
        (GOOD + "search: {pp: 1, tp: 1}\n\tname: x\n", "not valid YAML"),
    ],
)
def test_what_is_no_space_file_is_refused_with_its_path(refusal: Any, text: str, told: str) -> None:
    message = refusal(text)
    assert "my-space.yaml" in message
    assert told in message


def test_a_file_that_nests_itself_or_explodes_is_refused_quickly(refusal: Any) -> None:
    assert "my-space.yaml" in refusal("model: &a [*a]\n")
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n"
    for previous, name in zip("abcdefghijk", "bcdefghijkl", strict=True):
        bomb += f"{name}: &{name} [{', '.join(f'*{previous}' for _ in range(9))}]\n"
    assert "its aliases stand for more than 100000 values" in refusal(bomb)
    merged = "a: &a {x: 1}\n"
    for previous, name in zip("abcdefghijklmnopqrstuvw", "bcdefghijklmnopqrstuvwx", strict=True):
        merged += f"{name}: &{name} {{<<: [*{previous}, *{previous}, *{previous}]}}\n"
    assert "its aliases stand for" in refusal(merged)
    assert "longer than 4 MiB" in refusal("# " + "x" * (4 << 20))


def test_unreadable_files_are_refused_with_their_path(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.yaml"):
        load_space(tmp_path / "nowhere.yaml")
    with pytest.raises(UserError, match="can't read"):
        load_space(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9\n")
    with pytest.raises(UserError, match="UTF-8"):
        load_space(tmp_path / "latin.yaml")


def test_lists_that_span_too_many_points_are_refused(refusal: Any) -> None:
    many = ", ".join(map(str, range(1, 200)))
    assert "at most 1,000,000" in refusal(GOOD + f"search: {{pp: [{many}], tp: [{many}], micro_batch_size: [{many}]}}")


def test_the_model_config_is_sought_beside_the_space_file(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "models"
    folder.mkdir(parents=True)
    shipped = ROOT / "search_spaces" / "models" / "gpt2" / "config.json"
    (folder / "my-gpt.json").write_text(shipped.read_text())
    path = tmp_path / "deep" / "space.yaml"
    path.write_text(
        "model: {hf_config: models/my-gpt.json, sequence_length: 64}\n"
        "cluster: {devices_per_node: 2}\ntraining: {global_batch_size: 4}\n"
    )
    space = load_space(path)
    assert space.model.parameter_count() == 124_439_808
    assert space.model.name == "my-gpt"
    assert any("dropout" in note for note in space.notes)


@pytest.mark.parametrize(
    ("text", "number"),
    [("8GiB", 8 * 2**30), ("80GB", 80 * 10**9), ("1.5 KiB", 1536), ("1_000", 1000), (4096, 4096), ("8e9", 8 * 10**9)],
)
def test_sizes(text: object, number: int) -> None:
    assert parse_size(text) == number


@pytest.mark.parametrize("text", ["8Gi", "GiB", "8 GiB GiB", "-1GB", "0", "8gib", True, None, [1], "nan", "1e999GB"])
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


@pytest.mark.parametrize(("text", "seconds"), [("900s", 900.0), ("1.5s", 1.5), ("90", 90.0), ("1e2", 100.0)])
def test_timeouts_take_times_with_units(tmp_path: Path, text: str, seconds: float) -> None:
    path = tmp_path / "my-space.yaml"
    path.write_text(GOOD + f"trial: {{timeout_s: {text}, hang_timeout_s: {text}}}")
    trial = load_space(path).trial
    assert (trial.timeout_s, trial.hang_timeout_s) == (seconds, seconds)


def test_times_and_bandwidths() -> None:
    assert parse_time("15us") == pytest.approx(15e-6)
    assert parse_time("2 ms") == pytest.approx(2e-3)
    assert parse_time(0.5) == 0.5
    assert parse_bandwidth("300GB/s") == 300e9
    assert parse_bandwidth("25GiB/s") == 25 * 2**30
    assert parse_bandwidth("200Gbit/s") == parse_bandwidth("200Gbps") == 25e9
    with pytest.raises(ValueError, match="bandwidth"):
        parse_bandwidth("300GB")


def documented() -> dict[str, dict[str, str]]:
    """Keys and defaults in docs/space-file.md, by section."""
    sections: dict[str, dict[str, str]] = {}
    current, in_keys = "", False
    for line in (ROOT / "docs" / "space-file.md").read_text().splitlines():
        if line.startswith("## "):
            current = line[3:].strip()
        if line.startswith("| key |"):
            in_keys = True
        elif not line.startswith("|"):
            in_keys = False
        row = re.match(r"\| `([a-z_.]+)` \| (.+?) \|", line)
        if row and in_keys:
            sections.setdefault(current, {})[row[1]] = row[2].strip()
    return sections


@pytest.mark.parametrize("name", SECTIONS)
def test_the_documentation_lists_exactly_the_keys_with_their_defaults(name: str) -> None:
    fields = SECTIONS[name].model_fields
    expected = set(fields)
    if name == "cluster":
        expected |= {f"links.{link}.{key}" for link in LinksSection.model_fields for key in LinkSection.model_fields}
    told = documented()[name]
    assert set(told) == expected
    for key, info in fields.items():
        if info.is_required():
            assert told[key] == "needed"
        elif isinstance(info.default, list):
            assert told[key] == f"`[{', '.join(map(str, info.default))}]`"
        elif isinstance(info.default, (bool, int, float, str)):
            assert told[key] == f"`{str(info.default).lower() if isinstance(info.default, bool) else info.default}`"


def test_the_documentation_lists_exactly_the_figures_of_a_machine_with_their_defaults() -> None:
    text = (ROOT / "docs" / "space-file.md").read_text().partition("| figure |")[2].partition("\n\n")[0]
    told = dict(re.findall(r"^\| `([a-z0-9_]+)` \| (.+?) \|", text, re.MULTILINE))
    assert list(told) == list(MachineSection.model_fields) == list(Machine.__dataclass_fields__)
    for key, info in MachineSection.model_fields.items():
        default = {"name": "`device`", "memory_bytes": "-"}.get(key, f"`{info.default}`")
        assert told[key] == ("needed" if info.is_required() else default)


def test_the_documentation_lists_exactly_the_rules() -> None:
    text = (ROOT / "docs" / "space-file.md").read_text()
    for rule in RULES:
        assert f"| `{rule.id}` | {rule.demand} |" in text


def test_the_documentation_lists_every_device_with_its_figures() -> None:
    text = (ROOT / "docs" / "space-file.md").read_text()
    for name, device in DEVICES.items():
        memory = "no limit" if device.memory_bytes is None else f"{device.memory_bytes // 10**9} GB"
        links = " | ".join(
            f"{link.latency_s * 1e6:g} us, {link.bandwidth_bytes_per_s / 1e9:g} GB/s"
            for link in (device.intra_node, device.inter_node)
        )
        assert f"| `{name}` | {memory} | {links} |" in text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (96, "96 B"),
        (1023.4, "1023 B"),
        (1023.9, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (1024**2 - 1, "1.00 MiB"),
        (8 * 1024**3, "8.00 GiB"),
        (3 * 1024**5, "3.00 PiB"),
        (5e30, "4336808689942.02 EiB"),
    ],
)
def test_a_size_is_told_in_its_unit(count: float, text: str) -> None:
    assert format_bytes(count) == text
