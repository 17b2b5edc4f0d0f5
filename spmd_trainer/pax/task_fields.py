"""Unsupported fields of Pax's `SingleTask`: some are ignored with a warning, others raise an error. Also Pax's early stopping.

`tasks_lib.SingleTask` and its sections inherit these classes, so that Pax's experiment files can set the fields. If a field is
set to a value other than its default, `check` warns if that would not change the results of training, and raises an error if it
would.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import fiddle as fdl
from absl import logging


@dataclasses.dataclass(frozen=True)
class TrainFields:
    """Fields of Pax's `SingleTask.Train` that this trainer ignores or refuses; see `IGNORED` and `REFUSED`."""

    async_summary_writing: bool = True
    compute_steps_per_sec_interval_steps: int = 10
    profiler_max_num_hosts: int | None = None
    profiler_capture_host_profile: bool = False
    tensorstore_metadata_key: str | None = None
    restore_transformations: Any = None
    external_checkpoint_path: Any = None
    external_checkpoint_handler: Any = None
    report_progress_hook: bool = False


@dataclasses.dataclass(frozen=True)
class DecodeFields:
    """Fields of Pax's `SingleTask.Decode` that this trainer ignores; see `IGNORED`."""

    profiler_num_steps: int = 0
    profiler_min_duration_sec: float = 1.0
    profiler_capture_step: int | None = 1
    profiler_max_num_hosts: int | None = None


@dataclasses.dataclass(frozen=True)
class VariationalNoise:
    """Settings for Pax's variational noise, which is added to the weights in training. Refused unless `vn_scale` is 0.

    Attributes:
      vn_scale: standard deviation of the noise.
      vn_regex: regex for the names of the variables that get noise.
      vn_start_step: first training step with noise.
    """

    vn_scale: float = 0.0
    vn_regex: str = ""
    vn_start_step: int = 0


@dataclasses.dataclass(frozen=True)
class InferWriter:
    """Pax's settings for `--mode=infer`, which are ignored with a warning."""

    restore_checkpoint_dir: str = ""
    restore_checkpoint_step: int | None = None
    inference_runner: Any = None
    output_format: Any = None
    output_num_shards: int = 32


# {path below task: what happens instead}
IGNORED = {
    "train.async_summary_writing": "a separate thread always writes the summaries",
    "train.compute_steps_per_sec_interval_steps": "steps per second are averaged between two progress lines",
    "train.profiler_max_num_hosts": "every process writes its own profile",
    "train.profiler_capture_host_profile": "profiles always have the host's threads",
    "train.tensorstore_metadata_key": "checkpoints have Orbax' own names",
    "train.report_progress_hook": "progress lines are always logged (task.train.log_train_output_interval_steps)",
    "decode.profiler_num_steps": "decoding is not profiled; --jax_profiler_port shows a running job",
    "decode.profiler_min_duration_sec": "decoding is not profiled",
    "decode.profiler_capture_step": "decoding is not profiled",
    "decode.profiler_max_num_hosts": "decoding is not profiled",
    "infer_writer": "--mode=infer decodes like decode_once; give --restore_checkpoint_dir and --restore_checkpoint_step",
}
REFUSED = {
    "train.restore_transformations": "use task.train.init_from_checkpoint_rules, whose templates rename variables",
    "train.external_checkpoint_path": "use task.train.init_from_checkpoint_rules={directory: CheckpointLoadingRules(...)}",
    "train.external_checkpoint_handler": "use task.train.init_from_checkpoint_rules={directory: CheckpointLoadingRules(...)}",
    "loss_aggregator": "give one loss: task.train.learner.loss_name; a model's __call__ can return the sum of several",
    "vn.vn_scale": "noise on the weights is not supported; add it in the model's layers",
}


def check(sections: Mapping[str, Any]) -> None:
    """Warns once about ignored fields that are set, and raises an error for fields that would change the results.

    Args:
      sections: {path of a task's section, e.g. 'train': its settings}; the path of the task itself is ''.

    Raises:
      ValueError: a field of `REFUSED` is set.
    """
    ignored = []
    for path, instead in {**IGNORED, **REFUSED}.items():
        section, _, field = path.rpartition(".")
        settings = sections.get(section)
        if settings is None or getattr(settings, field) == _default(settings, field):
            continue
        text = f"task.{path}={getattr(settings, field)!r:.80}"
        if path in REFUSED:
            raise ValueError(f"{text} is not supported: {instead}")
        ignored.append(f"{text}: {instead}")
    if ignored:
        _warn("Settings of Pax that have no effect here:\n  " + "\n  ".join(ignored))


def _default(settings: Any, field: str) -> Any:
    cls = fdl.get_callable(settings) if isinstance(settings, fdl.Buildable) else type(settings)
    return next(f.default for f in dataclasses.fields(cls) if f.name == field)


@functools.cache  # a job builds its task several times
def _warn(text: str) -> None:
    logging.warning("%s", text)


class RunningMode(enum.Flag):
    """What a job has just done: train, evaluate or decode. Pax passes it to an `early_stopping_fn`."""

    UNKNOWN = 0
    TRAIN = enum.auto()
    EVAL = enum.auto()
    DECODE = enum.auto()

    @classmethod
    def detect(cls, has_train_metrics: bool, has_eval_metrics: bool, has_decode_metrics: bool) -> RunningMode:
        """Returns the mode with the flags TRAIN, EVAL and DECODE set for those kinds of metrics that are present."""
        given = {cls.TRAIN: has_train_metrics, cls.EVAL: has_eval_metrics, cls.DECODE: has_decode_metrics}
        mode = cls.UNKNOWN
        for flag, is_set in given.items():
            mode |= flag if is_set else cls.UNKNOWN
        return mode

    @property
    def has_train(self) -> bool:
        """True if the job trained."""
        return bool(self & RunningMode.TRAIN)

    @property
    def has_eval(self) -> bool:
        """True if the job evaluated."""
        return bool(self & RunningMode.EVAL)

    @property
    def has_decode(self) -> bool:
        """True if the job decoded."""
        return bool(self & RunningMode.DECODE)


def metrics_prefix(dataset: str) -> str:
    """Returns Pax's prefix for names of evaluation metrics. `dataset`: the dataset's name, or 'train' for a training batch."""
    return "eval_train/metrics/" if dataset == "train" else f"eval_test_{dataset}/metrics/"


class PaxEarlyStopping:
    """Wraps an `early_stopping_fn` that takes Pax's five arguments, so that it can be called with this trainer's four.

    The function gets each metric under this trainer's name and under Pax's name ('eval_test_DATASET/metrics/log_pplx' or
    'eval_train/metrics/log_pplx'), `RunningMode.EVAL`, and None as checkpoint path, because the state is not saved yet.
    """

    def __init__(self, fn: Callable[..., bool]):
        self._fn = fn

    def __call__(self, metrics: Mapping[str, float], running_mode: str, step: int, is_last: bool) -> bool:
        """Returns True if training must stop. The arguments are those of `tasks_lib.EarlyStoppingFn`."""
        del running_mode
        both = dict(metrics)
        for key, value in metrics.items():
            dataset, _, metric = key.partition("/")
            both[metrics_prefix(dataset) + metric] = value
        return bool(self._fn(both, RunningMode.EVAL, step, is_last, None))


def has_pax_signature(fn: Any) -> bool:
    """Returns True if an early-stopping function takes Pax's five arguments. One with `*args` is assumed to take four."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return False
    takes_any = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in signature.parameters.values())
    return not takes_any and _accepts(signature, 5)


def _accepts(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True
