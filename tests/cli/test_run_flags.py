"""From a command line to the settings of its mode."""

import dataclasses
import errno
import json
import os

import pytest
from absl import flags
from absl.testing import flagsaver
from etils import epath
from facts import assert_names, raises_naming

from spmd_trainer.cli import flag_parsing, pax_flags, run_flags
from spmd_trainer.errors import UserError
from spmd_trainer.inputs.text_settings import TokenizerConfig
from spmd_trainer.settings import Settings, setting
from spmd_trainer.storage import reading
from spmd_trainer.training import experiment_config, run_directory
from spmd_trainer.training.run_config import RunConfig, TrainConfig

OF_A_RUN = ("--exp=lm.stdlib.StdlibBytesTiny", "--job_log_dir=runs/mine", "--track=wandb", "--num_minibatches=2")


@pytest.fixture(autouse=True)
def own_flags():
    with flagsaver.flagsaver():
        yield


def parsed(*arguments):
    """The flags of a command that the mode accepts."""
    flags.FLAGS(["spmd-trainer", *arguments])
    run_flags.refuse_other_modes(flags.FLAGS)
    return flags.FLAGS


@pytest.mark.parametrize("more", [["--mode=page"], ["--mode=replay", "--step=3"], ["--mode=port", "--module=a.py"]])
def test_a_mode_that_looks_at_a_run_is_appended_to_its_command(more):
    parsed(*OF_A_RUN, *more)
    with raises_naming(UserError, "--budget", "--mode=plan"):
        parsed(*OF_A_RUN, "--budget=5m", *more)


def test_a_prompt_alone_asks_for_its_answer():
    def mode(*arguments):
        flags.FLAGS(["spmd-trainer", *arguments])
        run_flags.choose_mode(flags.FLAGS)
        return flags.FLAGS.mode

    assert mode("--job_log_dir=runs/mine", "--prompt=") == "train"
    assert mode("--job_log_dir=runs/mine", "--prompt=Hello") == "chat"
    assert mode("--mode=train", "--prompt=Hello") == "train"
    with raises_naming(UserError, "--prompt goes with --mode=chat"):
        parsed("--mode=train", "--prompt=Hello")


def test_files_are_arguments_and_flags_may_follow_them():
    command = ["spmd-trainer", "--mode=tokenizer", "a.jsonl", "--output=runs/x", "b.jsonl", "--vocab_size=300"]
    rest = flag_parsing.parse_into(flags.FLAGS, pax_flags.define(), command)
    run_flags.refuse_other_modes(flags.FLAGS)
    found = run_flags.config_without_experiment(flags.FLAGS, rest[1:])
    assert found == TokenizerConfig(["a.jsonl", "b.jsonl"], output="runs/x", vocab_size=300)
    with raises_naming(UserError, "--workers goes with --mode=tokenise"):
        parsed("--mode=tokenizer", "--workers=2")
    with raises_naming(UserError, "--mesh goes with --mode="):
        parsed("--mode=tokenise", "--mesh=data:2")


def test_whole_numbers_are_read_as_absl_reads_them():
    assert [parsed(f"--num_minibatches={text}").num_minibatches for text in ("0x10", "0o10", "010")] == [16, 8, 10]
    with raises_naming(flags.IllegalFlagValueError, "--num_minibatches=0xg", "whole number"):
        parsed("--num_minibatches=0xg")


@pytest.mark.parametrize("flag", ["--trial=0", "--temperature=0", "--port=0"])
def test_zero_is_a_given_value(flag):
    with raises_naming(UserError, flag.partition("=")[0], "--mode="):
        parsed("--mode=train", flag)


def test_an_empty_flag_of_another_mode_asks_for_nothing():
    parsed("--mode=train", "--trial=", "--prompt=", "--nofollow")


@dataclasses.dataclass(frozen=True)
class Two(Settings):
    """An empty text is a value of one of them."""

    first: str | None = setting(None, "", "", flag="topology", empty=True)
    second: str | None = setting(None, "", "", flag="restore_checkpoint_dir")


def test_an_empty_flag_is_none_unless_its_setting_has_an_empty_value():
    parsed("--mode=plan", "--topology=", "--restore_checkpoint_dir=", "--jax_cache_dir=")
    assert run_flags.settings_from_flags(flags.FLAGS, Two) == {"first": ""}
    assert run_flags.settings_from_flags(flags.FLAGS, RunConfig) == {"jax_cache_dir": ""}


def config_of(*arguments):
    """The settings of a command, as `main` makes them."""
    with flagsaver.flagsaver():
        return run_flags.run_config_from_flags(parsed(*arguments), lambda mode: 1)


@pytest.fixture
def run(tmp_path):
    """The directory of a run, with what its start wrote about it."""
    trained = TrainConfig(
        None,
        str(tmp_path),
        mesh={"data": 2, "mdl": 1},
        num_minibatches=2,
        restore_checkpoint_dir="first",
        eval_on_test=False,
        track=["tensorboard"],
    )
    overrides = ["NUM_LAYERS=3", "task.train.num_train_steps=5"]
    record = {"experiment": "spmd_trainer.experiments.lm.stdlib.StdlibBytesTiny", "overrides": overrides}
    (tmp_path / "run.json").write_text(json.dumps({**record, "settings": trained.given(), "status": "running"}))
    return tmp_path


def test_a_runs_directory_knows_its_experiment_and_flags(run, caplog):
    with caplog.at_level("INFO", logger="absl"):
        config = config_of(f"--job_log_dir={run}", "--mode=verify")
    assert config.experiment.label == "lm.stdlib.StdlibBytesTiny"
    assert config.experiment.class_attributes == {"NUM_LAYERS": 3}
    assert (config.mesh, config.num_minibatches) == ((("data", 2), ("mdl", 1)), 2)
    assert config.restore_checkpoint_dir is None  # it looks at the run's own checkpoints
    (said,) = [record.getMessage() for record in caplog.records if str(run) in record.getMessage()]
    for flag in ("--exp=lm.stdlib.StdlibBytesTiny", "--mesh=data:2,mdl:1", "--fdl.set=NUM_LAYERS=3"):
        assert flag in said
    trains = config_of(f"--job_log_dir={run}", "--mode=train")
    assert (trains.restore_checkpoint_dir.name, trains.eval_on_test) == ("first", False)
    assert list(trains.track) == ["tensorboard"]


def test_given_flags_win_over_the_runs(run, tmp_path):
    config = config_of(f"--job_log_dir={run}", "--mode=verify", "--mesh=data:1,mdl:2", "--fdl.set=NUM_LAYERS=4")
    assert (config.mesh, config.experiment.class_attributes) == ((("data", 1), ("mdl", 2)), {"NUM_LAYERS": 4})
    # A plan is for other devices than the run's.
    assert config_of(f"--job_log_dir={run}", "--mode=plan", "--topology=h100:1x8").mesh is None
    # With an experiment, nothing is taken.
    config = config_of("--exp=lm.stdlib.StdlibBytesTiny", f"--job_log_dir={run}", "--mode=verify")
    assert (config.mesh, config.experiment.overrides) == (None, ())


def overrides_of(*arguments):
    return list(config_of("--mode=verify", *arguments).experiment.overrides)


def test_a_given_override_replaces_the_runs_of_the_same_path(run):
    of_run = ["NUM_LAYERS=3", "task.train.num_train_steps=5"]
    assert overrides_of(f"--job_log_dir={run}") == of_run
    steps = "task.train.num_train_steps=9"
    assert overrides_of(f"--job_log_dir={run}", f"--fdl.set={steps}") == ["NUM_LAYERS=3", steps]
    # Neither a path that only begins alike, nor a field of what is kept.
    assert experiment_config.without_replaced(of_run, ["NUM_LAYERS_2=1", "task.train.num_train_steps.a=1"]) == of_run
    # What is assigned as a whole has no fields of before.
    assert experiment_config.without_replaced(["a.b[0].c=1", "a.b[1]=2", "a.c=3"], ["a.b[0]=4", " a.c = 1"]) == [
        "a.b[1]=2"
    ]


def test_an_empty_flag_takes_the_default_and_not_the_runs_value(run):
    trains = (f"--job_log_dir={run}", "--mode=train")
    config = config_of(*trains, "--mesh=", "--restore_checkpoint_dir=", "--num_minibatches=", "--track=")
    assert (config.mesh, config.restore_checkpoint_dir, config.num_minibatches, config.track) == (None, None, None, ())
    assert config.eval_on_test is False  # it was not named


@pytest.mark.parametrize(("folder", "said"), [("elsewhere", True), (None, False)])
def test_relative_paths_of_a_run_that_was_started_elsewhere_are_warned_of(run, folder, said, caplog):
    path = run / "run.json"
    record = json.loads(path.read_text())
    record["overrides"].append("train_datasets[0].name='a.txt'")
    record["working_directory"] = folder or os.getcwd()
    path.write_text(json.dumps(record))
    config_of(f"--job_log_dir={run}", "--mode=verify")
    warned = [line.getMessage() for line in caplog.records if line.levelname == "WARNING"]
    assert any("elsewhere" in line and os.getcwd() in line for line in warned) == said


def test_the_run_that_checkpoints_are_read_from_knows_them_too(run, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for place in (run, run / "checkpoints"):
        config = config_of(f"--job_log_dir={elsewhere}", f"--restore_checkpoint_dir={place}", "--mode=eval")
        assert config.experiment.class_attributes == {"NUM_LAYERS": 3}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "holds no run"),
        ("", "run.json can't be read"),
        ("not JSON", "run.json can't be read"),
        ('{"experiment": "a.B", "status": "failed"}', "has not begun"),
    ],
)
def test_a_directory_without_a_run_is_one_message(tmp_path, content, why):
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with raises_naming(UserError, "--exp=NAME", str(tmp_path), why, "--list"):
        config_of(f"--job_log_dir={tmp_path}", "--mode=eval")


def test_a_record_that_may_not_be_read_is_not_taken_for_no_run(run, monkeypatch):
    def refuse(path, *_):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(reading, "read", refuse)
    for mode in ("train", "eval"):
        with raises_naming(UserError, "--exp=NAME", str(run), "can't be read", "Permission denied"):
            config_of(f"--job_log_dir={run}", f"--mode={mode}")
    with raises_naming(UserError, f"--job_log_dir={run}", "Permission denied"):
        run_directory.check_directory(epath.Path(run), "a.B", trains=False)


def refused(*arguments):
    """The message about a command's flags."""
    with flagsaver.flagsaver(), pytest.raises(UserError) as raised:
        flag_parsing.parse_into(flags.FLAGS, pax_flags.define(), ["spmd-trainer", *arguments])
    return str(raised.value)


@pytest.mark.parametrize("flag", ["--lr=3", "--learning_rate=3"])
def test_an_unknown_flag_is_told_with_the_field_that_it_may_mean(flag):
    said = refused("--exp=lm.stdlib.StdlibBytesTiny", flag)
    assert_names(said, flag.partition("=")[0], "--fdl.set=LEARNING_RATE=", "optimizer.learning_rate=")


def test_the_experiment_of_an_unknown_flag_may_follow_a_blank_or_be_the_runs(run):
    commands = (["--exp", "lm.stdlib.StdlibBytesTiny"], [f"--job_log_dir={run}"], ["-job_log_dir", str(run)])
    for command in (*commands, [f"--restore_checkpoint_dir={run}/checkpoints"]):
        assert_names(refused(*command, "--lr=3"), "--lr", "--fdl.set=LEARNING_RATE=")
    assert_names(refused("--exp"), "--exp")


@pytest.mark.parametrize("command", [["--zzz=3"], ["--exp=no.such.Experiment", "--lr=3"]])
def test_an_unknown_flag_without_a_field_is_one_short_message(command):
    said = refused(*command)
    assert_names(said, command[-1].partition("=")[0], "--help", "--fdl.set=")
    assert len(said) < 200
