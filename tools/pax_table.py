"""Builds every experiment registered by paxml, with `paxml` renamed, and prints a table for docs/coming_from_pax.md.

    VOCAB_PATH=some_sentencepiece.model python tools/pax_table.py --write

Each module is imported from the installed paxml's sources (`spmd_trainer/pax/published.py`), and each of its
experiments is built on an abstract mesh of its declared size: the config is resolved, the model is traced, and every
variable gets its layout. Reads no data: an experiment whose input can't report its shapes without them gets a made-up
input of these shapes.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import math
import pathlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
from absl import logging
from praxis import base_input, pax_fiddle
from praxis.py_utils import NestedMap

from spmd_trainer import experiment_registry, tasks_lib
from spmd_trainer.inputs import ArrayInput
from spmd_trainer.step import mesh_choice
from spmd_trainer.step.pjit import PjitPartitioner
from spmd_trainer.training import experiment_config

DOCS = pathlib.Path(__file__).parents[1] / "docs" / "coming_from_pax.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
MODULES = (
    "tasks.lm.params.lm_cloud",
    "tasks.lm.params.optimal_scaling",
    "tasks.lm.params.bert",
    "tasks.lm.params.c4",
    "tasks.lm.params.c4_multislice",
    "tasks.lm.params.nvidia",
    "tasks.vision.params.mnist",
    "tasks.vision.params.imagenet_resnets",
    "tasks.test.synthetic",
    "contrib.gpu.scripts_gpu.llama_utils",
    "contrib.gpu.scripts_gpu.configs",
)
# Experiments that no trainer can run, and why.
NOT_RUNNABLE = {
    "SyntheticClassifier": "its task() returns a layer, in Pax too",
    "SharedNameExperiment": "its task() returns a layer, in Pax too",
    "BaseLLaMA": "declares no dataset, in Pax too: LLaMA7B and the others derive from it",
}
# Experiments whose input downloads its data before it can say its shapes: the made-up examples of the input.
MADE_UP = {
    "MnistExperiment": lambda rows: NestedMap(
        inputs=np.zeros((rows, 28, 28, 1), np.float32), labels=np.zeros((rows,), np.int32)
    )
}
# Experiments that train 4 steps in tests/pax_names/test_pax_training.py, at tiny sizes.
TRAINED = (
    "BertAdamL4H128",
    "BertSpmdL4H128",
    "C4Spmd1BAdam4Replicas",
    "C4SpmdGpt3L16AdamOrgHP",
    "C4SpmdPipelineGpt3SmallAdam8Replicas",
    "LmCloudSpmdAdam",
    "MnistExperiment",
    "Synthetic126M",
    "TestSmallConfig",
)


@dataclasses.dataclass(frozen=True)
class Built:
    """A built experiment.

    Attributes:
      mesh: size of each axis.
      num_params: elements of the trainable variables.
      made_up: True if the input was made up.
    """

    mesh: dict[str, int]
    num_params: int
    made_up: bool


def experiments(module: str) -> dict[str, type]:
    """Imports a module and returns its registered experiments by class name."""
    name = f"spmd_trainer.{module}"
    importlib.import_module(name)
    registered = experiment_registry.get_all().items()
    return {cls.__name__: cls for full, cls in registered if full.startswith(f"{name}.")}


def build(cls: type) -> Built:
    """Builds an experiment on an abstract mesh of its declared size.

    Raises:
      UserError: the build fails.
    """
    declared = mesh_choice.declared_mesh(cls().task().model)
    shape = {mesh_choice.DEFAULT_AXIS: 8} if declared is None else declared.shape
    num_devices = math.prod(shape.values())
    # Pax's experiments ask for the devices to choose their batch size.
    with (
        mock.patch.object(jax, "device_count", return_value=num_devices),
        mock.patch.object(jax, "local_device_count", return_value=num_devices),
    ):
        resolved = experiment_config.resolve(cls)
        task = tasks_lib.build_task(resolved.task_p)
        specs = _specs(resolved)
    partitioner = PjitPartitioner()
    partitioner.use_mesh(jax.sharding.AbstractMesh(tuple(shape.values()), tuple(shape)))
    partitioner.setup(task, specs)
    return Built(shape, partitioner.metadata.num_params(), cls.__name__ in MADE_UP)


def _specs(resolved: experiment_config.ResolvedExperiment) -> Any:
    made_up = MADE_UP.get(type(resolved.experiment).__name__)
    if made_up is not None:
        examples = made_up(8)
        made = ArrayInput(name="made_up", arrays=examples, batch_size=8, is_training=True)
        return made.input_specs()
    provider = pax_fiddle.build(resolved.experiment.get_input_specs_provider_params())
    assert isinstance(provider, base_input.BaseInputSpecsProvider)
    return provider.get_input_specs()


def rows(modules: tuple[str, ...] = MODULES) -> Iterator[tuple[str, str, str, str, str]]:
    """Yields (module, experiment, imports, builds, trains) for every registered experiment."""
    for module in modules:
        for name, cls in experiments(module).items():
            if name in NOT_RUNNABLE:
                yield module, name, "yes", f"no: {NOT_RUNNABLE[name]}", ""
                continue
            try:
                built = build(cls)
            except ValueError as error:
                yield module, name, "yes", f"no: {str(error).splitlines()[0]}", ""
                continue
            mesh = ", ".join(f"{axis} {size}" for axis, size in built.mesh.items())
            what = f"{mesh}: {_number(built.num_params)} parameters" + (", made-up input" if built.made_up else "")
            yield module, name, "yes", what, "4 steps" if name in TRAINED else ""


def _number(count: int) -> str:
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M")):
        if count >= size:
            return f"{count / size:.3g}{unit}"
    return str(count)


def table(found: list[tuple[str, str, str, str, str]]) -> str:
    lines = ["| module | experiment | imports | builds on its mesh | trains |", "|---|---|---|---|---|"]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in found])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", help="e.g. tasks.lm.params.c4; all by default")
    parser.add_argument("--write", action="store_true", help="write the table of all modules into the documentation")
    args = parser.parse_args()
    logging.set_verbosity(logging.ERROR)
    if args.write:
        before, _, rest = DOCS.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        DOCS.write_text(f"{before}{BEGIN}\n{table(list(rows()))}\n{END}{after}")
    else:
        print(table(list(rows(tuple(args.modules) or MODULES))))


if __name__ == "__main__":
    sys.exit(main())
