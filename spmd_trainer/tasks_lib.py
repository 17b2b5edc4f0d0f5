"""The task: a model together with how to train, evaluate and decode it. Field names and defaults are Pax's."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import fiddle as fdl
import jax.numpy as jnp
from praxis import base_hyperparams, base_layer, base_model, pax_fiddle

from spmd_trainer.optim import optax_bridge
from spmd_trainer.optim.learner import Learner

# Collections a forward pass may write. Pax's lists.
TRAIN_MUTABLE = [
    base_layer.AUX_LOSS,
    base_layer.SUMMARIES,
    base_layer.NON_TRAINABLE,
    *base_layer.NON_PAX_VAR_COLLECTION,
]
EVAL_MUTABLE = [base_layer.AUX_LOSS, base_layer.SUMMARIES, base_layer.NON_TRAINABLE]
DECODE_MUTABLE = [base_layer.DECODE_CACHE, base_layer.SUMMARIES]


# Functions with names: to read a lambda's source, fiddle parses the whole module, a tenth of a second for each.
def _train_mutable() -> list[str]:
    return TRAIN_MUTABLE[:]


def _eval_mutable() -> list[str]:
    return EVAL_MUTABLE[:]


def _decode_mutable() -> list[str]:
    return DECODE_MUTABLE[:]


# (metrics by name, running mode, step, is it the last checkpoint) -> stop now?
EarlyStoppingFn = Callable[[Mapping[str, float], str, int, bool], bool]


class SingleTask(base_hyperparams.FiddleBaseParameterizable):
    """One model, one learner.

    Attributes:
      model: the praxis model. Its `ici_mesh_shape`, `dcn_mesh_shape` and `mesh_axis_names` say what it runs on; without
        them it runs data-parallel on one axis over all devices.
      train: see `Train`.
      evaluate: see `Evaluate`.
      decode: see `Decode`.
      infer: see `Infer`.
      metrics: config of an object called with the step's {name: (value, weight)}, returning the same form; None keeps
        them as the model gave them.
      early_stopping_fn: called after each evaluation during training; training ends, with a checkpoint, when it
        returns True. `metrics.early_stopping.EarlyStopping` watches one metric.
      summary_verbosity: layers' `add_summary` calls above this verbosity are dropped.
    """

    @dataclasses.dataclass(frozen=True)
    class Train:
        """How to train. Intervals are in steps.

        Attributes:
          learner: the learner's config.
          num_train_steps: train until the state has taken this many steps.
          save_interval_steps: a checkpoint every so many steps (and at the end).
          save_keep_interval_duration: besides the newest ones, keep one checkpoint per this duration: '12h', '90m', '1d12h',
            45 (seconds); '' or None keeps the newest ones only.
          save_max_to_keep: how many of the newest checkpoints stay.
          max_inflight_steps: how many steps may be dispatched ahead of the device; at least 1.
          summary_interval_steps: TensorBoard summaries every so many steps; at least 1.
          log_train_output_interval_steps: progress line every so many steps (and after 30 s without one); None:
            `summary_interval_steps`.
          summary_accumulate_interval_steps: None writes the values of the step itself. With N, every N-th step is taken
            into an average over the steps since the last summary, and the average is written; 1 takes every step.
          variable_norm_summary: whether the norm of every variable is among the summaries.
          eval_interval_steps: evaluate every so many steps and when training is complete, 0 for never.
          eval_skip_train: leave out the evaluation of one training batch.
          eval_use_ema_states: evaluate the moving averages; the learner must keep them.
          decode_interval_steps: decode every so many steps and when training is complete, None or 0 for never.
          decode_start_after_n_steps: no decoding before this step.
          decode_use_ema_states: decode with the moving averages.
          inputs_split_mapping: `map_1d`, `map_2d`, ...: how an input of that rank is split over the mesh; `by_name`
            overrides single inputs by path. None leaves inputs split on the batch dimension over the whole mesh.
          sharding_strategy: [(regex, tactic), ...] deciding the variables whose layer declares no split mapping.
          init_from_checkpoint_rules: {checkpoint directory: CheckpointLoadingRules}.
          profiler_capture_step: take a profile at this step; None for never.
          profiler_num_steps: how many steps the profile spans.
          profiler_min_duration_sec: seconds the profile spans at least.
          random_seed: seed of initialisation and of all randomness in training.
          enable_input_checkpointing: whether the input's position is part of the checkpoint.
          enforce_input_specs: refuse an input whose first batch differs from the declared names, shapes and dtypes.
          always_use_train_for_model_init: initialise variables as in training also for evaluation and decode.
          apply_mutable_list: collections the training forward pass may write.
        """

        learner: pax_fiddle.Config[Learner] = pax_fiddle.template_field(Learner)
        num_train_steps: float = 1e7
        save_interval_steps: int = 5000
        save_keep_interval_duration: str | float | None = "12h"
        save_max_to_keep: int = 10
        max_inflight_steps: int = 2
        summary_interval_steps: int = 100
        log_train_output_interval_steps: int | None = None
        summary_accumulate_interval_steps: int | None = None
        variable_norm_summary: bool = True
        eval_interval_steps: int = 100
        eval_skip_train: bool = False
        eval_use_ema_states: bool = False
        decode_interval_steps: int | None = None
        decode_start_after_n_steps: int = 0
        decode_use_ema_states: bool = False
        inputs_split_mapping: Any = None
        sharding_strategy: Any = None
        init_from_checkpoint_rules: dict[str, Any] = pax_fiddle.instance_field(default_factory=dict)
        profiler_capture_step: int | None = None
        profiler_num_steps: int = 2
        profiler_min_duration_sec: float = 1.0
        random_seed: int = 1234
        # Pax's default is False, and its resumed runs then saw other batches than uninterrupted ones.
        enable_input_checkpointing: bool | None = True
        enforce_input_specs: bool = True
        always_use_train_for_model_init: bool = True
        apply_mutable_list: list[str] = pax_fiddle.instance_field(default_factory=_train_mutable)

    @dataclasses.dataclass(frozen=True)
    class Evaluate:
        """How to evaluate.

        Attributes:
          random_seed: seed of randomness in evaluation.
          apply_mutable_list: collections the forward pass may write.
          per_example_outputs: write what the model gives for each example to `eval_out/DATASET/step_N.jsonl`.
        """

        random_seed: int = 1234
        apply_mutable_list: list[str] = pax_fiddle.instance_field(default_factory=_eval_mutable)
        per_example_outputs: bool = False

    @dataclasses.dataclass(frozen=True)
    class Decode:
        """How to decode.

        Attributes:
          random_seed: seed of sampling.
          prng_key_fold_with_batch_index: whether each batch of a dataset draws its own random numbers.
          apply_mutable_list: collections `model.decode` may write.
          metrics_prefix: stands before the name of every decode metric in TensorBoard.
        """

        random_seed: int = 1234
        prng_key_fold_with_batch_index: bool = False
        apply_mutable_list: Sequence[str] = pax_fiddle.instance_field(default_factory=_decode_mutable)
        metrics_prefix: str = "Metrics/"

    @dataclasses.dataclass(frozen=True)
    class Infer:
        """How `--mode=infer` differs from `decode_once`.

        Attributes:
          random_seed: seed of sampling, in place of that of `Decode`.
        """

        random_seed: int = 1234

    model: base_model.BaseModel = None
    train: pax_fiddle.Config[SingleTask.Train] = pax_fiddle.template_field(Train)
    evaluate: pax_fiddle.Config[SingleTask.Evaluate] = pax_fiddle.template_field(Evaluate)
    decode: pax_fiddle.Config[SingleTask.Decode] = pax_fiddle.template_field(Decode)
    infer: pax_fiddle.Config[SingleTask.Infer] = pax_fiddle.template_field(Infer)
    metrics: Any = None
    early_stopping_fn: EarlyStoppingFn | None = None
    summary_verbosity: int = 3
    _learner: Any = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.model, fdl.Buildable):
            self.model = pax_fiddle.build(self.model)
        if not isinstance(self.model, base_layer.BaseLayer):
            raise ValueError(f"task.model must be a praxis model or its config, not {type(self.model).__name__}")
        if isinstance(self.train.learner, list | tuple):
            raise ValueError(
                "task.train.learner is a list; give one learner (MultiOptimizerLearner for several optimizers)"
            )
        optax_bridge.require_schedule(self.train.learner.optimizer)
        self._learner = pax_fiddle.build(self.train.learner.clone().set(name="learner"))
        if self._learner.loss_name is None:
            raise ValueError("task.train.learner.loss_name is not set; e.g. 'total_loss' for praxis' language models")
        if isinstance(self.metrics, fdl.Buildable):
            self.metrics = pax_fiddle.build(self.metrics)

    @property
    def learner(self) -> Learner:
        """The learner, built."""
        return self._learner

    @property
    def learners(self) -> Sequence[Learner]:
        """The learner in a list, as Pax had it."""
        return [self._learner]

    @property
    def fprop_dtype(self) -> Any:
        """The dtype the model computes in; variables stay in theirs."""
        return self.model.fprop_dtype or jnp.float32


def build_task(task_p: Any) -> SingleTask:
    """Builds a task from its config, or returns a built one."""
    if isinstance(task_p, SingleTask):
        return task_p
    return pax_fiddle.build(task_p)
