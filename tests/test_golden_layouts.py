"""Compares the layout of every registered experiment's variables and inputs with the files in `tests/golden/`.

After an intended change: UPDATE_GOLDEN=1 pytest tests/test_golden_layouts.py
"""

import os
import pathlib

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from praxis import pax_fiddle

from spmd_trainer import experiment_modules, experiment_registry, sharding, tasks_lib
from spmd_trainer.sharding.messages import mesh_text
from spmd_trainer.step import pjit
from spmd_trainer.training import experiment_config

GOLDEN = pathlib.Path(__file__).parent / "golden"
UPDATE = "UPDATE_GOLDEN=1 pytest tests/test_golden_layouts.py"

experiment_modules.import_package(experiment_registry.EXPERIMENTS_PACKAGE)
# Only those of `experiments/`: other tests register their own.
EXPERIMENTS = sorted(
    experiment_registry.short_name(name)
    for name in experiment_registry.get_all()
    if name.startswith("spmd_trainer.experiments.")
    and "needs_folder" not in experiment_registry.get_registry_tags(name)
)


def layout(name):
    """Returns the experiment's layout on its declared mesh as text. Allocates nothing, so any number of devices will do."""
    resolved = experiment_config.resolve(name)
    task = tasks_lib.build_task(resolved.task_p)
    model = task.model
    shape = np.multiply(model.ici_mesh_shape, model.dcn_mesh_shape or [1] * len(model.ici_mesh_shape))
    axes = tuple(model.mesh_axis_names)
    mesh = AbstractMesh(tuple(int(n) for n in shape), axes, axis_types=(AxisType.Auto,) * len(axes))
    partitioner = resolved.experiment.partitioner() or pjit.PjitPartitioner()
    partitioner.use_mesh(mesh)
    specs = pax_fiddle.build(resolved.experiment.get_input_specs_provider_params()).get_input_specs()
    partitioner.setup(task, specs)
    metadata = partitioner.metadata
    lines = [f"mesh {mesh_text(mesh.shape)}"]
    lines.append(f"{metadata.num_params()} parameters, {len(metadata.records())} arrays in the train state")
    mapping = task.train.inputs_split_mapping
    if mapping is not None:
        inputs = sharding.input_partition_specs(mapping, dict(mesh.shape), specs)
        by_path = dict(jax.tree_util.tree_leaves_with_path(inputs, is_leaf=lambda x: x is None))
        for path, x in jax.tree_util.tree_leaves_with_path(specs):
            lines.append(f"input {sharding.path_str(path)} {x.shape} {by_path[path]}")
    for v in metadata.records():
        if not v.path.startswith("opt_states"):
            padded = f" padded to {v.padded_shape}" if v.is_padded else ""
            lines.append(f"{v.path} {np.dtype(v.dtype)} {v.logical_shape}{padded} {v.spec}: {v.reason}")
    return "\n".join(lines) + "\n"


# One of each kind: the rest runs in `make test-all`.
SHORT = {
    "lm.cloud.LmCloudSpmd2BAdafactor",
    "lm.cloud.LmCloudSpmdMultislice2B",
    "lm.cloud.LmCloudSpmdPipelineMultislice2BCircular",
    "lm.gemma.TinyGemma3",
    "lm.gpt2.TinyGpt2",
    "lm.llama.Llama3_1_8BLora",
    "lm.llama.TinyLlamaLong",
    "lm.qwen.TinyQwen3Moe",
    "lm.stdlib.StdlibBytesTiny",
    "synthetic.shard_map.ShardMapFsdpTiny",
    "synthetic.structures.TinyByStrategy",
    "vision.digits.DigitsNnxTiny",
}


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.full) for name in EXPERIMENTS]
)
def test_layout_matches_the_golden_file(name):
    path = GOLDEN / f"{name}.txt"
    text = layout(name)
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.exists(), f"{path.name} is missing; {UPDATE}"
    assert text == path.read_text(), f"the layout of {name} has changed; if this is intended: {UPDATE}"


def test_every_golden_file_has_an_experiment():
    assert sorted(path.name.removesuffix(".txt") for path in GOLDEN.iterdir()) == EXPERIMENTS
    assert set(EXPERIMENTS) >= SHORT
