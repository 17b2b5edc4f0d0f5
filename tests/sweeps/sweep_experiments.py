"""A regression that trains in a second, with values for sweeps; imported by name in the processes of trials."""

import jax.numpy as jnp
import numpy as np
import optax
import pyglove as pg
from flax import nnx
from praxis import optimizers, pax_fiddle, schedules

from spmd_trainer import automl, base_experiment, experiment_registry, models, tasks_lib
from spmd_trainer.inputs import ArrayInput


def rows():
    x = np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32)
    return {"x": x, "y": np.tanh(x)}


def loss(outputs, batch):
    squared = jnp.mean((outputs - batch["y"]) ** 2, axis=-1)
    return {"loss": (jnp.mean(squared), jnp.asarray(squared.size, jnp.float32))}


@experiment_registry.register
class Regression(base_experiment.BaseExperiment):
    """Six numbers from six."""

    LEARNING_RATE = 0.1
    WIDTH = 6
    STEPS = 6

    def datasets(self):
        train = pax_fiddle.Config(ArrayInput, name="train", is_training=True, arrays=rows, batch_size=16)
        return [train, pax_fiddle.Config(ArrayInput, name="heldout", arrays=rows, batch_size=16)]

    def task(self):
        if self.WIDTH != 6:
            raise ValueError(f"WIDTH={self.WIDTH}: the data have 6 numbers")
        model = pax_fiddle.Config(models.NnxModel, inputs="x", loss=loss)
        model.module = pax_fiddle.Config(nnx.Linear, in_features=self.WIDTH, out_features=6)
        model.mesh_axis_names, model.ici_mesh_shape = ["data"], [8]
        task_p = pax_fiddle.Config(tasks_lib.SingleTask, name="regression", model=model)
        task_p.train.num_train_steps = self.STEPS
        task_p.train.eval_interval_steps = task_p.train.save_interval_steps = 2
        task_p.train.learner.optimizer = pax_fiddle.Config(
            optimizers.Adam,
            learning_rate=self.LEARNING_RATE,
            lr_schedule=pax_fiddle.Config(schedules.Constant, value=1.0),
        )
        return task_p


@experiment_registry.register
class Swept(Regression):
    """With a sweep of its own: good rates, one that diverges, and a width that is wrong."""

    sweep = {"LEARNING_RATE": [0.1, 1e30], "WIDTH": [6, 7]}  # noqa: RUF012


@experiment_registry.register
class WithOptax(Regression):
    """An optimizer of optax, in a config."""

    def task(self):
        task_p = super().task()
        task_p.train.learner.optimizer = pax_fiddle.Config(optax.adam, learning_rate=self.LEARNING_RATE)
        return task_p


def strict_sgd(learning_rate):
    """SGD that takes a Python number alone."""
    if not isinstance(learning_rate, float):
        raise ValueError(f"learning_rate must be a number, got {type(learning_rate).__name__}")
    return optax.sgd(learning_rate)


@experiment_registry.register
class Refuses(Regression):
    """With an optimizer that refuses what is no number."""

    def task(self):
        task_p = super().task()
        task_p.train.learner.optimizer = pax_fiddle.Config(strict_sgd, learning_rate=self.LEARNING_RATE)
        return task_p


@experiment_registry.register
class Chosen(Regression):
    """With Pax's search over a class attribute and a value in the task."""

    LEARNING_RATE = pg.oneof([0.01, 0.1, 0.3])

    def task(self):
        task_p = super().task()
        task_p.train.random_seed = pg.oneof([3, 5], name="seed")
        return task_p

    def search(self):
        return automl.hyperparameter_tuning(automl.Metric.eval("loss"), goal="minimize", max_num_trials=4)


@experiment_registry.register
@automl.parameter_sweep(
    [("LEARNING_RATE", "STEPS"), (0.3, 4), (0.01, 6)], metric=automl.Metric.eval("loss"), goal="minimize"
)
class Combined(Regression):
    """The example of the documentation of Pax's `parameter_sweep`."""
