"""What a run says at its end: numbers, datasets, and commands that find the experiment again."""

import copy
import io

import pytest
from facts import assert_names
from rich.console import Console
from trained_helpers import make_job

from spmd_trainer import experiment_registry
from spmd_trainer.experiments.lm.own_text import OwnText
from spmd_trainer.experiments.lm.stdlib import StdlibBytesTiny
from spmd_trainer.training import ending
from spmd_trainer.training.live_status import live

pytestmark = pytest.mark.xdist_group("trained")

OVERRIDES = (
    "eval_datasets[0].max_windows=4",
    "train_datasets[0].shuffle=False",
    "task.early_stopping_fn=None",
    "task.train.learner.grad_norm_summary=False",
)
KEPT = [OVERRIDES[0], OVERRIDES[3]]


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """What these tests register is gone after them."""
    for name in ("_registry", "_tags", "_specs", "_full_names_by_key"):
        own = copy.copy(getattr(experiment_registry, name))
        own.update({key: list(value) for key, value in own.items() if isinstance(value, list)})
        monkeypatch.setattr(experiment_registry, name, own)


def commands(directory, cls, *, registered, fields=OVERRIDES):
    """What is printed for a class, after a run that has saved."""
    if registered:
        experiment_registry.register(cls)
    name = experiment_registry.full_name(cls) if registered else cls
    (directory / "checkpoints" / "2").mkdir(parents=True)
    (directory / "checkpoints" / "2" / "_CHECKPOINT_METADATA").write_text("{}")
    return list(ending.next_commands(make_job(directory, exp=name, fields=fields).config))


def experiment(module, name):
    return type(name, (StdlibBytesTiny,), {"__module__": module})


def test_a_command_needs_the_runs_directory_alone(tmp_path):
    lines = commands(tmp_path, experiment("my_pkg.my_module", "Mine"), registered=True)
    assert [line.split(maxsplit=2)[1:] for line in lines] == [
        ["evaluate:", f"spmd-trainer --job_log_dir={tmp_path} --mode=eval"],
        ["decode:", f"spmd-trainer --job_log_dir={tmp_path} --mode=decode_once"],
    ]


def test_a_step_that_was_evaluated_is_not_offered_again(tmp_path):
    commands(tmp_path, StdlibBytesTiny, registered=False)
    config = make_job(tmp_path).config
    for evaluated, offered in ((None, True), (1, True), (2, False)):
        lines = list(ending.next_commands(config, evaluated=evaluated))
        assert any("to evaluate:" in line for line in lines) == offered
        assert any("to decode:" in line for line in lines)


def test_a_model_of_texts_can_be_talked_to(tmp_path):
    lines = commands(tmp_path, OwnText, registered=False, fields=())
    assert f'  to talk to it:      spmd-trainer --job_log_dir={tmp_path} --prompt="..."' in lines


@pytest.mark.parametrize(
    ("module", "registered"),
    [
        ("__main__", True),
        *(pytest.param(module, False, marks=pytest.mark.full) for module in ("__main__", "my_module")),
    ],
)
def test_a_class_that_no_command_finds_is_evaluated_from_python(tmp_path, module, registered):
    lines = commands(tmp_path, experiment(module, "Notebook"), registered=registered)
    arguments = f"(Notebook, '{tmp_path}', overrides="
    assert f"  to evaluate:        spmd_trainer.evaluate{arguments}" in lines[0]
    assert f"  to decode:          spmd_trainer.decode{arguments}" in lines[1]
    call = lines[0].partition("spmd_trainer.evaluate")[2]
    given = eval(f"(lambda *args, **kwargs: kwargs){call}", {"Notebook": None})
    assert set(KEPT) <= set(given["overrides"])
    assert set(given["overrides"]).isdisjoint(OVERRIDES[1:3])


def test_nothing_is_printed_where_nothing_was_saved(tmp_path):
    assert not list(ending.next_commands(make_job(tmp_path).config))


def test_numbers_keep_their_first_digits():
    shown = ending.shown({"lr": 1e-5, "b": -0.00012345, "c": 0.0, "d": 0.00125, "e": 12345.0, "f": float("nan")})
    assert shown == "lr 1e-05  b -0.0001234  c 0  d 0.0013  e 12,345  f nan"


def test_only_names_of_the_loss_share_a_value():
    metrics = {
        "avg_xent": 4.25,
        "accuracy": 0.0,
        "num_errors": 0.0,
        "log_pplx": 4.25,
        "total_loss": 4.5,
        "aux_loss": 0.0,
    }
    assert ending.shown(metrics) == "avg_xent = log_pplx 4.2500  accuracy 0  num_errors 0  total_loss 4.5000"


def test_results_are_listed_by_the_datasets_that_there_are(tmp_path, caplog):
    def named_with_a_slash(config):
        config.eval_datasets[0].name = "books/heldout"
        config.eval_datasets.append(config.eval_datasets[0].clone().set(name="books"))

    job = make_job(tmp_path, customize=named_with_a_slash)
    results = {"train/a/b": 1.5, "books/heldout/a": 2.5, "books/other/a": 3.5}
    with caplog.at_level("INFO", logger="absl"):
        ending.log_summary(job.config, "finished", "", loss=0.5, metrics=results, evaluated=7)
    end, evaluation = caplog.messages[:2]
    assert end == "finished, loss 0.5000"
    assert_names(evaluation, "step 7", "train: a/b 1.5000; books/heldout: a 2.5000; books: other/a 3.5000")


def test_a_display_gets_a_table_and_whole_commands_and_the_log_the_same_lines(tmp_path, caplog, monkeypatch):
    config = make_job(tmp_path).config
    console = Console(record=True, width=60, file=io.StringIO())
    printed = []

    class Display:
        print = staticmethod(printed.append)

    monkeypatch.setattr(live, "display", Display())
    (tmp_path / "run.html").write_text("a page")
    (tmp_path / "summaries").mkdir()
    metrics = {"heldout/bits_per_byte": 2.5, "heldout/accuracy": 0.25}
    next_step = "the same command continues"
    with caplog.at_level("INFO", logger="absl"):
        ending.log_summary(config, "stopped at step 8", next_step, loss=0.5, metrics=metrics, evaluated=7)
    table, commands = printed
    console.print(table)
    rows = [line.strip("│").split("│") for line in console.export_text().splitlines() if "│" in line]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["end", "stopped at step 8"],
        ["next", next_step],
        ["loss", "0.5000"],
        ["heldout at step 7", "bits_per_byte 2.5000"],
        ["", "accuracy 0.2500"],
    ]
    where, run, curves = commands.splitlines()
    assert where == f"results in {tmp_path}: summaries/"
    assert_names(run, "the run")
    assert run.endswith(f"  {tmp_path}/run.html")
    assert_names(curves, "the curves")
    assert curves.endswith(f"  tensorboard --logdir {tmp_path}/summaries")
    end, evaluation, *others = caplog.messages
    assert end == f"stopped at step 8, loss 0.5000; {next_step}"
    assert_names(evaluation, "step 7", "heldout: bits_per_byte 2.5000  accuracy 0.2500")
    assert others == [where, run, curves]
