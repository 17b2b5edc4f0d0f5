"""`--eval_averages`: means of checkpoints equal NumPy's, schedule-free is evaluated at x, what a run lacks is refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from etils import epath
from facts import assert_names, raises_naming
from trained_helpers import TINY, make_job, trained

from spmd_trainer.checkpointing import LOAD_ALL, CheckpointLoadingRules, CheckpointMismatchError, steps
from spmd_trainer.errors import UserError
from spmd_trainer.hf import export_mode
from spmd_trainer.sharding.variables import named_leaves
from spmd_trainer.step import optax_bridge
from spmd_trainer.training import averages, checkpoints, evaluate, start_checks, start_up, train
from spmd_trainer.training.mode_configs import ExportConfig
from spmd_trainer.training.summary_writers import read_metrics

# One worker: what these tests share is made once.
pytestmark = pytest.mark.xdist_group("trained")


def values(state, job):
    """{path: variable without padding}, on the host."""
    logical = jax.jit(job.partitioner.layout.without_opt_states().slice)(state.to_eval_state())
    return {path: np.asarray(x) for path, x in named_leaves(logical.mdl_vars)}


def reading(directory, **arguments):
    return make_job(
        directory, **{"mode": "eval", "restore_checkpoint_dir": trained() / "checkpoints", "fields": (), **arguments}
    )


@functools.cache
def stored(step):
    job = reading("/nonexistent", mesh=(1, 1, 1))
    return values(checkpoints.restore_for_inference(job, "none", step=step).state, job)


@pytest.mark.parametrize("mesh", [(1, 4, 2), pytest.param((1, 3, 1), marks=pytest.mark.full)])
def test_the_mean_of_checkpoints_is_numpys(mesh, tmp_path, caplog):
    job = reading(tmp_path, mesh=mesh, eval_averages="last:3")
    with caplog.at_level("INFO", logger="absl"):
        restored = checkpoints.restore_for_inference(job, averages.of(job))
    assert_names(caplog.text, "mean of steps 4, 8, 12")
    assert restored.step == 12
    found = values(restored.state, job)
    for path in stored(12):
        expected = np.mean([stored(step)[path] for step in (12, 8, 4)], axis=0)
        np.testing.assert_array_equal(found[path], expected)
        assert found[path].dtype == stored(12)[path].dtype
    two = checkpoints.restore_for_inference(job, "last:2", step=8)
    assert two.step == 8
    for path, x in values(two.state, job).items():
        np.testing.assert_array_equal(x, np.mean([stored(step)[path] for step in (8, 4)], axis=0))


def test_what_does_not_learn_is_the_newest_and_small_dtypes_are_summed_in_float32(tmp_path):
    job = reading(tmp_path)
    rng = np.random.default_rng(0)
    frozen = next(iter(stored(12)))
    job.task.learner.bprop_variable_exclusion = [frozen]
    template = checkpoints.restore_for_inference(job, "none")

    made = {}
    for step in (1, 2, 3):
        variables = jax.tree.map(
            lambda x: jax.device_put(jnp.asarray(rng.normal(size=x.shape), jnp.bfloat16), x.sharding),
            template.state.mdl_vars,
        )
        made[step] = dict(named_leaves(variables))
        made[step, "state"] = dataclasses.replace(template.state, mdl_vars=variables)
    live = []

    def restore(step):
        live.append(step)
        return dataclasses.replace(template, state=made[step, "state"], step=step)

    # The helper may not use up what it is given here.
    copies = {step: {path: np.asarray(x, np.float32) for path, x in made[step].items()} for step in (1, 2, 3)}
    found = dict(named_leaves(averages.mean(job, (1, 2, 3), restore).state.mdl_vars))
    assert live == [3, 2, 1]
    for path, x in found.items():
        total = copies[3][path] if path == frozen else np.mean([copies[step][path] for step in (3, 2, 1)], axis=0)
        assert x.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(x), total.astype(jnp.bfloat16))


def test_too_few_checkpoints_are_refused_with_those_that_are(tmp_path):
    with raises_naming(UserError, "last:5", 5, "0, 4, 8, 12", "save_interval_steps"):
        job = reading(tmp_path, eval_averages="last:5")
        checkpoints.restore_for_inference(job, averages.of(job))
    with raises_naming(UserError, "last:3", "up to step 4", "0, 4"):
        checkpoints.restore_for_inference(job, "last:3", step=4)


@pytest.mark.full
def test_following_a_run_begins_with_the_kth_checkpoint(tmp_path, monkeypatch):
    run, target = tmp_path / "run", tmp_path / "run" / "checkpoints"
    target.mkdir(parents=True)
    (run / "experiment.json").write_text("{}")
    pending = [4, 8, 12]

    def one_more(seconds):
        (target / str(pending[0])).symlink_to(trained() / "checkpoints" / str(pending.pop(0)))

    monkeypatch.setattr(steps.time, "sleep", one_more)
    job = reading(tmp_path / "job", restore_checkpoint_dir=epath.Path(target), eval_averages="last:2")
    evaluate.evaluate_checkpoints(job)
    assert sorted(read_metrics(tmp_path / "job", "eval_heldout")) == [8, 12]


@pytest.mark.parametrize(
    ("value", "facts"), [("emma", ["emma", "did you mean ema"]), ("last:0", ["last:0", "last:5"]), ("last", ["last:5"])]
)
def test_a_value_that_is_none_is_refused(value, facts, tmp_path):
    with raises_naming(UserError, "--eval_averages", "schedule_free", *facts):
        reading(tmp_path, eval_averages=value)


@pytest.mark.full
def test_what_the_run_does_not_keep_is_refused_with_what_it_has(tmp_path):
    for value in ("ema", "schedule_free"):
        with raises_naming(UserError, f"--eval_averages={value}", "none", "last:K"):
            averages.of(reading(tmp_path, eval_averages=value))
    with raises_naming(UserError, "last:2", "training", "ema", "schedule_free"):
        start_checks.check_settings(make_job(tmp_path, eval_averages="last:2").config)
    # The flag decides over the task's fields.
    job = make_job(
        tmp_path, exp="synthetic.structures.TinyEma", fields=("task.train.num_train_steps=1",), eval_averages="none"
    )
    start_checks.check_settings(job.config)
    assert averages.of(job) == averages.of(job, decodes=True) == "none"


def schedule_free(config):
    free = optax.contrib.schedule_free_sgd(learning_rate=0.5, b1=0.9)
    config.task.train.learner.optimizer = free


REPEATED = "synthetic.structures.TinyRepeated"
FREE = ("task.train.num_train_steps=3", "task.train.eval_interval_steps=3", "task.train.save_interval_steps=3")


def test_x_of_schedule_free_is_the_mean_of_z_with_and_without_repeated_layers():
    """By hand: a constant learning rate gives z of each step the same weight (Defazio et al. 2024, equation 5)."""
    free = optax.contrib.schedule_free_sgd(learning_rate=0.3, b1=0.75)
    y = {"w": jnp.array([[1.0, -2.0], [3.0, 0.5]])}
    alone, stacked, zs = free.init(y), jax.vmap(free.init)(y), []
    y_alone = y_stacked = y
    for step in range(1, 5):
        gradient = {"w": jnp.array([[1.0, 2.0], [-1.0, 0.5]]) * step}
        updates, alone = free.update(gradient, alone, y_alone)
        y_alone = optax.apply_updates(y_alone, updates)
        updates, stacked = jax.vmap(free.update)(gradient, stacked, y_stacked)
        y_stacked = optax.apply_updates(y_stacked, updates)
        zs.append(np.asarray(alone.z["w"]))
    for state, moved in ((alone, y_alone), (stacked, y_stacked)):
        assert optax_bridge.keeps_schedule_free([{"no_prefix": state}])
        x = optax_bridge.extract_schedule_free([{"no_prefix": state}], {**moved, "excluded": jnp.ones(3)})
        np.testing.assert_allclose(x["w"], np.mean(zs, axis=0), rtol=1e-5, atol=1e-6)
        assert x["excluded"].tolist() == [1, 1, 1]
    assert not optax_bridge.keeps_schedule_free([optax.adam(1e-3).init(y)])


@pytest.mark.full
@pytest.mark.parametrize(("exp", "mesh"), [(TINY, (1, 1, 1)), (REPEATED, (1, 2, 3))])
def test_schedule_free_is_evaluated_at_x(exp, mesh, tmp_path):
    """x is the weighted mean of z (Defazio et al. 2024, equation 5), of which the checkpoints hold every one."""
    fields = (*FREE, "task.train.save_interval_steps=1")
    job = make_job(tmp_path / "run", exp=exp, mesh=mesh, customize=schedule_free, fields=fields)
    train.train(job)
    zs = {}
    job = make_job(tmp_path / "run", exp=exp, mesh=mesh, customize=schedule_free, fields=fields, mode="eval")
    assert averages.of(job) == "schedule_free"
    for step in range(1, 4):
        restored = checkpoints.restore_from(job, job.partitioner.metadata, step=step, with_input=False).state
        nodes = jax.tree.leaves(restored.opt_states, is_leaf=lambda node: hasattr(node, "z"))
        states = [node for node in nodes if hasattr(node, "z")]
        zs[step] = {path: x for state in states for path, x in jax.tree_util.tree_leaves_with_path(state.z)}
        ys = dict(jax.tree_util.tree_leaves_with_path(restored.mdl_vars))
    found = checkpoints.restore_for_inference(job, averages.of(job)).state
    for path, x in jax.tree_util.tree_leaves_with_path(found.mdl_vars):
        # A constant learning rate gives each step the same weight: x is the mean of z over the steps.
        mean = np.mean([np.asarray(zs[step][path]) for step in (1, 2, 3)], axis=0)
        np.testing.assert_allclose(x, mean, rtol=2e-4, atol=2e-5)
        assert np.isfinite(x).all()
    assert any(np.abs(x - ys[path]).max() > 1e-4 for path, x in jax.tree_util.tree_leaves_with_path(found.mdl_vars))
    # Evaluation in training saw the same.
    during = read_metrics(tmp_path / "run", "eval_heldout")[3]
    later = evaluate.Evaluations(job, evaluate.SummaryWriters(tmp_path / "later")).run(found, 3)
    assert later["heldout/log_pplx"] == pytest.approx(during["log_pplx"], rel=1e-6)


def test_a_merged_checkpoint_begins_another_run_and_is_evaluated(tmp_path):
    job = make_job("/nonexistent", mode="eval")
    config = ExportConfig(
        job.config.experiment,
        epath.Path(tmp_path / "export"),
        directory=tmp_path / "merged",
        checkpoint=True,
        eval_averages="last:2",
        restore_checkpoint_dir=trained() / "checkpoints",
    )
    assert export_mode.export(dataclasses.replace(job, config=config)) == 12
    expected = {path: np.mean([stored(step)[path] for step in (12, 8)], axis=0) for path in stored(12)}
    evaluating = reading(tmp_path / "eval", mesh=(1, 2, 2), restore_checkpoint_dir=epath.Path(tmp_path / "merged"))
    state = checkpoints.restore_for_inference(evaluating, averages.of(evaluating)).state
    assert expected.keys() == values(state, evaluating).keys()
    for path, x in values(state, evaluating).items():
        np.testing.assert_array_equal(x, expected[path])

    def warm(config):
        rules = CheckpointLoadingRules(load_rules=[LOAD_ALL])
        config.task.train.init_from_checkpoint_rules = {str(tmp_path / "merged"): rules}

    beginning = make_job(tmp_path / "warm", customize=warm, fields=("task.train.num_train_steps=1",))
    first = start_up._fresh(beginning, beginning.task.train.init_from_checkpoint_rules)
    for path, x in values(first.state, beginning).items():
        np.testing.assert_array_equal(x, expected[path])
    # It has no optimizer state to continue with.
    with pytest.raises(CheckpointMismatchError, match="opt_states"):
        checkpoints.restore_from(evaluating, evaluating.partitioner.metadata, step=None, with_input=False)
