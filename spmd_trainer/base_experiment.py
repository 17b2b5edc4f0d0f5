"""The base class of experiments, which declare their datasets, their task, and (through the task's model) their mesh.

Pax's program classes are here too, because Pax's experiments return them. This trainer has one training, one evaluation and one
decode loop (in `training/`). A program is only a placeholder for one of the loops; `check_overrides` refuses custom programs.
"""

from __future__ import annotations

import abc
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

import jax
from absl import logging
from praxis import base_input, pax_fiddle

from spmd_trainer import tasks_lib
from spmd_trainer.errors import UserError
from spmd_trainer.sharding.messages import mesh_text

# pax_fiddle.Config of a praxis BaseInput.
InputConfig: TypeAlias = Any

_INSTEAD_OF_PROGRAMS = (
    "this trainer has one loop for each mode: use callbacks (task.train.callbacks), or write a loop of your own with "
    "partitioning.partition_spmd_model"
)


class Program:
    """Pax's base class of programs. Here, a program is a placeholder for a loop in `training/` and can't be run."""

    def setup(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises UserError, like `run`, `should_run` and `shutdown`."""
        raise UserError(f"a {type(self).__name__} can't be run: {_INSTEAD_OF_PROGRAMS}")

    run = should_run = shutdown = setup


class BaseTrainProgram(Program):
    """Pax's base class of training programs."""


class SingleTaskTrainProgram(BaseTrainProgram):
    """Placeholder for the training loop, `training/train.py`."""


class BaseEvalProgram(Program):
    """Pax's base class of evaluation programs."""

    def __init__(self, input_p: InputConfig):
        self.input_p = input_p


class SingleTaskEvalProgram(BaseEvalProgram):
    """Placeholder for the evaluation of one dataset, `training/evaluate.py`."""


class SingleTaskDecodeProgram(Program):
    """Placeholder for the decoding of one dataset, `training/decode.py`."""

    def __init__(self, input_p: InputConfig):
        self.input_p = input_p


class BaseExperiment(metaclass=abc.ABCMeta):
    """Base class of experiments, whose methods return configs. No object is built and no device is touched before a run.

    As in Pax, subclasses define class attributes in capitals (`ICI_MESH_SHAPE`, `PERCORE_BATCH_SIZE`, `NUM_LAYERS`, ...),
    which `datasets()` and `task()` read.

    Attributes:
      XLA_FLAGS: compiler flags of the train step, e.g. {"xla_gpu_enable_latency_hiding_scheduler": True}. Names that begin with
        xla_gpu_, xla_tpu_ or xla_cpu_ apply only on devices of that kind. A flag that the installed XLA doesn't know is an error.
      sweep: what `--mode=sweep` varies, e.g. {"LEARNING_RATE": [1e-3, 1e-2], "task.train.random_seed": [1, 2, 3]}.
    """

    XLA_FLAGS: Mapping[str, bool | int | float | str] = types.MappingProxyType({})
    sweep: Mapping[str, object] = types.MappingProxyType({})

    @abc.abstractmethod
    def datasets(self) -> list[InputConfig]:
        """Returns the input configs for training (`is_training=True`) and evaluation. Evaluation inputs need distinct names."""

    @abc.abstractmethod
    def task(self) -> pax_fiddle.Config[tasks_lib.SingleTask]:
        """Returns the config of the task: model, mesh, learner, intervals."""

    def training_dataset(self) -> InputConfig:
        """Returns the experiment's only training input. An older method of Pax; `train_datasets` returns a list instead.

        Raises:
          ValueError: the number of training datasets is not one.
        """
        training = self.train_datasets()
        if len(training) != 1:
            raise ValueError(f"{type(self).__name__} has {len(training)} training datasets, and this needs exactly one")
        return training[0]

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
        """Pax's older method for decode inputs: `decode_datasets` calls it by default. Returns [] by default."""
        return []

    def get_input_specs_provider_params(self) -> pax_fiddle.Config[base_input.BaseInputSpecsProvider]:
        """Returns the config of the object that provides the shapes and dtypes of one process's batch.

        By default, the object calls the training input's `input_specs()`, or reads its first batch if the input has no such
        method. An experiment without training datasets sets `task.train.always_use_train_for_model_init=False`; then its first
        evaluation or decode input is used instead.

        Raises:
          ValueError: the experiment has several training datasets; or none, and no other input may be used instead.
        """
        from spmd_trainer.inputs import batches

        training = self.train_datasets()
        if not training and not self.task().train.always_use_train_for_model_init:
            training = [*self.eval_datasets(), *self.decode_datasets()][:1]
        if len(training) != 1:
            raise ValueError(
                f"{type(self).__name__} has {len(training)} training datasets, but the default input specs need exactly one; "
                "override get_input_specs_provider_params()"
            )
        return pax_fiddle.Config(batches.DatasetSpecsProvider, input_p=training[0])

    def validate(self) -> None:  # noqa: B027 (empty on purpose: overriding it is optional)
        """Raises ValueError if the experiment's settings contradict each other. Called before anything is built."""

    def partitioner(self) -> Any | None:
        """Returns the partitioner to use, or None for the default, `partitioning.PjitPartitioner`."""
        return None

    def adapt_mesh(self, mesh_shape: Mapping[str, int], num_devices: int) -> dict[str, int] | None:
        """Returns the mesh to use if the declared mesh does not fit the devices; None if the mesh is fixed.

        The default returns None, and the run ends with an error that names a `--mesh` that fits. An experiment that runs on
        any number of devices returns e.g. `sharding.fit_mesh_shape(mesh_shape, num_devices, grow="data")`.

        Args:
          mesh_shape: {axis: declared size over all slices}, outermost axis first. One size may be -1.
          num_devices: the number of available devices.
        """
        del mesh_shape, num_devices
        return None

    def available_devices(self, step: int) -> Sequence[jax.Device] | None:
        """Returns the devices to use after `step`, or None for the current ones.

        Called after every step if the partitioner is elastic. Override it to ask the scheduler or runtime which devices were
        added or removed.
        """
        del step
        return None

    def mesh_for_devices(self, mesh_shape: Mapping[str, int], num_devices: int) -> dict[str, int]:
        """Returns the mesh to use when the number of devices of an elastic run changes.

        The default changes the size of one axis: 'data' if the mesh has it, otherwise the largest.

        Args:
          mesh_shape: the current size of each axis.
          num_devices: the new number of devices.

        Raises:
          ValueError: the product of the other axes' sizes does not divide `num_devices`.
        """
        axis = "data" if "data" in mesh_shape else max(mesh_shape, key=mesh_shape.__getitem__)
        others = math.prod(size for name, size in mesh_shape.items() if name != axis)
        if num_devices < others or num_devices % others:
            raise ValueError(
                f"elastic: {num_devices} devices can't carry the mesh ({mesh_text(mesh_shape)}) if only the size of {axis!r} "
                f"changes: the other axes multiply to {others}; override mesh_for_devices in {type(self).__name__}"
            )
        return {**mesh_shape, axis: num_devices // others}

    def train_programs(self) -> list[BaseTrainProgram]:
        """Returns a list with the placeholder for the training loop. `check_overrides` refuses custom programs."""
        return [SingleTaskTrainProgram()]

    def eval_programs(self) -> list[BaseEvalProgram]:
        """Returns one placeholder for each of `eval_datasets()`. The datasets alone decide what is evaluated."""
        return [SingleTaskEvalProgram(input_p) for input_p in self.eval_datasets()]

    def decode_programs(self) -> list[SingleTaskDecodeProgram]:
        """Returns one placeholder for each of `decode_datasets()`. The datasets alone decide what is decoded."""
        return [SingleTaskDecodeProgram(input_p) for input_p in self.decode_datasets()]

    def executor(self) -> Any | None:
        """Returns None, because the loops in `training/` replace Pax's executors; see `check_overrides`."""
        return None

    def search(self) -> Any:
        """Returns the `automl.SearchHParams` for `--mode=sweep`, as in Pax. The default raises NotImplementedError."""
        raise NotImplementedError("this experiment declares no search")

    def sub_experiments(self) -> dict[str, type[BaseExperiment]]:
        """Returns {'': the experiment's class}. An override is ignored with a warning, see `check_overrides`."""
        return {"": type(self)}


def check_overrides(experiment: BaseExperiment) -> None:
    """Refuses unsupported overrides of Pax's methods in an experiment. An override of `sub_experiments` only logs a warning.

    Args:
      experiment: the experiment, with the class attributes that `--fdl.set` overrides already set.

    Raises:
      UserError: the experiment returns custom programs or an executor, or its programs don't match its eval and decode
        datasets.
    """
    name, cls = type(experiment).__name__, type(experiment)
    train = experiment.train_programs()
    if [type(program) for program in train] != [SingleTaskTrainProgram]:
        shown = [type(program).__name__ for program in train]
        raise UserError(f"{name}.train_programs() returns {shown}; {_INSTEAD_OF_PROGRAMS}")
    kinds: list[tuple[str, type[Program], list[InputConfig]]] = [
        ("eval", SingleTaskEvalProgram, experiment.eval_datasets()),
        ("decode", SingleTaskDecodeProgram, experiment.decode_datasets()),
    ]
    for kind, standard, datasets in kinds:
        if getattr(cls, f"{kind}_programs") is not getattr(BaseExperiment, f"{kind}_programs"):
            _check_programs(f"{name}.{kind}_programs()", getattr(experiment, f"{kind}_programs")(), standard, datasets)
    if experiment.executor() is not None:
        raise UserError(f"{name}.executor() returns an executor; {_INSTEAD_OF_PROGRAMS}")
    if cls.sub_experiments is not BaseExperiment.sub_experiments:
        logging.warning(
            "%s overrides sub_experiments(), which has no effect: a run has one experiment, and trains it as it is",
            name,
        )


def swept_attributes(cls: type) -> Sequence[str]:
    """Returns the names of the class attributes that Pax's decorator `automl.parameter_sweep` has turned into properties."""
    names: Sequence[str] = getattr(cls, "COMBINED_DECISION_POINT_NAMES", ())
    return names


def refuse_search_space(cls: type[BaseExperiment]) -> None:
    """Raises UserError if class attributes are PyGlove search spaces instead of single values; the message names them."""
    found = [name for name in swept_attributes(cls) if type(getattr(cls, name)) is property]
    for name in dir(cls):
        if name.isupper() and type(getattr(cls, name, None)).__module__.partition(".")[0] == "pyglove":
            found.append(name)
    if found:
        raise UserError(
            f"{cls.__name__}.{found[0]} is a search space: --mode=sweep tries its values; set {', '.join(found)} for a single run"
        )


def _check_programs(
    what: str, programs: Sequence[Any], standard: type[Program], datasets: Sequence[InputConfig]
) -> None:
    others = [type(program).__name__ for program in programs if type(program) is not standard]
    if others:
        raise UserError(f"{what} returns {others}; {_INSTEAD_OF_PROGRAMS}")
    named, own = [str(program.input_p.name) for program in programs], [str(dataset.name) for dataset in datasets]
    if named != own:
        kind = "eval_datasets" if standard is SingleTaskEvalProgram else "decode_datasets"
        raise UserError(f"{what} is for the datasets {named}, and {kind}() returns {own}; make them the same")
