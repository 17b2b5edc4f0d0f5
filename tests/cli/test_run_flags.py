"""From a command line to the settings of its mode."""

import dataclasses

import pytest
from absl import flags
from absl.testing import flagsaver
from facts import raises_naming

from spmd_trainer.cli import flag_parsing, pax_flags, run_flags
from spmd_trainer.errors import UserError
from spmd_trainer.inputs.text_settings import TokenizerConfig
from spmd_trainer.settings import Settings, setting
from spmd_trainer.training.run_config import RunConfig

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


@dataclasses.dataclass(frozen=True)
class Two(Settings):
    """An empty text is a value of one of them."""

    first: str | None = setting(None, "", "", flag="topology", empty=True)
    second: str | None = setting(None, "", "", flag="restore_checkpoint_dir")


def test_an_empty_flag_is_none_unless_its_setting_has_an_empty_value():
    parsed("--mode=plan", "--topology=", "--restore_checkpoint_dir=", "--jax_cache_dir=")
    assert run_flags.settings_from_flags(flags.FLAGS, Two) == {"first": ""}
    assert run_flags.settings_from_flags(flags.FLAGS, RunConfig) == {"jax_cache_dir": ""}
