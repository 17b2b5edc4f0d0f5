"""Pax's `seqio_input`: SeqIO tasks and mixtures as inputs. Most code is in `pax/seqio_*.py`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from absl import logging
from praxis import pax_fiddle

from spmd_trainer.pax.seqio_input import (
    MetricType,
    SeqIOInput,
    configure_deterministic_input,
    feature_converter_class,
    import_seqio,
    is_packing_on,
)

__all__ = [
    "MetricType",
    "SeqIOInput",
    "configure_deterministic_input",
    "get_eval_hparams_for_seqio",
    "is_packing_on",
    "select_split",
]

# LanguageModelFeatures and the like derive from seqio's classes, so they are made when they are first used.
__getattr__ = feature_converter_class


def select_split(task: str, split_name: str | Callable[[str], str]) -> str:
    """Returns `split_name`; if it is a function, returns its result for the task's name."""
    return split_name(task) if callable(split_name) else split_name


def get_eval_hparams_for_seqio(
    task_or_mixture_name: Any,
    batch_size: int,
    feature_lengths: Mapping[str, int],
    seed: int,
    metric_type: MetricType,
    split_name: str | Callable[[str], str] = "validation",
    feature_converter: Any = None,
    num_infeed_hosts: int = 0,
    use_cached: bool = False,
    shuffle: bool | None = None,
    require_metric_fns: bool = True,
    eval_metrics_retain_task_features: bool = False,
    check_split_exists: bool = False,
    eval_loop_num_batches: int | None = None,
    repeat: bool | None = None,
    reset_for_eval: bool = True,
    pass_entire_feature_lengths: bool = False,
) -> list[pax_fiddle.Config[SeqIOInput]]:
    """Returns one input config per task of a mixture, for evaluation or decoding.

    Args:
      task_or_mixture_name: a task, a mixture, or the name of one.
      batch_size: rows per process.
      feature_lengths: {'inputs': tokens, 'targets': tokens}.
      seed: seed of the tasks' preprocessing.
      metric_type: SCORE for an experiment's `datasets()`; PREDICT for its `decode_datasets()`, whose rows hold only inputs.
      split_name: the split, or a function from a task's name to its split.
      feature_converter: a feature converter or its config; None for `LanguageModelFeatures` without packing.
      num_infeed_hosts: number of processes; 0 to let the trainer set it.
      use_cached, shuffle, eval_loop_num_batches, repeat, reset_for_eval: see `SeqIOInput`.
      require_metric_fns: leave out tasks that declare no metrics of the kind `metric_type`.
      eval_metrics_retain_task_features: with SCORE, keep the lengths of all features, not only of 'inputs' and 'targets'.
      check_split_exists: leave out tasks that don't have the split `split_name`.
      pass_entire_feature_lengths: also keep the lengths of features other than 'inputs' and 'targets', with any `metric_type`.
    """
    seqio = import_seqio("get_eval_hparams_for_seqio")
    given = task_or_mixture_name
    whole = seqio.get_mixture_or_task(given) if isinstance(given, str) else given
    predicts = metric_type is MetricType.PREDICT
    lengths = {name: feature_lengths[name] for name in ("inputs", "targets")}
    if pass_entire_feature_lengths or (eval_metrics_retain_task_features and not predicts):
        lengths |= feature_lengths
    if predicts:
        lengths["targets"] = 1  # only the token that ends the row
    configs = []
    for task in seqio.get_subtasks(whole):
        split = select_split(task.name, split_name)
        declared = task.predict_metric_fns if predicts else task.score_metric_fns
        if (check_split_exists and split not in task.splits) or (require_metric_fns and not declared):
            logging.warning("task %s is left out: it lacks split %r or %s metrics", task.name, split, metric_type)
            continue
        converter = copy.deepcopy(feature_converter) or pax_fiddle.Config(
            feature_converter_class("LanguageModelFeatures"),
            pack=False,
            weights_on_targets_only=metric_type is MetricType.SCORE,
        )
        configs.append(
            pax_fiddle.Config(
                SeqIOInput,
                name=task.name,
                mixture_or_task=task,
                split_name=split,
                task_feature_lengths=dict(lengths),
                feature_converter=converter,
                is_training=False,
                reset_for_eval=reset_for_eval,
                shuffle=shuffle,
                batch_size=batch_size,
                num_infeed_hosts=num_infeed_hosts,
                input_random_seed=seed,
                eval_loop_num_batches=eval_loop_num_batches,
                repeat=repeat,
                use_cached=use_cached,
            )
        )
    return configs
