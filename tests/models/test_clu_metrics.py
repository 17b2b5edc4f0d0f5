"""clu metrics from a model's loss: the same numbers for any batch size, mesh, partitioner and number of minibatches."""

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clu import metrics
from facts import raises_naming
from model_helpers import Config
from praxis.py_utils import NestedMap

import spmd_trainer as st
from spmd_trainer import base_experiment, models, tasks_lib, trainer_lib
from spmd_trainer.errors import UserError
from spmd_trainer.inputs import ArrayInput
from spmd_trainer.models import base
from spmd_trainer.shard_map_partitioning import ShardMapPartitioner
from spmd_trainer.step import packing
from spmd_trainer.step.pjit import PjitPartitioner
from spmd_trainer.training.early_stopping import EarlyStopping
from spmd_trainer.training.summary_writers import read_metrics

CLASSES, TRAIN_ROWS, STEPS = 3, 48, 4
EVAL_ROWS = 27  # no batch size below divides it


@flax.struct.dataclass
class Confusion(metrics.Metric):
    """Counts of (label, prediction), from which recall of each class follows: no mean over batches gives it."""

    counts: jax.Array

    @classmethod
    def from_model_output(cls, *, logits, labels, mask, **_):
        hit = jax.nn.one_hot(labels, CLASSES)[:, :, None] * jax.nn.one_hot(jnp.argmax(logits, -1), CLASSES)[:, None]
        return cls(jnp.sum(hit * mask[:, None, None], axis=0).astype(jnp.int32))

    def merge(self, other):
        return Confusion(self.counts + other.counts)

    def compute(self):
        return {str(c): self.counts[c, c] / max(self.counts[c].sum(), 1) for c in range(CLASSES)}


@flax.struct.dataclass
class Median(metrics.CollectingMetric.from_outputs(("xent", "mask"))):
    """Needs all values on the host."""

    def compute(self):
        values = super().compute()
        return np.median(values["xent"][values["mask"] > 0])


@flax.struct.dataclass
class Spread(metrics.Std.from_output("xent")):
    """clu's own `compute` calls `jnp.clip` as JAX 0.10 no longer has it."""

    def compute(self):
        return np.sqrt(self.sum_of_squares / self.count - (self.total / self.count) ** 2)


@flax.struct.dataclass
class Metrics(metrics.Collection):
    loss: metrics.Average.from_output("xent")
    accuracy: metrics.Accuracy
    spread: Spread
    recall: Confusion
    median: Median


def loss(logits, batch):
    xent = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    mask = batch.eval_sample_weights
    return Metrics.single_from_model_output(logits=logits, labels=batch.labels, xent=xent, mask=mask)


def data(rows, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, 5)).astype(np.float32)
    return {"x": x, "labels": rng.integers(0, CLASSES, rows).astype(np.int32)}


def net(params, x):
    return jnp.tanh(x @ params["w"]) + params["b"]


def expected(params, arrays):
    """The metrics of all rows at once, in NumPy."""
    logits = np.tanh(arrays["x"] @ np.asarray(params["w"])) + np.asarray(params["b"])
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    labels, predicted = arrays["labels"], logits.argmax(axis=1)
    xent = -log_probs[np.arange(len(labels)), labels]
    recall = {f"recall/{c}": np.mean(predicted[labels == c] == c) for c in range(CLASSES)}
    right = np.mean(predicted == labels)
    return {"loss": xent.mean(), "accuracy": right, "spread": xent.std(), "median": np.median(xent), **recall}


def init(key):
    return {"w": jax.random.normal(key, (5, CLASSES)), "b": jnp.zeros(CLASSES)}


def experiment(partitioner=PjitPartitioner, mesh=(4, 2), eval_batch=8, loss=loss):
    """Trains with a batch of 16, and leaves the variables as they are."""

    class Classifies(base_experiment.BaseExperiment):
        def datasets(self):
            train = Config(ArrayInput, name="train", is_training=True, arrays=data(TRAIN_ROWS, 0), batch_size=16)
            return [train, Config(ArrayInput, name="heldout", arrays=data(EVAL_ROWS, 1), batch_size=eval_batch)]

        def task(self):
            model_p = Config(models.FunctionModel, init=init, apply=net, inputs="x", loss=loss)
            model_p.ici_mesh_shape, model_p.mesh_axis_names = list(mesh), ["data", "mdl"]
            task_p = Config(tasks_lib.SingleTask, name="classifies", model=model_p)
            task_p.train.num_train_steps, task_p.train.eval_interval_steps = STEPS, STEPS
            task_p.train.summary_interval_steps, task_p.train.summary_accumulate_interval_steps = 3, 1
            task_p.train.sharding_strategy = [
                (".*", 'fsdp(axis="data, mdl", min_size_to_shard_mb=0, allow_uneven=True)')
            ]
            task_p.train.learner.loss_name = "loss"
            task_p.train.learner.optimizer = optax.sgd(0.0)
            return task_p

        def partitioner(self):
            return partitioner()

    return Classifies


PARTITIONERS = {
    "pjit": PjitPartitioner,
    "minibatches": lambda: PjitPartitioner(num_minibatches=2),
    "dp": lambda: ShardMapPartitioner("dp"),
    "fsdp": lambda: ShardMapPartitioner("fsdp", min_weight_size=1, num_minibatches=2),
}


@pytest.mark.parametrize(
    "name", [n if n in ("minibatches", "fsdp") else pytest.param(n, marks=pytest.mark.full) for n in PARTITIONERS]
)
@pytest.mark.parametrize("eval_batch", [pytest.param(8, marks=pytest.mark.full), 11])
@pytest.mark.full
def test_metrics_are_those_of_all_rows_at_once(name, eval_batch, tmp_path):
    """27 rows in batches of 8 or 11 on 8 devices; 48 rows in three steps of 16, averaged over these steps."""
    result = st.train(experiment(PARTITIONERS[name], eval_batch=eval_batch), tmp_path)
    params = init_of(result)
    found = read_metrics(tmp_path, "eval_heldout")[STEPS]
    for metric, value in expected(params, data(EVAL_ROWS, 1)).items():
        np.testing.assert_allclose(found[metric], value, rtol=2e-5, atol=1e-6, err_msg=metric)
    found = read_metrics(tmp_path, "train")[3]
    for metric, value in expected(params, data(TRAIN_ROWS, 0)).items():
        np.testing.assert_allclose(found[metric], value, rtol=2e-5, atol=1e-6, err_msg=metric)


def init_of(result):
    variables = result.state.mdl_vars["params"]
    return {"w": np.asarray(variables["w"])[:5, :CLASSES], "b": np.asarray(variables["b"])[:CLASSES]}


def test_a_clu_average_has_the_gradient_of_its_mean():
    rows = data(TRAIN_ROWS, 0)
    batch = NestedMap(rows, eval_sample_weights=np.ones(TRAIN_ROWS, np.float32))

    def by(loss_fn):
        def value(params):
            return base.loss_metrics(loss_fn(net(params, rows["x"]), batch))[0]["loss"][0]

        return jax.jit(jax.value_and_grad(value))(init(jax.random.key(0)))

    def plain(logits, batch):
        xent = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        return jnp.mean(xent), len(xent)

    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), by(loss), by(plain))


def test_a_metric_that_is_an_array_is_named(tmp_path):
    @flax.struct.dataclass
    class Rows(Confusion):
        def merge(self, other):
            return Rows(self.counts + other.counts)

        def compute(self):
            return self.counts

    def with_rows(logits, batch):
        mask = batch.eval_sample_weights
        rows = Rows(Confusion.from_model_output(logits=logits, labels=batch.labels, mask=mask).counts)
        return {"loss": (jnp.mean(logits), 1.0), "rows": rows}

    with raises_naming(UserError, "clu metric 'rows' (Rows)", "(3, 3)"):
        st.train(experiment(loss=with_rows), tmp_path)


def test_a_metric_that_fails_is_named(tmp_path):
    def with_std(logits, batch):
        return {"loss": (jnp.mean(logits), 1.0), "std": metrics.Std.from_model_output(logits[:, 0])}

    with raises_naming(UserError, "clu metric 'std' (Std)", "TypeError"):
        st.train(experiment(loss=with_std), tmp_path)


def test_a_loss_that_is_no_average_is_named(tmp_path):
    with raises_naming(UserError, "loss_name", "'loss'", "clu Std", "(value, weight)"):
        st.train(experiment(loss=lambda logits, batch: {"loss": metrics.Std.from_model_output(logits)}), tmp_path)


def test_two_metrics_of_one_name_are_refused():
    one = metrics.Average.from_model_output(jnp.ones(3))
    collection = metrics.Collection.create_collection(loss=one)
    with pytest.raises(UserError, match="two metrics named 'loss'"):
        base.loss_metrics({"loss": (1.0, 1.0), "more": collection})


def test_early_stopping_may_watch_a_clu_metric(tmp_path):
    def watching(metric):
        class Watches(experiment()):
            def task(self):
                task_p = super().task()
                task_p.early_stopping_fn = Config(EarlyStopping, metric=metric)
                return task_p

        return Watches

    st.train(watching("heldout/recall/1"), tmp_path / "run")
    with raises_naming(UserError, "heldout/recal/1", "no such metric"):
        st.train(watching("heldout/recal/1"), tmp_path / "other")


@pytest.mark.full
def test_metrics_under_pmap_are_those_of_the_whole_batch():
    task = tasks_lib.build_task(experiment()().task())
    rows = NestedMap(data(16, 2), eval_sample_weights=np.ones(16, np.float32))
    key = jax.random.key(0)
    state, _ = trainer_lib.initialize_model_state(task, key, rows)
    split = jax.tree.map(lambda x: x.reshape(8, 2, *x.shape[1:]), rows)
    evaluate = jax.pmap(lambda s, k, r: trainer_lib.eval_step_single_learner(task, s, k, r), axis_name="batch")
    _, output = evaluate(trainer_lib.replicate_model_state(state), jax.random.split(key, 8), split)
    first = jax.tree.map(lambda x: np.asarray(x[0]), output.clu_metrics)
    whole = expected(state.mdl_vars["params"], rows)
    for name, value in packing.computed_clu(first).items():
        np.testing.assert_allclose(value, whole[name], rtol=2e-5, err_msg=name)
    assert len(packing.computed_clu(first)) == 2 + CLASSES
