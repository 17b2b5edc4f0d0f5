"""SeqIO tasks and mixtures as inputs, with the names, fields and defaults of paxml 1.4.0. Needs `spmd-trainer[seqio]`."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from praxis import pax_fiddle
from praxis.py_utils import NestedMap

from spmd_trainer.errors import UserError, installation
from spmd_trainer.inputs import batches, examples, indexed
from spmd_trainer.inputs.tensorflow_bridge import import_tensorflow

# Classes of `seqio_features.py`, which can only be imported if seqio is installed.
FEATURE_CONVERTERS = (
    "LanguageModelFeatures",
    "PackedLanguageModelFeatures",
    "PackedSequenceModelFeatures",
    "RemoveProvenance",
    "SequenceModelFeatures",
    "SequenceModelFeaturesWithTaskInfo",
    "UnflattenAndRemoveProvenance",
)
_EVAL_SEED = 42  # as in Pax


class MetricType(enum.Enum):
    """The kinds of metrics that a SeqIO task declares."""

    PREDICT = 1  # from decoded text
    SCORE = 2  # from the scores of the targets


def feature_converter_class(name: str) -> Any:
    """Returns the feature converter class with this name. Serves as the `__getattr__` of the module `seqio_input`.

    Raises:
      UserError: seqio is not installed.
      AttributeError: no feature converter has this name.
    """
    if name not in FEATURE_CONVERTERS:
        raise AttributeError(f"module 'spmd_trainer.seqio_input' has no attribute {name!r}")
    import_seqio(f"seqio_input.{name}")
    from spmd_trainer.pax import seqio_features

    return getattr(seqio_features, name)


class SeqIOInput(indexed.CheckpointedInput):
    """Input that reads a SeqIO task or mixture.

    A batch is a NestedMap with the numpy arrays [batch_size, ...] that the feature converter makes, and `eval_sample_weights`:
    float32 [batch_size]. Non-numeric features are left out.

    In training, each process reads its own shard of the files, shuffled with `input_random_seed`. Batch n depends only on n,
    the settings and the number of processes. The saved position is n: a resumed run reads the earlier batches again without
    training on them. If the number of processes or a setting that determines the batches (such as the batch size or the seed)
    has changed, the saved position is rejected.

    Evaluation yields every example once, in the same order for any number of processes: each process reads all examples and
    keeps its own rows. The last batch is filled up with rows of weight 0. With `reset_for_eval=False`, each evaluation uses the
    first `eval_loop_num_batches` batches (in Pax, it continues where the previous evaluation ended).

    A SeqIO task's own metrics are not computed. Evaluation writes the model's metrics, and decoding writes the model's outputs.

    Attributes:
      mixture_name: name of a registered task or mixture.
      mixture_or_task: a task or mixture, instead of its name.
      split_name: name of the split, e.g. 'train' or 'validation'.
      deterministic_input: must be False, because training inputs are always deterministic.
      task_feature_lengths: {feature: maximum number of tokens}.
      feature_converter: turns examples into rows, e.g. `seqio_input.LanguageModelFeatures(pack=True)`.
      shuffle: shuffle training data; None means True. Evaluation data are never shuffled.
      repeat: repeat the data without end. None repeats only training data.
      use_cached: read the task's offline cache.
      eval_auto_pad: ignored, because the last batch is always filled up.
      drop_remainder: in training, leave out last rows that don't fill a batch. Evaluation keeps them.
      num_batches_to_skip: number of batches that are skipped before training begins.
      trim_output_features: trim longer examples to `task_feature_lengths`.
      try_in_mem_cache: let SeqIO keep small datasets in memory.
      deterministic_input_start_index: ignored.
      eval_metrics_targets_length, eval_metrics_filter_targets_fields: ignored, because a task's metrics are not computed.
      annotate_padding_fields: ignored, because rows that fill up a batch always have weights 0 and paddings 1.
      overridden_vocab: vocabulary for `ids_to_strings` instead of the task's.
      enable_symbolic_checkpointing, experimental_enable_index_shuffle: ignored, because the saved position is a batch number.
      log_preprocessed_targets: ignored.
      eval_enable_cache: keep evaluation data in memory between evaluations.
      eval_num_examples: number of evaluation examples, if known; used for progress lines.
      warm_start: ignored.
      read_config: a tfds.ReadConfig, which then applies to all SeqIO tasks in the process.
    """

    @dataclasses.dataclass(frozen=True)
    class DeterministicInput:
        """Pax's settings for deterministic inputs, which are ignored."""

        start_step: int = 0
        example_index_offset: int = 0
        _latest_model_step: int = 0

    mixture_name: str | None = None
    mixture_or_task: Any = None
    split_name: str | None = None
    deterministic_input: bool = False
    task_feature_lengths: Mapping[str, int] | None = None
    feature_converter: Any = None
    shuffle: bool | None = None
    repeat: bool | None = None
    use_cached: bool = False
    eval_auto_pad: bool = True
    drop_remainder: bool = True
    num_batches_to_skip: int | None = None
    trim_output_features: bool = True
    try_in_mem_cache: bool = True
    deterministic_input_start_index: pax_fiddle.Config[SeqIOInput.DeterministicInput] = pax_fiddle.template_field(
        DeterministicInput
    )
    eval_metrics_targets_length: int | None = None
    eval_metrics_filter_targets_fields: list[str] | None = None
    annotate_padding_fields: bool = False
    overridden_vocab: Any = None
    enable_symbolic_checkpointing: bool | None = True
    experimental_enable_index_shuffle: bool | None = True
    log_preprocessed_targets: bool | None = False
    eval_enable_cache: bool = True
    eval_num_examples: int | None = None
    warm_start: bool = True
    read_config: Any = None
    _iterator: Any = dataclasses.field(default=None, init=False, repr=False)
    _taken: int = dataclasses.field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.name:
            named = self.mixture_name or getattr(self.mixture_or_task, "name", "seqio")
            self.name: str = f"{named}_{self.split_name}"
        super().__post_init__()
        import_seqio(f"SeqIOInput {self.name!r}")
        if bool(self.mixture_name) == bool(self.mixture_or_task):
            raise self.error("give either mixture_name or mixture_or_task")
        for field in ("split_name", "task_feature_lengths", "feature_converter"):
            if not getattr(self, field):
                raise self.error(f"{field} is not set")
        if self.deterministic_input:
            raise self.error(
                "deterministic_input=True needs tasks that are not published; leave it False: with input_random_seed, batch n "
                "depends only on n"
            )
        if not self.is_training:
            if self.repeat and (self.reset_for_eval or (self.eval_loop_num_batches or 0) < 1):
                raise self.error(
                    "it repeats without end; set reset_for_eval=False and eval_loop_num_batches to 1 or more, or repeat=False"
                )
            self._limit = None if self.reset_for_eval else self.eval_loop_num_batches
            self.reset_for_eval: bool = True

    @functools.cached_property
    def mixture_or_task_inst(self) -> Any:
        """The SeqIO task or mixture. Raises UserError if no task or mixture is registered under `mixture_name`."""
        seqio = import_seqio(f"SeqIOInput {self.name!r}")
        if self.mixture_or_task is not None:
            return self.mixture_or_task
        try:
            return seqio.get_mixture_or_task(self.mixture_name)
        except ValueError as error:
            raise self.error(f"{error}. Import the module that registers it") from error

    def input_specs(self) -> NestedMap:
        """Returns the shapes and dtypes of the batches that `get_next` returns, as jax.ShapeDtypeStructs.

        Sets up the task's data pipeline to find them, unless the feature converter's `row_specs` returns them.
        """
        row_specs = getattr(self.feature_converter, "row_specs", None)
        specs = None if row_specs is None else row_specs(self.task_feature_lengths)
        if specs is None:
            specs = _numbers(self._rows.element_spec)
            specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(tuple(x.shape), x.dtype.as_numpy_dtype), specs)
        specs = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((self.batch_size, *x.shape), jax.dtypes.canonicalize_dtype(x.dtype)), specs
        )
        specs.eval_sample_weights = jax.ShapeDtypeStruct((self.batch_size,), np.float32)
        return specs

    @property
    def num_batches(self) -> int | None:
        """Number of batches until `get_next` raises StopIteration; None in training, or if the number is unknown."""
        if self.is_training:
            return None
        whole = None
        if self.eval_num_examples:
            whole = -(-self.eval_num_examples // (self.batch_size * self.num_infeed_hosts))
        counts = [count for count in (whole, self._limit) if count is not None and count > 0]
        return min(counts) if whole is not None or self._repeats else None

    def get_next(self) -> NestedMap:
        """Returns the next batch.

        Raises:
          StopIteration: the data have ended; `reset()` starts over.
        """
        if self._iterator is None:
            self._iterator = self._batches(self._taken)
        batch = next(self._iterator)
        self._taken += 1
        return batch

    def reset(self) -> None:
        """Goes back to the first batch."""
        super().reset()
        self._iterator, self._taken = None, 0

    def ids_to_strings(self, ids: Any, lengths: Any, key: str | None = None) -> Sequence[str]:
        """Decodes rows of token ids.

        Args:
          ids: int [rows, tokens].
          lengths: int [rows], the number of tokens to decode in each row; None for all.
          key: 'src' for the vocabulary of the feature 'inputs'; 'tgt' or None for that of 'targets'.

        Raises:
          UserError: `key` is none of these values.
        """
        if key not in ("src", "tgt", None):
            raise self.error(f"ids_to_strings has key={key!r}; it is 'src', 'tgt' or None")
        vocabulary = self.overridden_vocab
        if vocabulary is None:
            vocabulary = self.mixture_or_task_inst.output_features["inputs" if key == "src" else "targets"].vocabulary
        lengths = [ids.shape[1]] * ids.shape[0] if lengths is None else lengths
        return [vocabulary.decode(row[: int(length)].tolist()) for row, length in zip(ids, lengths, strict=True)]

    @property
    def _repeats(self) -> bool:
        return self.is_training if self.repeat is None else self.repeat

    @property
    def _seed(self) -> int:
        default = 0 if self.is_training else _EVAL_SEED
        return default if self.input_random_seed is None else self.input_random_seed

    @functools.cached_property
    def _rows(self) -> Any:
        """The rows that this process reads (in evaluation, those of all processes), as a tf.data.Dataset."""
        seqio, tf = import_seqio(f"SeqIOInput {self.name!r}"), import_tensorflow()
        if self.read_config is not None:
            seqio.set_tfds_read_config_override(self.read_config)
        shard = seqio.ShardInfo(self.infeed_host_index, self.num_infeed_hosts) if self.is_training else None
        settings: dict[str, Any] = {}
        passthrough = getattr(self.feature_converter, "_passthrough_features", None)
        if passthrough and isinstance(self.mixture_or_task_inst, seqio.Mixture):
            settings["passthrough_features"] = passthrough
        rows = self.mixture_or_task_inst.get_dataset(
            sequence_length=self.task_feature_lengths,
            split=self.split_name,
            shuffle=self.is_training and self.shuffle is not False,
            num_epochs=None if self._repeats else 1,
            shard_info=shard,
            use_cached=self.use_cached,
            seed=self._seed,
            trim_output_features=self.trim_output_features,
            try_in_mem_cache=self.try_in_mem_cache,
            **settings,
        )
        rows = self.feature_converter(rows, task_feature_lengths=self.task_feature_lengths)
        rows = rows.map(_numbers)
        if not self.is_training and self.eval_enable_cache and not self._repeats:
            rows = rows.cache()
        # Else TFDS reads files in any order, and batch n would differ from run to run.
        options = tf.data.Options()
        options.deterministic = True
        return rows.with_options(options)

    def _batches(self, first: int) -> Iterator[NestedMap]:
        if self.is_training:
            number = first + (self.num_batches_to_skip or 0)
            if first:
                logging.info("Input %s makes %d batches again, to continue after them.", self.name, first)
            data = self._rows.batch(self.batch_size, drop_remainder=self.drop_remainder).skip(number)
            for batch in data.as_numpy_iterator():
                yield self._filled(batch, 0)
            return
        data = self._rows.batch(self.batch_size * self.num_infeed_hosts).skip(first)
        if self._limit is not None and self._limit > 0:
            data = data.take(self._limit - first)
        for batch in data.as_numpy_iterator():
            yield self._filled(batch, self.infeed_host_index * self.batch_size)

    def _filled(self, batch: Any, first_row: int) -> NestedMap:
        """Returns rows [first_row, first_row + batch_size) of a batch. Rows past the batch's end have weight 0."""
        batch = examples.for_devices(NestedMap.FromNestedDict(batch))
        count = len(jax.tree.leaves(batch)[0])
        rows = np.arange(first_row, first_row + self.batch_size)
        real = rows < count
        batch = jax.tree.map(lambda x: x[np.where(real, rows, 0)], batch)
        return batches.blank_rows(batch, real)

    def _fingerprint(self) -> dict[str, Any]:
        return {
            "task": self.mixture_or_task_inst.name,
            "split": self.split_name,
            "feature_lengths": dict(self.task_feature_lengths or {}),
            "feature_converter": str(self.feature_converter).partition(" at 0x")[0],
            "seed": self._seed,
            "shuffle": self.is_training and self.shuffle is not False,
            "batch_size": self.batch_size,
            "processes": self.num_infeed_hosts,
            "num_batches_to_skip": self.num_batches_to_skip or 0,
        }

    def _get_state_internal(self) -> bytes:
        return self._encode_position(self._taken)

    def _set_state_internal(self, state: bytes) -> None:
        (taken,) = self._decode_position(state, 1)
        self.reset()
        self._taken = taken


def configure_deterministic_input(p: Any, **kwargs: Any) -> Any:
    """Always raises UserError, because Pax's deterministic tasks aren't public. `SeqIOInput` is deterministic without them."""
    del kwargs
    raise UserError(
        f"configure_deterministic_input: {p.name!r} would read deterministic tasks, which are not published; use the input as it "
        "is: with input_random_seed, batch n depends only on n"
    )


def is_packing_on(fc: Any) -> bool:
    """Returns True if a feature converter packs several examples into a row."""
    return bool(getattr(fc, "pack", False))


def import_seqio(what: str) -> Any:
    try:
        import seqio
    except ImportError as error:
        raise UserError(
            f"{what}: {error}. Install it with the extra `seqio`: {installation.install_extra('seqio')}"
        ) from error
    return seqio


def _numbers(row: Any) -> NestedMap:
    """Returns a row, or the specs of a row, without its non-numeric features."""
    return NestedMap.FromNestedDict(row).Filter(lambda x: x.dtype.is_floating or x.dtype.is_integer or x.dtype.is_bool)
