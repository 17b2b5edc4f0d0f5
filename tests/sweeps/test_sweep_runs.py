"""Sweeps as users run them: from the command line, with real processes, killed and started again."""

import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pyglove as pg
import pytest
from facts import assert_names, raises_naming

import spmd_trainer as st
from spmd_trainer import automl
from spmd_trainer.errors import UserError
from spmd_trainer.sweeps import pax_search
from spmd_trainer.training import start_up, step_inputs, train
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import make_run_config

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
import sweep_experiments  # noqa: E402

# Without the number of host devices, which users don't give either.
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path]),
    "XLA_FLAGS": re.sub(r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", "")),
}


def command(directory, exp, *flags):
    return [
        sys.executable,
        "-m",
        "spmd_trainer.main",
        "--mode=sweep",
        f"--exp=sweep_experiments.{exp}",
        f"--job_log_dir={directory}",
        *flags,
    ]


def run(directory, exp, *flags, status=0):
    done = subprocess.run(command(directory, exp, *flags), env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return done


def started(directory, exp, *flags):
    """A sweep whose first trial has taken its first step."""
    process = subprocess.Popen(command(directory, exp, *flags), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    next(line for line in process.stderr if "first step done" in line)
    return process


def trial_files(directory):
    return {path.stem: json.loads(path.read_text()) for path in sorted((directory / "trials").glob("*.json"))}


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A sweep with a trial that is broken."""
    directory = tmp_path_factory.mktemp("sweep") / "a"
    return directory, run(directory, "Regression", "--sweep=WIDTH=[7, 6]", "--fdl.set=LEARNING_RATE=0.2")


def test_a_broken_trial_is_told_apart_and_ends_nothing(swept):
    directory, done = swept
    broken, good = trial_files(directory).values()
    assert (broken["status"], broken["value"]) == ("broken", None)
    assert_names(broken["reason"], "WIDTH=7", "sweep_experiments.py")
    assert (good["status"], good["step"], good["values"]) == ("finished", 6, {"WIDTH": "6"})
    assert f"{good['value']:.6g}" in done.stdout
    # The best one's command has what all trials were given, and its own values.
    own = next(line for line in done.stdout.splitlines() if "--fdl.set=WIDTH=6" in line)
    assert "--fdl.set=LEARNING_RATE=0.2" in own
    assert "--mode" not in own
    assert "--sweep" not in own


def test_a_finished_sweep_runs_nothing_again(swept):
    directory, _ = swept
    before = trial_files(directory)
    done = run(directory, "Regression", "--sweep=WIDTH=[7, 6]", "--fdl.set=LEARNING_RATE=0.2")
    assert "2 trials of 2 have ended before" in done.stderr
    assert trial_files(directory) == before


@pytest.mark.full
def test_the_page_has_the_trials_the_best_first(swept):
    directory, _ = swept
    text = (directory / "sweep.html").read_text()
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)[1])
    assert [trial["number"] for trial in data["trials"]] == [1, 0]
    assert (data["best"], data["paths"]) == (1, ["WIDTH"])
    assert [step for step, _ in data["trials"][0]["curve"]] == [2, 4, 6]


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        ([], ["has no sweep", "--sweep="]),
        (["--sweep=LEARNING_RAET=[1.0]", "--trial=0"], ["LEARNING_RAET", "LEARNING_RATE"]),
        (["--sweep=LEARNING_RATE=[1.0]", "--trial=1"], ["--trial=1", "0 to 0"]),
        (["--sweep=LEARNING_RATE=[1.0]", "--sweep_metric=loss", "--sweep_prune"], ["--sweep_prune", "DATASET/metric"]),
    ],
)
def test_what_no_sweep_can_do_is_refused(flags, facts, tmp_path):
    settings = dict(
        flag.removeprefix("--").split("=", 1) if "=" in flag else (flag.removeprefix("--"), True) for flag in flags
    )
    if "trial" in settings:
        settings["trial"] = int(settings["trial"])
    if "sweep" in settings:
        settings["sweep"] = [settings["sweep"]]
    with raises_naming(UserError, *facts):
        make_run_config(sweep_experiments.Regression, tmp_path / "a", mode="sweep", **settings)


def step_text(config):
    """The program of a trial's train step, without its arguments' values."""
    seen = []
    job = Job.build(config)
    lower = job.partitioner.partition

    def partition(*args, **kwargs):
        step = lower(*args, **kwargs)
        original = step.lower
        step.lower = lambda key: seen.append(original(key)) or seen[-1]
        return step

    job.partitioner.partition = partition
    compiled = start_up.compile_train_step(job)
    return seen[-1].as_text(), job, compiled


@pytest.mark.parametrize("exp", [sweep_experiments.Regression, sweep_experiments.WithOptax])
def test_trials_with_other_learning_rates_have_one_program(exp, tmp_path):
    rates, weight_decay = [0.1, 0.3], "task.train.learner.skip_step_gradient_norm_value"
    config = functools.partial(make_run_config, exp, mode="sweep", sweep={"LEARNING_RATE": rates, weight_decay: [5.0]})
    texts = []
    for trial in range(2):
        found = config(tmp_path, trial=trial)
        assert set(found.step_inputs.values()) == {rates[trial], 5.0}
        text, job, compiled = step_text(found)
        texts.append(text)
        # A step has the numbers of one with constants.
        plain = Job.build(make_run_config(exp, tmp_path / "plain", overrides=[f"LEARNING_RATE={rates[trial]}"]))
        batch = job.partitioner.layout.put(job.build_train_input().get_next())
        states = []
        for other, fn in ((job, compiled.fn), (plain, start_up.compile_train_step(plain).fn)):
            state = other.partitioner.initialize_train_state(other.prng_key)
            states.append(jax.device_get(fn(state, other.prng_key, batch)[0]))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), *states)
    assert texts[0] == texts[1]


def test_a_number_that_python_must_know_stays_a_constant(tmp_path):
    clip = "task.train.learner.optimizer.clip_gradient_norm_to_value"
    make = functools.partial(make_run_config, sweep_experiments.Regression)
    config = make(tmp_path, mode="sweep", sweep={clip: [0.1, 0.3]}, trial=0)
    assert len(config.step_inputs) == 1
    assert step_text(config)[0] == step_text(make(tmp_path / "plain", overrides=[f"{clip}=0.1"]))[0]


def test_other_floats_of_a_learner_are_found():
    first = sweep_experiments.Regression().task().train.learner
    second = sweep_experiments.Regression().task().train.learner
    first.optimizer.beta2, first.optimizer.beta1 = 0.8, 0.7
    second.optimizer.learning_rate, second.optimizer.beta2, second.optimizer.beta1 = 0.5, 0.9, 0.7
    assert step_inputs.differing(first, second) == {
        ".optimizer.learning_rate": 0.1,
        ".optimizer.beta2": 0.8,
    }


def test_choices_of_pax_are_tried_in_pyglove_s_order(tmp_path):
    config = functools.partial(make_run_config, sweep_experiments.Chosen, tmp_path, mode="sweep")
    base = config()
    assert base.experiment.task_p.train.learner.optimizer.learning_rate == 0.01
    tasks = [config(trial=number).experiment.task_p.train for number in range(4)]
    assert [(p.learner.optimizer.learning_rate, p.random_seed) for p in tasks] == [
        (0.01, 3),
        (0.01, 5),
        (0.1, 3),
        (0.1, 5),
    ]
    assert config(trial=2).step_inputs == {".optimizer.learning_rate": 0.1}
    with raises_naming(UserError, "--trial=4", "0 to 3"):
        config(trial=4)


def test_flags_that_search_decides_are_refused(tmp_path):
    with raises_naming(UserError, "--sweep_goal", "search()", "Chosen"):
        make_run_config(sweep_experiments.Chosen, tmp_path, mode="sweep", sweep_goal="max")


def test_rows_of_parameter_sweep_set_their_attributes(tmp_path):
    config = functools.partial(make_run_config, sweep_experiments.Combined, tmp_path, mode="sweep")
    found = [config(trial=number).experiment.task_p.train for number in range(2)]
    assert [(p.learner.optimizer.learning_rate, p.num_train_steps) for p in found] == [(0.3, 4), (0.01, 6)]
    sweep = config().made
    own = sweep.method.own_overrides(sweep.begin(1).values)
    assert own == ["LEARNING_RATE=0.01", "STEPS=6"]
    (tmp_path / "best").mkdir()
    alone = make_run_config(sweep_experiments.Combined, tmp_path / "best", overrides=own).experiment.task_p.train
    assert (alone.learner.optimizer.learning_rate, alone.num_train_steps) == (0.01, 6)
    with raises_naming(UserError, "Combined.STEPS", "search space", "--mode=sweep", "set STEPS"):
        make_run_config(sweep_experiments.Combined, tmp_path / "best", overrides=own[:1])
    with pytest.raises(ValueError, match="NO_SUCH"):
        automl.parameter_sweep([("NO_SUCH",), (1,)])(sweep_experiments.Regression)


def test_an_algorithm_that_learns_gets_the_rewards_of_trials_that_have_ended(tmp_path):
    class Evolves(sweep_experiments.Chosen):
        def search(self):
            found = super().search()
            found.search_algorithm = automl.pax_fiddle.Config(
                automl.RegularizedEvolution, population_size=2, tournament_size=2
            )
            return found

    method = pax_search.PaxSearch(Evolves, ["heldout"], 40)
    from spmd_trainer.sweeps.trials import FINISHED, Trial

    ended = []
    for number in range(12):
        values = method.values(number, ended)
        reward = float(values["LEARNING_RATE"] == 0.3) + float(values["seed"] == 5)
        ended.append(Trial(number, values, FINISHED, reward, 6))
    rewards = [trial.value for trial in ended]
    assert sum(rewards[6:]) > sum(rewards[:6])


def test_a_range_among_all_combinations_is_refused(tmp_path):
    class Continuous(sweep_experiments.Chosen):
        LEARNING_RATE = pg.floatv(0.01, 0.1)

    with raises_naming(UserError, "Continuous", "LEARNING_RATE", "RandomSearch"):
        make_run_config(Continuous, tmp_path, mode="sweep", trial=0)


def test_a_policy_of_search_stops_a_trial(tmp_path):
    class Stops(sweep_experiments.Chosen):
        def search(self):
            found = super().search()
            # A reward, the negative loss, is never so high.
            found.early_stopping = automl.pax_fiddle.Config(automl.EarlyStoppingByValue, step_values=[(2, 100.0)])
            return found

    train.train(Job.build(make_run_config(Stops, tmp_path / "a", mode="sweep", trial=1)))
    (trial,) = trial_files(tmp_path / "a").values()
    assert (trial["status"], trial["step"]) == ("pruned", 2)
    assert "policy of search()" in trial["reason"]


def test_a_sweep_with_other_overrides_is_another_one(tmp_path):
    make = functools.partial(make_run_config, sweep_experiments.Regression, tmp_path / "a", mode="sweep", trial=0)
    make(sweep={"LEARNING_RATE": [0.1]}, overrides=["STEPS=4"])
    with raises_naming(UserError, "common", "STEPS=4", "STEPS=2"):
        make(sweep={"LEARNING_RATE": [0.1]}, overrides=["STEPS=2"])


def test_an_optimizer_that_refuses_traced_numbers_gets_constants(tmp_path):
    config = make_run_config(
        sweep_experiments.Refuses, tmp_path, mode="sweep", sweep={"LEARNING_RATE": [0.1, 0.3]}, trial=0
    )
    assert config.step_inputs
    assert step_text(config)[0] == step_text(make_run_config(sweep_experiments.Refuses, tmp_path / "plain"))[0]


# --- longer ones ------------------------------------------------------------------------------------------------------

TWELVE = ("--sweep=LEARNING_RATE=[0.01, 0.1, 0.2, 0.3]", "--sweep=task.train.random_seed=[1, 2, 3]", "--sweep_prune")


@pytest.mark.full
def test_a_sweep_of_twelve_trials_killed_five_times_ends_as_one_that_was_not(tmp_path):
    run(tmp_path / "whole", "Regression", *TWELVE)
    drawn = random.Random(0)
    for _ in range(5):
        process = subprocess.Popen(
            command(tmp_path / "killed", "Regression", *TWELVE), env=ENVIRONMENT, stderr=subprocess.DEVNULL
        )
        time.sleep(drawn.uniform(6, 16))
        process.send_signal(drawn.choice([signal.SIGKILL, signal.SIGTERM]))
        process.wait()
    run(tmp_path / "killed", "Regression", *TWELVE)
    whole, killed = trial_files(tmp_path / "whole"), trial_files(tmp_path / "killed")
    assert len(whole) == 12
    assert whole.keys() == killed.keys()
    for number, trial in whole.items():
        assert {**killed[number], "seconds": 0} == {**trial, "seconds": 0}
    assert {trial["status"] for trial in whole.values()} == {"finished", "pruned"}


@pytest.mark.full
def test_ctrl_c_saves_the_running_trial_and_leaves(tmp_path):
    flags = ("--sweep=STEPS=[2000]",)
    process = started(tmp_path / "a", "Regression", *flags)
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait() == 130
    assert "goes on" in rest
    (trial,) = trial_files(tmp_path / "a").values()
    assert trial["status"] == "unfinished"
    assert trial["seconds"] > 0
    assert list((tmp_path / "a" / "trials" / "0000" / "checkpoints").iterdir())


@pytest.mark.full
@pytest.mark.parametrize("both", [True, False])
def test_sigterm_to_the_trial_itself_saves_it_and_the_sweep_goes_on_with_it(tmp_path, both):
    flags = ("--sweep=STEPS=[4000]", "--fdl.set=task.train.eval_interval_steps=100000")
    flags += ("--fdl.set=task.train.save_interval_steps=100000",)
    process = started(tmp_path / "a", "Regression", *flags)
    (trial,) = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    # As schedulers do: to each process of a job.
    for number in [int(trial), *([process.pid] if both else [])]:
        os.kill(number, signal.SIGTERM)
    rest = process.stderr.read()
    assert process.wait() == 0
    assert_names(rest, "goes on")
    (record,) = trial_files(tmp_path / "a").values()
    assert record["status"] == "unfinished"
    steps = [
        int(path.name) for path in (tmp_path / "a" / "trials" / "0000" / "checkpoints").iterdir() if path.name.isdigit()
    ]
    assert max(steps) > 0


@pytest.mark.full
def test_python_runs_a_sweep_of_pax_and_returns_its_trials(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    found = st.sweep(sweep_experiments.Combined, tmp_path / "a")
    assert [trial.status for trial in found] == ["finished", "finished"]
    assert [trial.step for trial in found] == [4, 6]
    assert all(trial.value is not None and trial.value < 0 for trial in found)  # the reward is the negative loss
