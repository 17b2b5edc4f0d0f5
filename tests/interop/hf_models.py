"""Models of the Hugging Face folders in data/hf, and what transformers computed with them."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh
from praxis import base_layer
from praxis.py_utils import NestedMap

from spmd_trainer import hf, tasks_lib
from spmd_trainer.checkpointing import restore
from spmd_trainer.decoder.lora import LoraModel, is_adapter
from spmd_trainer.step import pjit
from spmd_trainer.train_states import TrainState

DATA = pathlib.Path(__file__).parent / "data" / "hf"
NAMES = tuple(sorted(path.name for path in DATA.iterdir() if path.is_dir()))
AXES = ("replica", "data", "mdl")


@functools.cache
def expected(folder: pathlib.Path) -> dict[str, np.ndarray]:
    """What transformers computed; see tools/make_hf_goldens.py."""
    with np.load(folder / "expected.npz") as file:
        return dict(file)


def mesh_of(*sizes: int) -> Mesh:
    """A mesh of the first devices."""
    count = int(np.prod(sizes))
    return Mesh(np.array(jax.devices()[:count]).reshape(sizes), AXES)


def lm_batch(ids: np.ndarray) -> NestedMap:
    """A batch whose labels are the next tokens; the last token of a row has none."""
    rows, length = ids.shape
    weights = np.ones((rows, length), np.float32)
    weights[:, -1] = 0
    return NestedMap(
        ids=ids,
        labels=np.roll(ids, -1, axis=1),
        paddings=np.zeros((rows, length), np.float32),
        weights=weights,
        segment_ids=np.ones((rows, length), np.int32),
        segment_pos=np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
        eval_sample_weights=np.ones(rows, np.float32),
    )


@dataclasses.dataclass
class _Predictions:
    """A model whose forward pass returns logits and loss."""

    model: Any

    def forward(self, mdl_vars, inputs, key, *, do_eval, mutable):
        del do_eval, mutable
        with base_layer.JaxContext.new_context():
            keys = {"params": key, "random": key}
            output, _ = self.model.apply(
                mdl_vars, inputs, method=self.model.compute_predictions, mutable=True, rngs=keys
            )
        return (output.logits, output.total_loss), {}


@dataclasses.dataclass
class FolderJob:
    """A folder's model on a mesh: what `hf.load` and `hf.export` need of a job."""

    task: tasks_lib.SingleTask
    partitioner: Any
    batch: NestedMap

    @property
    def prng_key(self) -> jax.Array:
        return jax.random.key(0)

    def logits_and_loss(self, state: TrainState) -> tuple[np.ndarray, float]:
        """Runs the model, with its adapters, on the batch."""

        def step(layout, state, key, inputs, *rest):
            del rest
            task = layout.task
            model = _Predictions(task.model)
            if task.lora is not None:
                model = LoraModel(model, task.lora, task.fprop_dtype, task.lora_model.matrix_dims())
            outputs, _ = model.forward(state.mdl_vars, inputs, key, do_eval=True, mutable=())
            return None, outputs

        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.batch)
        step = self.partitioner.partition(step, shapes, is_eval=True)
        on_devices = self.partitioner.layout.put(self.batch)
        _, (logits, loss) = step(state, self.prng_key, on_devices)
        return np.asarray(logits)[: len(self.batch.ids)], float(loss)


def make_job(
    folder: pathlib.Path, mesh: Mesh, *, optimizer: Any = None, lora: Any = None, **attributes: Any
) -> FolderJob:
    """Builds the model of a folder, with the adapters of `lora`. Compiles nothing."""
    experiment = hf.experiment_from_folder(folder, ICI_MESH_SHAPE=tuple(mesh.shape.values()), **attributes)()
    task_p = experiment.task()
    if optimizer is not None:
        task_p.train.learner.optimizer = optimizer
    task_p.lora = lora
    task = tasks_lib.build_task(task_p)
    batch = lm_batch(expected(folder)["ids"])
    partitioner = pjit.PjitPartitioner()
    partitioner.use_mesh(mesh)
    partitioner.setup(task, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch))
    return FolderJob(task, partitioner, batch)


def read(folder: pathlib.Path, job: FolderJob) -> TrainState:
    """Reads a folder without optimizer states and adapters. Compiles nothing."""
    layout = job.partitioner.layout.without_opt_states()
    base = jax.tree.map(lambda spec: None if is_adapter(spec.path) else spec, layout.variables)
    return restore(hf.open_source(epath.Path(folder), None), dataclasses.replace(layout, variables=base)).state
