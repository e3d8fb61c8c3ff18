"""The section `worker` of a space file: what it means, and what of it is refused with words that help."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.errors import UserError
from autotune.space.placeholders import PLACEHOLDERS, fill_text, fill_words, placeholders_in
from autotune.space.space import Space, load_space

ROOT = Path(__file__).parents[2]
SPACE = """
model: {layers: 8, hidden: 64, heads: 4, ffn_hidden: 128, vocab: 128, sequence_length: 32, tied_embeddings: true}
cluster: {devices_per_node: 4}
training: {global_batch_size: 16}
"""


def load(tmp_path: Path, worker: str, text: str = SPACE) -> Space:
    path = tmp_path / "space.yaml"
    path.write_text(text + worker)
    return load_space(path)


def refusal(tmp_path: Path, worker: str) -> str:
    with pytest.raises(UserError) as refused:
        load(tmp_path, worker)
    return str(refused.value)


def test_a_text_is_split_into_words_and_a_list_is_taken_as_it_is(tmp_path: Path) -> None:
    text = load(tmp_path, "worker: {command: \"train --pp {pp} 'a b'\"}").worker
    words = load(tmp_path, 'worker: {command: [train, --pp, "{pp}", a b]}').worker
    assert text is not None
    assert text == words
    assert text.command == ("train", "--pp", "{pp}", "a b")
    assert not text.shell


def test_a_space_without_the_section_has_the_built_in_worker(tmp_path: Path) -> None:
    assert load(tmp_path, "").worker is None
    assert load(tmp_path, "worker:\n").worker is None


def test_reader_follows_the_arguments_unless_it_is_given(tmp_path: Path) -> None:
    def reader(worker: str) -> str:
        found = load(tmp_path, f"worker: {worker}").worker
        assert found is not None
        return found.reader.kind

    assert reader('{command: "x"}') == "json"
    assert reader('{command: "x {megatron_args}"}') == "megatron"
    assert reader('{command: "x {torchtitan_args}"}') == "torchtitan"
    assert reader('{command: "x {megatron_args}", reader: json}') == "json"


def test_written_back_it_reads_the_same_wherever_the_file_lies(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir()
    space = load(
        tmp_path,
        "worker:\n  command: 'echo {pp} $HOME'\n  shell: true\n  starter: none\n  cwd: job\n"
        "  env: {A: 1, B: '{port}'}\n"
        "  reader: {kind: regex, pattern: 'took (?P<step_time_ms>[0-9.]+)', log: '*.txt', skip_steps: 0}\n"
        "  python_hooks: false\n",
    )
    assert space.worker is not None
    assert space.worker.cwd == str(tmp_path / "job")
    elsewhere = tmp_path / "results" / "space.yaml"
    elsewhere.parent.mkdir()
    elsewhere.write_text(space.to_yaml())
    assert load_space(elsewhere) == space


def test_a_space_of_another_machine_can_be_read(tmp_path: Path) -> None:
    found = load(tmp_path, "worker: {command: a, cwd: /not/on/this/machine}").worker
    assert found is not None
    assert found.cwd == "/not/on/this/machine"


@pytest.mark.parametrize(
    ("worker", "why"),
    [
        ("{}", "worker.command: missing"),
        ("{command: ''}", "at least one value"),
        ("{command: 'a \"b'}", "No closing quotation"),
        ("{command: 'a {micro_batch}'}", "unknown placeholder {micro_batch}; known: {pp}, {tp}"),
        ("{command: a, env: {X: '{pq}'}}", "worker.env.X: unknown placeholder {pq}"),
        ("{command: a, env: {'B C': x}}", "'B C' can't name an environment variable"),
        ("{command: a, env: {X: '{megatron_args}'}}", "{megatron_args} belongs in the command"),
        ("{command: 'a {megatron_args} {torchtitan_args}'}", "are for different trainers"),
        ("{command: [a, b], shell: true}", "the command is one text"),
        ("{command: a, cwd: nowhere}", "'nowhere' is no folder"),
        ("{command: a, starter: mpirun}", "'mpirun' is not one of torchrun, none"),
        ("{command: a, reader: nemo}", "'nemo' is not one of json, megatron, torchtitan, regex"),
        ("{command: a, reader: regex}", "needs a pattern with one of the groups step_time_s"),
        ("{command: a, reader: {kind: regex, pattern: '(?P<loss>x'}}", "is no regular expression"),
        ("{command: a, reader: {kind: regex, pattern: '(?P<time>x)'}}", "unknown group 'time'"),
        ("{command: a, reader: {kind: megatron, pattern: '(?P<loss>x)'}}", "pattern needs kind: regex"),
        ("{command: a, reader: {kind: json, log: x}}", "reads no log"),
        ("{comand: a}", "unknown key 'comand', did you mean command?"),
    ],
)
def test_mistakes_are_refused_with_their_place_and_the_legal_values(tmp_path: Path, worker: str, why: str) -> None:
    message = refusal(tmp_path, f"worker: {worker}\n")
    assert why in message
    assert "space.yaml:5: worker" in message


def test_a_worker_nobody_vouches_for_does_not_add_tied_gradients(tmp_path: Path) -> None:
    unknown = load(tmp_path, "worker: {command: train}")
    assert not unknown.training.sum_tied_gradients
    assert any("sum_tied_gradients: true" in note for note in unknown.notes)
    assert any(broken.rule == "tied-embeddings" for point in unknown.candidates() for broken in point.broken)
    said = load(tmp_path, "worker: {command: train}", SPACE.replace("16}", "16, sum_tied_gradients: true}"))
    assert said.training.sum_tied_gradients
    assert load(tmp_path, "worker: {command: 'train {megatron_args}'}").training.sum_tied_gradients
    assert load(tmp_path, "").training.sum_tied_gradients


def test_placeholders_are_filled_word_by_word() -> None:
    values = {"pp": "2", "out": "/a b", "megatron_args": ("--x", "1 2")}
    assert fill_words(("{pp}", "p{pp}x{out}", "{megatron_args}"), values) == ("2", "p2x/a b", "--x", "1 2")
    assert fill_text("cd {out} && run {megatron_args}", values, quoted=True) == "cd '/a b' && run --x '1 2'"


def test_braces_that_are_no_placeholders_stay() -> None:
    text = 'echo ${HOME} ${pp} {"x": 1} {{pp}} {X}'
    assert placeholders_in(text) == ()
    assert fill_text(text, {}) == 'echo ${HOME} ${pp} {"x": 1} {pp} {X}'


def test_the_documentation_lists_exactly_the_placeholders() -> None:
    text = (ROOT / "docs" / "worker.md").read_text(encoding="utf-8")
    lines = [f"| `{{{name}}}` | {meaning} |" for name, meaning in PLACEHOLDERS.items()]
    start = text.splitlines().index(lines[0])
    assert text.splitlines()[start : start + len(lines) + 1] == [*lines, ""]
