"""The task: a model and the settings to train, evaluate and decode it. Field names and defaults are Pax's.

`CheckpointLoadingRules` and `LOAD_ALL`, which Pax defines here, are re-exported from `checkpointing`.
"""

from __future__ import annotations

import abc
import copy
import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import fiddle as fdl
import jax.numpy as jnp
import lazy_loader
from praxis import base_hyperparams, base_layer, base_model, pax_fiddle

from spmd_trainer.errors import UserError
from spmd_trainer.models.base import Model, as_model
from spmd_trainer.pax import task_fields
from spmd_trainer.pax.task_fields import RunningMode as RunningMode
from spmd_trainer.step import activation_memory, optax_bridge
from spmd_trainer.step import learner as learner_lib
from spmd_trainer.step.learner import Learner
from spmd_trainer.train_states import TrainState

if TYPE_CHECKING:
    from spmd_trainer.decoder.lora import LoraModel

# Imported when first used, so that importing this module does not import `checkpointing`.
__getattr__, _, _ = lazy_loader.attach(
    "spmd_trainer", submod_attrs={"checkpointing": ["CheckpointLoadingRules", "LOAD_ALL"]}
)

# Collections that a forward pass may write, as in Pax.
TRAIN_MUTABLE = [
    base_layer.AUX_LOSS,
    base_layer.SUMMARIES,
    base_layer.NON_TRAINABLE,
    *base_layer.NON_PAX_VAR_COLLECTION,
]
EVAL_MUTABLE = [base_layer.AUX_LOSS, base_layer.SUMMARIES, base_layer.NON_TRAINABLE]
DECODE_MUTABLE = [base_layer.DECODE_CACHE, base_layer.SUMMARIES]


# Named functions, because fiddle parses the whole module to read a lambda's source: 0.1 s for each lambda.
def _train_mutable() -> list[str]:
    return TRAIN_MUTABLE[:]


def _eval_mutable() -> list[str]:
    return EVAL_MUTABLE[:]


def _decode_mutable() -> list[str]:
    return DECODE_MUTABLE[:]


# (metrics by name, running mode, step, whether it is the last step) -> whether to stop now
EarlyStoppingFn = Callable[[Mapping[str, float], str, int, bool], bool]


class BaseTask(base_hyperparams.FiddleBaseParameterizable, metaclass=abc.ABCMeta):
    """Pax's base class of tasks. `SingleTask` is the only task that this trainer runs.

    Attributes:
      loss_aggregator: a field of Pax; must be None.
      infer_writer: a field of Pax that is ignored with a warning.
    """

    loss_aggregator: Any = None
    infer_writer: Any = None


class SingleTask(BaseTask):
    """A model with one learner.

    Attributes:
      model: the praxis model. Its `ici_mesh_shape`, `dcn_mesh_shape` and `mesh_axis_names` declare the mesh; without them
        the task runs data-parallel on one axis over all devices.
      train: config of the training settings, see `Train`.
      evaluate: config of the evaluation settings, see `Evaluate`.
      decode: config of the decode settings, see `Decode`.
      infer: config of the settings of `--mode=infer`, see `Infer`.
      metrics: config of a callable that maps the step's metrics {name: (value, weight)} to a dict of the same form; None: the
        model's metrics unchanged.
      vn: Pax's field for variational noise, which isn't supported; its `vn_scale` must be 0.
      early_stopping_fn: called after each evaluation during training. If it returns True, training saves a checkpoint and
        ends. `training.early_stopping.EarlyStopping` watches one metric. A function with Pax's five arguments works too, see
        `task_fields.PaxEarlyStopping`.
      lora: config of a `decoder.lora.Lora`, to train adapters on a frozen model; None: the model itself is trained.
      mup: config of a `step.mup.Mup`, which lets this model use hyperparameters tuned on a narrow base model; None: no muP.
      summary_verbosity: layers' `add_summary` calls with a higher verbosity are dropped.
    """

    InferWriter = task_fields.InferWriter
    VariationalNoise = task_fields.VariationalNoise

    @dataclasses.dataclass(frozen=True)
    class Train(task_fields.TrainFields):
        """How to train. Intervals are in steps.

        Attributes:
          learner: the learner's config.
          num_train_steps: the step at which training ends.
          save_interval_steps: steps between checkpoints. The last step is always saved.
          save_keep_interval_duration: besides the newest checkpoints, keep one per this duration: '12h', '90m', '1d12h',
            45 (seconds); '' or None: keep only the newest.
          save_max_to_keep: number of newest checkpoints to keep.
          max_inflight_steps: maximum number of dispatched steps that the devices have not finished yet; at least 1.
          summary_interval_steps: steps between TensorBoard summaries; at least 1.
          log_train_output_interval_steps: steps between progress lines; None: `summary_interval_steps`. A line is also logged
            after 30 s without one.
          summary_accumulate_interval_steps: if None, a summary has the values of its own step; if N, the averages over every
            N-th step since the last summary. 1 averages all steps.
          variable_norm_summary: also write the norm of every variable to the summaries.
          update_ratio_summary: also write each variable's gradient norm, norm and relative change to the summaries, layer by
            layer; see `step/step_fns.py`.
          saved_activations: names of activations that the model's rematerialized parts keep on the device for the backward
            pass, see `step/activation_memory.py`. If this or `offloaded_activations` has a name, all other activations are
            recomputed; otherwise the model's own policies decide.
          offloaded_activations: names of activations that the rematerialized parts move to host memory until the backward pass.
          gradient_accumulation_dtype: dtype in which the gradients of several minibatches are added up: 'float32', or
            'bfloat16', which needs half the memory but loses gradients that are small relative to the sum.
            `ShardMapPartitioner` adds these sums up over devices in float32.
          eval_interval_steps: steps between evaluations, which also take place when training is complete; 0: never.
          eval_skip_train: do not evaluate a training batch.
          eval_use_ema_states: evaluate the moving averages, which the learner must keep.
          decode_interval_steps: steps between decodes, which also take place when training is complete; None or 0: never.
          decode_start_after_n_steps: first step at which to decode.
          decode_use_ema_states: decode with the moving averages.
          inputs_split_mapping: {'map_1d': ..., 'map_2d': ...}: how inputs of each rank are sharded over the mesh. 'by_name'
            overrides this for single inputs, by path or fnmatch glob (not a regex). None: the batch dimension of all inputs
            is sharded over the whole mesh. See `sharding/split_mapping.py`.
          sharding_strategy: [(regex, tactic), ...] for the variables whose layer declares no split mapping. The first regex
            found in a variable's path (`re.search`, e.g. in 'params/lm/softmax/w') decides. See
            `sharding/path_rules.py`.
          init_from_checkpoint_rules: {checkpoint directory: CheckpointLoadingRules}.
          profiler_capture_step: first step to profile; None: never.
          profiler_num_steps: number of steps to profile.
          profiler_min_duration_sec: minimum duration of the profile in seconds.
          batch_ramp: {step: rows of the global batch from this step on}. {0: 64, 1000: 128} trains with 64 rows, and with 128
            after 1,000 steps. The ramp replaces the training dataset's `batch_size`. See `training/ramps.py`.
          sequence_ramp: {step: tokens per row from this step on}. The training dataset's rows are cut into rows of this
            length. The number of tokens per batch stays the same.
          random_seed: seed of initialization and of all randomness in training.
          enable_input_checkpointing: save the input's position with each checkpoint.
          enforce_input_specs: raise an error if the first batch differs from the declared names, shapes and dtypes.
          always_use_train_for_model_init: True: evaluation and decode jobs initialize the model in training mode too.
          callbacks: configs of `spmd_trainer.callbacks.Callback`, called during training.
          apply_mutable_list: collections that the training forward pass may write.
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
        update_ratio_summary: bool = False
        saved_activations: Sequence[str] = ()
        offloaded_activations: Sequence[str] = ()
        gradient_accumulation_dtype: str = "float32"
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
        batch_ramp: Mapping[int, int] | None = None
        sequence_ramp: Mapping[int, int] | None = None
        random_seed: int = 1234
        # Pax's default is False; a resumed run then sees other batches than an uninterrupted run.
        enable_input_checkpointing: bool | None = True
        enforce_input_specs: bool = True
        always_use_train_for_model_init: bool = True
        callbacks: list[Any] = pax_fiddle.instance_field(default_factory=list)
        apply_mutable_list: list[str] = pax_fiddle.instance_field(default_factory=_train_mutable)

    @dataclasses.dataclass(frozen=True)
    class Evaluate:
        """How to evaluate.

        Attributes:
          random_seed: seed of randomness in evaluation.
          apply_mutable_list: collections that the forward pass may write.
          per_example_outputs: write the model's output for each example to `eval_out/DATASET/step_N.jsonl`.
        """

        random_seed: int = 1234
        apply_mutable_list: list[str] = pax_fiddle.instance_field(default_factory=_eval_mutable)
        per_example_outputs: bool = False

    @dataclasses.dataclass(frozen=True)
    class Decode(task_fields.DecodeFields):
        """How to decode.

        Attributes:
          random_seed: seed of sampling.
          prng_key_fold_with_batch_index: draw different random numbers for each batch of a dataset.
          apply_mutable_list: collections that `model.decode` may write.
          metrics_prefix: prefix of the name of every decode metric in TensorBoard.
        """

        random_seed: int = 1234
        prng_key_fold_with_batch_index: bool = False
        apply_mutable_list: Sequence[str] = pax_fiddle.instance_field(default_factory=_decode_mutable)
        metrics_prefix: str = "Metrics/"

    @dataclasses.dataclass(frozen=True)
    class Infer:
        """Settings of `--mode=infer`, which otherwise does the same as `--mode=decode_once`.

        Attributes:
          random_seed: seed of sampling, instead of `Decode.random_seed`.
        """

        random_seed: int = 1234

    @enum.unique
    class TrackDecoderMetricMode(enum.StrEnum):
        """Whether a higher or a lower value of a metric is better."""

        MAX = "max"
        MIN = "min"

    # Older Pax files write `SingleTask.TrainHParams(...)`.
    TrainHParams = base_hyperparams.FiddleHParamsClassStub(Train)
    EvaluateHParams = base_hyperparams.FiddleHParamsClassStub(Evaluate)
    DecodeHParams = base_hyperparams.FiddleHParamsClassStub(Decode)
    InferHParams = base_hyperparams.FiddleHParamsClassStub(Infer)
    InferWriterHParams = base_hyperparams.FiddleHParamsClassStub(InferWriter)
    VariationalNoiseHParams = base_hyperparams.FiddleHParamsClassStub(VariationalNoise)

    model: base_model.BaseModel = None
    train: pax_fiddle.Config[SingleTask.Train] = pax_fiddle.template_field(Train)
    evaluate: pax_fiddle.Config[SingleTask.Evaluate] = pax_fiddle.template_field(Evaluate)
    decode: pax_fiddle.Config[SingleTask.Decode] = pax_fiddle.template_field(Decode)
    infer: pax_fiddle.Config[SingleTask.Infer] = pax_fiddle.template_field(Infer)
    metrics: Any = None
    vn: pax_fiddle.Config[task_fields.VariationalNoise] = pax_fiddle.template_field(VariationalNoise)
    early_stopping_fn: EarlyStoppingFn | None = None
    lora: Any = None
    mup: Any = None
    summary_verbosity: int = 3
    _learner: Any = dataclasses.field(init=False, repr=False)
    # A pair of (base model, the same model with adapters), or None.
    _lora_model: Any = dataclasses.field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.model, fdl.Buildable):
            self.model = pax_fiddle.build(self.model)
        # Any object with the method `init_variables` counts as a `models.Model`.
        if not (isinstance(self.model, base_layer.BaseLayer) or hasattr(self.model, "init_variables")):
            raise ValueError(
                f"task.model must be a praxis model, one of spmd_trainer.models, or the config of one, not "
                f"{type(self.model).__name__}"
            )
        task_fields.check({"": self, "train": self.train, "decode": self.decode, "vn": self.vn})
        if self.early_stopping_fn is not None and task_fields.has_pax_signature(self.early_stopping_fn):
            self.early_stopping_fn = task_fields.PaxEarlyStopping(self.early_stopping_fn)
        if isinstance(self.train.learner, list | tuple):
            raise ValueError(
                "task.train.learner is a list; give one learner (MultiOptimizerLearner has several optimizers)"
            )
        activation_memory.check_lists(self.train.saved_activations, self.train.offloaded_activations)
        accumulated = self.train.gradient_accumulation_dtype
        if accumulated not in ("float32", "bfloat16"):
            raise ValueError(
                f"task.train.gradient_accumulation_dtype is {accumulated!r}; it must be 'float32' or 'bfloat16'"
            )
        optax_bridge.require_schedule(self.train.learner.optimizer)
        learner_p = self.train.learner.clone().set(name="learner")
        if learner_p.loss_name is None:
            learner_p.loss_name = getattr(self.model, "default_loss_name", None)
        self._learner = pax_fiddle.build(learner_p)
        if self._learner.loss_name is None:
            raise ValueError(
                f"task.train.learner.loss_name is not set; give the name of a metric that {type(self.model).__name__} returns, "
                "e.g. 'total_loss' for praxis' language models"
            )
        if isinstance(self.metrics, fdl.Buildable):
            self.metrics = pax_fiddle.build(self.metrics)
        if isinstance(self.lora, fdl.Buildable):
            self.lora = pax_fiddle.build(self.lora)
        if self.lora is not None:
            # Imported here, so that models without adapters train without that room.
            from spmd_trainer.decoder.lora import Lora

            if not isinstance(self.lora, Lora):
                raise ValueError(
                    f"task.lora must be the config of a spmd_trainer.decoder.lora.Lora, not {type(self.lora).__name__}"
                )

    @property
    def learner(self) -> Learner:
        """The built learner."""
        return self._learner

    def with_learner(self, learner: Learner) -> SingleTask:
        """Returns a copy of the task that uses `learner`, a `Learner` instance and not a config."""
        task = copy.copy(self)
        task._learner = learner
        return task

    def with_model(self, model: Any) -> SingleTask:
        """Returns a copy of the task with a new model, e.g. with new generation settings. The variables must be the same."""
        task = copy.copy(self)
        task.model = model
        if self.lora is not None:
            # Keeps the adapters' target weights: a new search in a decoding model would also find the output matrix.
            task._lora_model = (model, dataclasses.replace(self.lora_model, base=as_model(model)))
        return task

    @property
    def learners(self) -> Sequence[Learner]:
        """A list with the learner, as in Pax."""
        return [self._learner]

    @property
    def model_for_steps(self) -> Model:
        """The model that train, eval and decode steps run: `model`, with the adapters of `lora` if that is set."""
        return as_model(self.model) if self.lora is None else self.lora_model

    @property
    def lora_model(self) -> LoraModel:
        """`model` with the adapters of `lora`.

        Raises:
          UserError: `lora` is not set.
        """
        from spmd_trainer.decoder.lora import LoraModel

        if self.lora is None:
            raise UserError("task.lora is not set, so the task has no adapters")
        # Kept, because a `LoraModel` knows the dimensions of its target weights once it has been traced.
        if self._lora_model is None or self._lora_model[0] is not self.model:
            self._lora_model = (self.model, LoraModel(as_model(self.model), self.lora, self.fprop_dtype))
        wrapped: LoraModel = self._lora_model[1]
        return wrapped

    @property
    def has_ema_decay(self) -> bool:
        """True if the learner keeps moving averages of the variables."""
        return learner_lib.has_ema(self._learner)

    @property
    def fprop_dtype(self) -> Any:
        """The dtype of the model's computations; variables keep their own dtypes."""
        return self.model.fprop_dtype or jnp.float32


def build_task(task_p: Any) -> SingleTask:
    """Builds the task that a config describes and returns it; a task that is already built is returned unchanged."""
    if isinstance(task_p, SingleTask):
        return task_p
    return pax_fiddle.build(task_p)


def has_ema(task: SingleTask) -> bool:
    """Returns True if a task's learner keeps moving averages of the variables."""
    return task.has_ema_decay


def extract_ema(model_states: TrainState) -> TrainState:
    """Returns a state whose variables are the moving averages of `model_states`, without optimizer states.

    Raises:
      ValueError: the optimizer states contain no averages.
    """
    averages = optax_bridge.extract_ema(model_states.opt_states, model_states.mdl_vars)
    return TrainState(step=model_states.step, mdl_vars=averages, opt_states=[], extra_state=())
