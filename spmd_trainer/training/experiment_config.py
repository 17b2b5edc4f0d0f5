"""Resolves an experiment's name and overrides to one validated configuration, before any device is touched."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import fiddle as fdl
import optax
from fiddle import absl_flags as fiddle_flags
from fiddle import daglish
from praxis import pax_fiddle

from spmd_trainer import experiment_registry, sharding, tasks_lib
from spmd_trainer.base_experiment import BaseExperiment, refuse_search_space
from spmd_trainer.errors import UserError, did_you_mean, first_paragraph, not_a_config, user_code
from spmd_trainer.models.config_lines import without_addresses
from spmd_trainer.step import mesh_choice, mup
from spmd_trainer.training import class_overrides

_DATASETS = ("train_datasets", "eval_datasets", "decode_datasets")
# Longer reprs of values are abbreviated.
_MAX_CHARS = 2000
_HOST_DEVICES_FLAG = "xla_force_host_platform_device_count"
# XLA can't start with arbitrarily many. A mesh that needs more is refused later, because it doesn't fit the available devices.
_MAX_HOST_DEVICES = 2**14


@dataclasses.dataclass
class ExperimentConfig:
    """An experiment's config. Override paths such as `task.train.num_train_steps` or `train_datasets[0].name` start here."""

    task: Any
    train_datasets: list[Any]
    eval_datasets: list[Any]
    decode_datasets: list[Any]


@dataclasses.dataclass(frozen=True)
class ResolvedExperiment:
    """An experiment with its overrides applied.

    Attributes:
      label: the name in messages: the string that the user gave or, for a class or an instance, the class's short name.
      experiment: an instance whose `task()` and `*_datasets()` return the overridden configs.
      config: the resolved fiddle config of `ExperimentConfig`.
      overrides: the overrides as given, each as 'path=value' or 'NAME=value'.
      class_attributes: the overridden class attributes by name.
    """

    name: str
    label: str
    experiment: BaseExperiment
    config: Any
    overrides: tuple[str, ...] = ()
    class_attributes: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def task_p(self) -> Any:
        return self.config.task

    def lines(self) -> list[str]:
        """Returns the config, defaults included, as sorted lines such as 'task.train.learner.loss_name: ...'.

        Overridden class attributes are lines too, such as 'NUM_LAYERS: 3'.
        """
        attributes = {name: _shown(value) for name, value in self.class_attributes.items()}
        settings = attributes | dict(_flatten(self.config, ""))
        return [f"{path}: {value}" for path, value in sorted(settings.items())]


def resolve(
    exp: str | type[BaseExperiment] | BaseExperiment,
    overrides: Iterable[str] = (),
    mesh: Sequence[tuple[str, int]] | None = None,
    join: Callable[[], int] | None = None,
) -> ResolvedExperiment:
    """Finds the experiment, applies the overrides and validates the result. Builds nothing.

    Args:
      exp: see `experiment_registry.find`.
      overrides: overrides of fields, each as 'path.to.field=value', and of class attributes, each as 'NAME=value'. The
        value is a Python literal. Class attributes are set first, because the config is built from them.
      mesh: the mesh of `--mesh`; None if the flag is not given.
      join: function that connects the job's processes and returns their number; None if no run follows. If given,
        `let_host_devices_stand_in` is called before the dataset methods, because those of Pax call `jax.local_device_count()`.

    Raises:
      UserError: the experiment, a field or an attribute is unknown; a value is invalid; or the experiment's settings contradict
        each other. See also `let_host_devices_stand_in`.
    """
    found, overrides = experiment_registry.find(exp), tuple(overrides)
    _check_class(found.cls, exp, found.label)
    try:
        experiment, attributes, config = _with_task(exp, found, overrides)
        if config.task.mup is not None:
            _resolve_base(config.task.mup, exp, found, overrides)
        with _errors_of(experiment, found.label):
            _validate_kinds(config)
            _validate_mesh(config.task)
        if join is not None:
            let_host_devices_stand_in(config.task, mesh, join())
        # The experiment's own methods must see the overridden task.
        experiment.task = lambda: config.task  # type: ignore[method-assign]
        for kind in _DATASETS:
            setattr(config, kind, list(getattr(experiment, kind)()))
        for assignment in overrides:
            if not assignment.startswith("task.") and not class_overrides.is_of_class(assignment):
                apply_override(config, assignment)
        with _errors_of(experiment, found.label):
            _validate_kinds(config)
            _validate_datasets(config)
        for kind in _DATASETS:  # the experiment's own methods return the overridden configs
            setattr(experiment, kind, functools.partial(list, getattr(config, kind)))
        with _errors_of(experiment, found.label):
            experiment.validate()
            _validate_names(config)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # raised by the experiment's own code, or by a library that it calls
        kind = "" if isinstance(error, ValueError | TypeError | AttributeError) else f"{type(error).__name__}: "
        own = user_code.lines(error)
        if kind and not own:
            raise
        where = "" if len(own) > 1 else user_code.where(error, found.cls)
        text = f"experiment {found.label}: {kind}{first_paragraph(error)}{where}"
        raise UserError("\n  ".join([text, *(own if len(own) > 1 else [])])) from error
    return ResolvedExperiment(found.name, found.label, experiment, config, overrides, attributes)


def _with_task(
    exp: object, found: experiment_registry.Found, overrides: Sequence[str]
) -> tuple[BaseExperiment, dict[str, Any], Any]:
    """Returns the experiment, its overridden class attributes, and its config with the overridden task but no datasets yet."""
    of_class = [assignment for assignment in overrides if class_overrides.is_of_class(assignment)]
    experiment, attributes = class_overrides.make_experiment(exp, found.cls, of_class)
    refuse_search_space(type(experiment))  # before task() computes with its values
    task_p = experiment.task()
    with _errors_of(experiment, found.label):
        if not isinstance(task_p, fdl.Buildable):
            is_task = tasks_lib.SingleTask in (task_p, type(task_p))
            wanted = f"task() returns {task_p!r:.200}; it must return a config of tasks_lib.SingleTask"
            raise not_a_config("what task() returns", task_p) if is_task else UserError(wanted)
    config = pax_fiddle.Config(ExperimentConfig, task=task_p)
    for assignment in overrides:
        if assignment.startswith("task."):
            apply_override(config, assignment)
    return experiment, attributes, config


def _resolve_base(mup_p: Any, exp: object, found: experiment_registry.Found, overrides: Sequence[str]) -> None:
    """Sets a `mup.Mup` config's `base_model`: the experiment's model after applying the overrides in the config's `base`.

    Raises:
      UserError: `base` is not a mapping, or names an attribute or a path that the experiment doesn't have.
    """
    if not (isinstance(mup_p, fdl.Buildable) and isinstance(mup_p.base, Mapping) and mup_p.base):
        raise UserError(
            'task.mup must be a config with a base, e.g. Config(st.Mup, base={"MODEL_DIMS": 64}), with values by class attribute '
            "or path"
        )
    _, _, config = _with_task(exp, found, [*overrides, *(f"{name}={value!r}" for name, value in mup_p.base.items())])
    mup_p.base_model = mup.BaseModel(config.task.model)


@contextlib.contextmanager
def _errors_of(experiment: BaseExperiment, label: str) -> Iterator[None]:
    """Context manager that adds the experiment's name and the user's source line to a UserError raised in its body."""
    try:
        yield
    except UserError as error:
        where = user_code.where(error, type(experiment))
        raise UserError(f"experiment {label}: {error}{where}") from error


def _check_class(cls: type, exp: object, label: str) -> None:
    if not issubclass(cls, BaseExperiment):
        raise UserError(
            f"{exp!r} is not an experiment: give a registered name, a BaseExperiment class or an instance of one"
        )
    missing = sorted(cls.__abstractmethods__)
    if missing:
        raise UserError(f"experiment {label} does not define {', '.join(missing)}{user_code.where_defined(cls)}")


def _flatten(value: Any, path: str) -> Iterator[tuple[str, str]]:
    prefix = f"{path}." if path else ""
    if isinstance(value, fdl.Buildable):
        if path:
            yield path, fdl.get_callable(value).__name__
        for name, child in fdl.ordered_arguments(value, include_defaults=True).items():
            yield from _flatten(child, f"{prefix}{name}")
    elif isinstance(value, dict) and any(isinstance(child, fdl.Buildable) for child in value.values()):
        for name, child in value.items():
            yield from _flatten(child, f"{path}[{name!r}]")
    elif isinstance(value, list | tuple) and any(isinstance(child, fdl.Buildable) for child in value):
        for index, child in enumerate(value):
            yield from _flatten(child, f"{path}[{index}]")
    else:
        named = callable(value) and hasattr(value, "__qualname__")
        yield path, f"{value.__module__}.{value.__qualname__}" if named else _shown(value)


def _shown(value: Any) -> str:
    """Returns a value's repr. A very long repr, such as a tokenizer's, is shortened to its beginning and a checksum."""
    text = repr(value)
    if len(text) <= _MAX_CHARS:
        return text
    checksum = zlib.crc32(without_addresses(text).encode())
    return f"{text[: _MAX_CHARS // 10]}... ({len(text)} characters, crc32 {checksum:08x})"


def apply_override(config: Any, assignment: str) -> None:
    """Applies one override 'path.to.field=value' to a config, and checks every part of the path.

    Raises:
      UserError: there is no '=', no such field (the message suggests the nearest name), or no Python literal as the value.
    """
    path, equals, text = assignment.partition("=")
    if not equals or not path:
        raise UserError(f"override {assignment!r} is not of the form path.to.field=value")
    try:
        steps = list(daglish.parse_path(path if path.startswith("[") else f".{path}"))
    except ValueError as error:
        raise UserError(f"{path!r} is not a path such as task.train.num_train_steps") from error
    try:
        node = config
        for done, step in enumerate(steps):
            _check_step(node, step, steps[:done], path)
            node = step.follow(node)
    except (IndexError, KeyError) as error:
        raise UserError(f"override {assignment!r}: {path} does not exist in the config ({error})") from error
    fiddle_flags.set_value_at_path(config, path, class_overrides.parse_value(assignment, path, text))


def without_replaced(assignments: Sequence[str], later: Sequence[str]) -> list[str]:
    """Returns the overrides in `assignments` except those whose path, or a parent of it, is assigned again in `later`."""
    paths = [assignment.partition("=")[0].strip() for assignment in later]
    return [
        assignment
        for assignment in assignments
        if not any(re.match(rf"{re.escape(path)}\s*[=.\[]", assignment.lstrip()) for path in paths)
    ]


def _check_step(node: Any, step: Any, before: list[Any], path: str) -> None:
    where = daglish.path_str(tuple(before)).lstrip(".") or "the experiment"
    if not isinstance(step, daglish.Attr):
        _check_element(node, step.key, where, path)
        return
    if isinstance(node, optax.GradientTransformation):
        raise UserError(
            f"override of {path}: {where} is an optax transformation, already made, so it has no fields. Write e.g. "
            f"Config(optax.adam, {step.name}=...) instead of optax.adam({step.name}=...) in the experiment"
        )
    if not isinstance(node, fdl.Buildable):
        raise UserError(
            f"override of {path}: {where} is {without_addresses(repr(node)):.80}, which has no field {step.name!r}"
        )
    fields = list(node.__signature_info__.parameters)
    if step.name not in fields:
        raise UserError(f"override of {path}: {where} has no field {step.name!r}{did_you_mean(step.name, fields)}")
    if step.name not in dir(node):
        raise UserError(f"override of {path}: {where}.{step.name} has no value yet; set it in the experiment")


def _check_element(node: Any, key: Any, where: str, path: str) -> None:
    if isinstance(node, list | tuple | dict):
        if isinstance(node, dict) or isinstance(key, int):
            return  # One that isn't there is an IndexError or a KeyError.
        raise UserError(f"override of {path}: the elements of {where} have numbers from 0; {key!r} is none")
    kind = "has fields" if isinstance(node, fdl.Buildable) else f"is {node!r:.80}"
    raise UserError(
        f"override of {path}: {where} {kind}, so it has no element {key!r}; write e.g. task.train.num_train_steps"
    )


def _validate_kinds(config: Any) -> None:
    """Checks that the task, `task.train` and the learner are still configs after overrides."""
    for path, node in (("task", config.task), ("task.train", getattr(config.task, "train", None))):
        if not isinstance(node, fdl.Buildable):
            raise UserError(
                f"{path} is {node!r:.80}; override one of its fields instead, e.g. task.train.num_train_steps=10"
            )
    learner = config.task.train.learner
    if not isinstance(learner, fdl.Buildable | list | tuple):
        raise UserError(f"task.train.learner is {learner!r:.80}; override one of its fields instead")


def _validate_datasets(config: Any) -> None:
    for kind in _DATASETS:
        if not isinstance(datasets := getattr(config, kind), list | tuple):
            raise UserError(f"{kind} is {datasets!r:.80}; give a list of configs of inputs")
        for index, dataset in enumerate(datasets):
            if not isinstance(dataset, fdl.Buildable):
                raise not_a_config(f"{kind}[{index}]", dataset)


def _validate_mesh(task_p: Any) -> None:
    """Checks that axis names, mesh sizes and split mappings fit each other, as far as this is possible without devices."""
    model_p = task_p.model
    for field in ("ici_mesh_shape", "dcn_mesh_shape"):
        if model_p.ici_mesh_shape is not None and getattr(model_p, field) is not None:
            _validate_sizes(f"task.model.{field}", getattr(model_p, field))
    declared = mesh_choice.declared_mesh(model_p)
    if declared is not None and task_p.train.inputs_split_mapping is not None:
        sharding.validate_split_mapping(task_p.train.inputs_split_mapping, declared.axis_names)


def _validate_sizes(field: str, shape: Any) -> None:
    if not isinstance(shape, list | tuple):
        raise UserError(f"{field} is {shape!r}; give a list of sizes, one per mesh axis, e.g. [1, 4, 2]")
    for size in shape:
        problem = sharding.size_problem(size)
        if problem:
            raise UserError(f"{field} is {list(shape)}: {problem}")
    if list(shape).count(-1) > 1:
        raise UserError(f"{field} is {list(shape)}: only one size may be -1 (the rest of the devices)")


def _validate_names(config: Any) -> None:
    for kind in ("eval_datasets", "decode_datasets"):
        names = [dataset.name for dataset in getattr(config, kind)]
        twice = sorted({str(name) for name in names if names.count(name) > 1})
        if twice:
            raise UserError(
                f"{kind} has several inputs named {', '.join(twice)}; give each its own name, which names its outputs"
            )


def let_host_devices_stand_in(task_p: Any, mesh: Sequence[tuple[str, int]] | None, processes: int = 1) -> None:
    """Makes XLA's CPU backend offer as many devices as the mesh needs, for machines without an accelerator. Touches no device.

    Does nothing if XLA_FLAGS already sets the number of CPU devices.

    Args:
      task_p: the task's config, whose model declares the mesh.
      mesh: the mesh of `--mesh`, which replaces the declared one; None if the flag is not given.
      processes: the number of processes that share the mesh, all with the same number of devices.

    Raises:
      UserError: the number of processes doesn't divide the number of devices.
    """
    declared = mesh_choice.declared_mesh(task_p.model)
    needed = None if declared is None else declared.num_devices
    if mesh:
        sizes = [size for _, size in mesh]
        needed = None if -1 in sizes else math.prod(sizes)
    if needed is None or not 1 < needed <= _MAX_HOST_DEVICES or _HOST_DEVICES_FLAG in os.environ.get("XLA_FLAGS", ""):
        return
    if needed % processes:
        raise UserError(f"{processes} processes can't share a mesh of {needed} devices evenly; change one of the two")
    # Only the CPU backend reads this flag; with an accelerator, the mesh consists of the accelerator's devices.
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{_HOST_DEVICES_FLAG}={needed // processes}".strip()
