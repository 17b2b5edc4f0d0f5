"""Pax's `parameterized_experiment`: an experiment whose task and inputs are arguments (configs), not methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from praxis import base_input, pax_fiddle

from spmd_trainer import base_experiment, tasks_lib
from spmd_trainer.base_experiment import InputConfig
from spmd_trainer.errors import UserError


class ParameterizedExperiment(base_experiment.BaseExperiment):
    """An experiment whose task and inputs are given as arguments (configs), instead of being defined by methods.

    experiment = ParameterizedExperiment(task=task_p, train_datasets=[train_p], eval_datasets=[eval_p])
    spmd_trainer.train(experiment, "runs/mine")
    """

    def __init__(
        self,
        *,
        task: pax_fiddle.Config[tasks_lib.SingleTask],
        train_datasets: Sequence[InputConfig] = (),
        eval_datasets: Sequence[InputConfig] = (),
        decode_datasets: Sequence[InputConfig] = (),
        input_specs_provider: pax_fiddle.Config[base_input.BaseInputSpecsProvider] | None = None,
        training_dataset: InputConfig | None = None,
        decoder_datasets: Sequence[InputConfig] = (),
    ):
        """Stores the configs, and checks that `is_training` is True for training inputs and False for all others.

        Args:
          task: config of the task.
          train_datasets: configs of the training inputs, with `is_training=True`.
          eval_datasets: configs of the evaluation inputs.
          decode_datasets: configs of the inputs to decode.
          input_specs_provider: config of a provider of a batch's shapes and dtypes; None to use those of the training input.
          training_dataset: older argument of Pax for one training input, which is added to `train_datasets`.
          decoder_datasets: older argument of Pax for inputs to decode, which are added to `decode_datasets`.

        Raises:
          UserError: an input has the wrong `is_training`.
        """
        self._task = task
        self._train_datasets = [*train_datasets, *([] if training_dataset is None else [training_dataset])]
        self._eval_datasets = list(eval_datasets)
        self._decode_datasets = [*decode_datasets, *decoder_datasets]
        self._input_specs_provider = input_specs_provider
        _check("train_datasets", self._train_datasets, True)
        _check("eval_datasets", self._eval_datasets, False)
        _check("decode_datasets", self._decode_datasets, False)

    def task(self) -> pax_fiddle.Config[tasks_lib.SingleTask]:
        """Returns the task's config."""
        return self._task

    def datasets(self) -> list[InputConfig]:
        """Returns the configs of the training and the evaluation inputs."""
        return self.train_datasets() + self.eval_datasets()

    def train_datasets(self) -> list[InputConfig]:
        """Returns the configs of the training inputs."""
        return self._train_datasets

    def eval_datasets(self) -> list[InputConfig]:
        """Returns the configs of the evaluation inputs."""
        return self._eval_datasets

    def decode_datasets(self) -> list[InputConfig]:
        """Returns the configs of the inputs to decode."""
        return self._decode_datasets

    def get_input_specs_provider_params(self) -> pax_fiddle.Config[base_input.BaseInputSpecsProvider]:
        """Returns `input_specs_provider` if it was given, otherwise a config that takes the specs from the training input."""
        return self._input_specs_provider or super().get_input_specs_provider_params()


def _check(argument: str, datasets: list[Any], is_training: bool) -> None:
    for dataset in datasets:
        if dataset.is_training != is_training:
            raise UserError(
                f"{argument} has the input {dataset.name!r} with is_training={dataset.is_training}; set it to {is_training}"
            )
