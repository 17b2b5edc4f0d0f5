"""What an experiment declares: its datasets, its task, and (through the task's model) its mesh."""

from __future__ import annotations

import abc
from typing import Any, TypeAlias

from praxis import base_input, pax_fiddle

from spmd_trainer import tasks_lib

# pax_fiddle.Config of a praxis BaseInput.
InputConfig: TypeAlias = Any


class BaseExperiment(metaclass=abc.ABCMeta):
    """An experiment is a class that returns configurations; nothing is built and no device touched until it runs.

    Subclasses follow Pax's habit of class attributes in capitals (`ICI_MESH_SHAPE`, `PERCORE_BATCH_SIZE`, `NUM_LAYERS`,
    ...), read by `datasets()` and `task()`.
    """

    @abc.abstractmethod
    def datasets(self) -> list[InputConfig]:
        """Returns the input configs for training (`is_training=True`) and evaluation; names must differ."""

    @abc.abstractmethod
    def task(self) -> pax_fiddle.Config[tasks_lib.SingleTask]:
        """Returns the config of the task: model, mesh, learner, intervals."""

    def train_datasets(self) -> list[InputConfig]:
        """Returns the training inputs among `datasets()`."""
        return [dataset for dataset in self.datasets() if dataset.is_training]

    def eval_datasets(self) -> list[InputConfig]:
        """Returns the evaluation inputs among `datasets()`."""
        return [dataset for dataset in self.datasets() if not dataset.is_training]

    def decode_datasets(self) -> list[InputConfig]:
        """Returns the inputs that `--mode=decode` and `decode_once` read."""
        return self.decoder_datasets()

    def decoder_datasets(self) -> list[InputConfig]:
        """Pax's older name for `decode_datasets`."""
        return []

    def get_input_specs_provider_params(self) -> pax_fiddle.Config[base_input.BaseInputSpecsProvider]:
        """Returns the config of what tells the shapes and dtypes of one process's batch, before any input is built.

        The default asks the training input: its `input_specs()` where it has one, else its first batch.

        Raises:
          ValueError: there is not exactly one training dataset to ask.
        """
        from spmd_trainer.inputs import specs

        training = self.train_datasets()
        if len(training) != 1:
            raise ValueError(
                f"{type(self).__name__} has {len(training)} training datasets, so which one gives the input shapes is "
                "not clear; override get_input_specs_provider_params()"
            )
        return pax_fiddle.Config(specs.DatasetSpecsProvider, input_p=training[0])

    def validate(self) -> None:  # noqa: B027 (empty on purpose: overriding it is optional)
        """Called before anything is built; raises ValueError where the experiment contradicts itself."""

    def partitioner(self) -> Any | None:
        """Returns the partitioner to use, or None for `partitioning.PjitPartitioner`."""
        return None
