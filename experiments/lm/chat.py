"""Trains a chat model in stages: DEPTH decides all sizes, and each stage starts from the run of the stage before.

    make chat

runs `tools/chat.py`, which prints each stage's command. The stages, with the folder ROAD that all of them share:

| stage | command | reads | writes |
|---|---|---|---|
| data | `python -m spmd_trainer.experiments.lm.stdlib_questions ROAD/data` | this Python's library | `ROAD/data` |
| tokenizer | `--mode=tokenizer --output=ROAD/tokenizer ... ROAD/data/train.jsonl` | `data` | `ROAD/tokenizer` |
| pretraining | `--exp=lm.chat.Pretrain --job_log_dir=ROAD/pretrain` | `data`, `tokenizer` | `ROAD/pretrain` |
| answers | `--exp=lm.chat.Answers --job_log_dir=ROAD/answers` | `ROAD/pretrain` | `ROAD/answers` |
| preferences | `--exp=lm.chat.Prefer --job_log_dir=ROAD/prefer` | `ROAD/answers` | `ROAD/prefer` |
| choices | `--exp=lm.chat.Choose --mode=eval ...` | `ROAD/answers`, `ROAD/prefer` | `ROAD/choose_answers`, `ROAD/choose_prefer` |

The rules of `Sizes` are those of nanochat (Karpathy 2025, github.com/karpathy/nanochat, `scripts/base_train.py`), where not said
otherwise. The reference is nanochat's d12 (DEPTH 12), whose learning rates and batch size were measured. D is the width, and N
the number of parameters of the matrices and of the logits, without the embedding:

| size | rule |
|---|---|
| width, heads | 64 DEPTH, rounded up to a multiple of 128; heads of 128 (here 64 below 512 wide, so that there are several) |
| feed-forward | 4 D as two matrices; here gated (SwiGLU, Shazeer 2020, arXiv:2002.05202), 8/3 D as three |
| vocabulary | 32,768; here 1,024 DEPTH up to there |
| row | 2,048 tokens; here 128 DEPTH up to there |
| training | 20 N tokens (Hoffmann et al. 2022, arXiv:2203.15556) |
| batch | 2^19 tokens at d12, times (tokens / those of d12)^0.383 (Bergsma et al. 2025, arXiv:2505.13738); here 2^k rows |
| rate | Muon 0.02, Adam 0.008 sqrt(768 / D), both times sqrt(batch / 2^19) |
| schedule | warm-up over 40 steps, here at most a tenth of all; decay over the last 65%, to 5% |
| weight decay | 0.28 of the matrices, less for more tokens; here none |
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from praxis import layers
from praxis.pax_fiddle import Config

from spmd_trainer import experiment_registry, sharding, tasks_lib
from spmd_trainer.checkpointing import LOAD_ALL, CheckpointLoadingRules
from spmd_trainer.decoder import experiment
from spmd_trainer.decoder.generation.settings import GenerationSettings
from spmd_trainer.decoder.lm import DecoderLanguageModel
from spmd_trainer.decoder.preferences.loss import PreferenceLoss
from spmd_trainer.decoder.preferences.model import PreferenceModel
from spmd_trainer.errors import UserError
from spmd_trainer.experiments.lm import stdlib, stdlib_questions
from spmd_trainer.experiments.lm.cloud import rows_per_process
from spmd_trainer.inputs import CorpusInput, Documents, chat_text, preferences
from spmd_trainer.models.decoder_spec import DecoderSpec
from spmd_trainer.step import schedules
from spmd_trainer.step.muon import Muon

_MOST_VOCABULARY, _LONGEST_ROW = 2**15, 2048
_REFERENCE_DEPTH, _REFERENCE_BATCH = 12, 2**19
_CHAT_ROW, _WIDE = 128, 512
# Of one minibatch, width * layers * tokens: planned for an H100, less than 60% of its 80 GB.
_MOST_ACTIVATIONS = 1.7e9
# Evaluation knows no minibatches, and the logits of all rows are its largest array.
_MOST_HELDOUT_ROWS = 32


def _check_count(name: str, value: object, example: int) -> int:
    """Returns `value`, checked to be a count. `example`: a value for the message.

    Raises:
      UserError: `value` is not a whole number of 1 or more.
    """
    if type(value) is not int or value < 1:
        raise UserError(f"{name}={value!r}; give a whole number, 1 or more, e.g. --fdl.{name}={example}")
    return value


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes, rates and steps that DEPTH decides; see the module's table.

    Attributes:
      depth: number of layers.
      tokens_per_parameter: tokens of pretraining for each parameter of the matrices and the logits.
    """

    depth: int
    tokens_per_parameter: float = 20.0

    def __post_init__(self) -> None:
        _check_count("DEPTH", self.depth, 2)

    @property
    def width(self) -> int:
        return 128 * math.ceil(self.depth / 2)

    @property
    def heads(self) -> int:
        return self.width // (128 if self.width >= _WIDE else 64)

    @property
    def hidden(self) -> int:
        return 64 * round(8 * self.width / 3 / 64)

    @property
    def vocabulary(self) -> int:
        return min(_MOST_VOCABULARY, 1024 * self.depth)

    @property
    def row(self) -> int:
        return min(_LONGEST_ROW, 128 * self.depth)

    @property
    def scaling_parameters(self) -> int:
        """Number of parameters of the matrices and the logits."""
        return self.depth * (4 * self.width**2 + 3 * self.width * self.hidden) + self.width * self.vocabulary

    @property
    def rows(self) -> int:
        """Rows of a global batch."""
        reference = Sizes(_REFERENCE_DEPTH).scaling_parameters
        tokens = _REFERENCE_BATCH * (self.scaling_parameters / reference) ** 0.383
        return max(1, 2 ** round(math.log2(tokens / self.row)))

    @property
    def minibatches(self) -> int:
        """Number of minibatches into which one GPU of 80 GB must divide a batch of `rows` to pretrain."""
        activations = self.rows * self.row * self.width * self.depth
        return min(self.rows, 2 ** max(0, math.ceil(math.log2(activations / _MOST_ACTIVATIONS))))

    def steps(self, rows: int) -> int:
        """Returns the number of pretraining steps with batches of `rows` rows."""
        return max(10, round(self.tokens_per_parameter * self.scaling_parameters / (rows * self.row)))

    @property
    def matrix_rate(self) -> float:
        return 0.02 * self._of_batch

    @property
    def adam_rate(self) -> float:
        return 0.008 * math.sqrt(768 / self.width) * self._of_batch

    @property
    def _of_batch(self) -> float:
        return math.sqrt(self.rows * self.row / _REFERENCE_BATCH)


class Stage(experiment.DecoderExperiment):
    """Base of the stages.

    Attributes:
      DEPTH: number of layers, which decides all sizes; the same for all stages.
      ROAD: the folder with `data`, `tokenizer` and the stages' runs.
      FROM: directory of the run whose newest checkpoint initialises this stage; None: that of the stage before.
      TOKENS_PER_PARAMETER: see `Sizes`.
      RATE: factor of the learning rates of `Sizes`.
      STEPS: steps of training; None: as many as `Sizes.steps`.
      ROWS: rows of a global batch; None: as many as `Sizes.rows`. The learning rates don't depend on it; see RATE.
      FPROP_DTYPE: dtype of the computation; None: bfloat16 from a width of 512 on, below it float32, which is faster on CPUs.
      CHECKPOINT_POLICY: rematerialisation policy; None: save matrix products from a width of 512 on, below it everything.
    """

    DEPTH = 2
    ROAD = "runs/chat"
    FROM: str | None = None
    TOKENS_PER_PARAMETER = 20.0
    RATE = 1.0
    STEPS: int | None = None
    ROWS: int | None = None

    ICI_MESH_SHAPE = (1, -1, 1)
    FPROP_DTYPE: Any = None
    CHECKPOINT_POLICY: Any = None
    # Name of the run of the stage before.
    _before: str | None = None

    def sizes(self) -> Sizes:
        return Sizes(self.DEPTH, self.TOKENS_PER_PARAMETER)

    def steps(self) -> int:
        """Returns the number of training steps."""
        return self.sizes().steps(self.rows()) if self.STEPS is None else _check_count("STEPS", self.STEPS, 100)

    def rows(self) -> int:
        """Returns the rows of a global batch."""
        return self.sizes().rows if self.ROWS is None else _check_count("ROWS", self.ROWS, 32)

    def adapt_mesh(self, mesh_shape: Mapping[str, int], num_devices: int) -> dict[str, int]:
        return sharding.fit_mesh_shape(mesh_shape, num_devices, grow="data")

    def file(self, *parts: str) -> str:
        """Returns a path in ROAD. ROAD may be a number, by an override such as ROAD=2024."""
        return os.path.join(str(self.ROAD), *parts)

    def spec(self) -> Config[DecoderSpec]:
        """Returns a model with the architecture of Qwen 3 (arXiv:2505.09388), so that it can be exported as Qwen 3."""
        sizes = self.sizes()
        return Config(
            DecoderSpec,
            vocab_size=sizes.vocabulary,
            model_dims=sizes.width,
            hidden_dims=sizes.hidden,
            num_layers=sizes.depth,
            num_heads=sizes.heads,
            num_kv_heads=sizes.heads,
            head_dims=sizes.width // sizes.heads,
            query_key_norm="head",
            max_positions=max(sizes.row, _CHAT_ROW),
        )

    def model(self) -> Config[DecoderLanguageModel]:
        is_wide, policies = self.sizes().width >= _WIDE, layers.AutodiffCheckpointType
        policy = policies.SAVE_DOT_WITH_NO_BATCH_DIM if is_wide else policies.SAVE_EVERYTHING
        model_p = super().model().set(generation=Config(GenerationSettings, max_tokens=48))
        model_p.fprop_dtype = self.FPROP_DTYPE or (jnp.bfloat16 if is_wide else jnp.float32)
        model_p.lm_tpl.checkpoint_policy = self.CHECKPOINT_POLICY or policy
        return model_p

    def task(self) -> Config[tasks_lib.SingleTask]:
        task_p = super().task()
        steps, sizes = self.steps(), self.sizes()
        schedule = Config(schedules.WarmupStableDecay, total_steps=steps, min_ratio=0.05)
        schedule.set(warmup_steps=min(40, steps // 10), decay_steps=round(0.65 * steps))
        task_p.train.learner.optimizer = Config(
            Muon,
            scale="original",
            learning_rate=self.RATE * sizes.matrix_rate,
            adam_learning_rate=self.RATE * sizes.adam_rate,
            lr_schedule=schedule,
        )
        every = max(1, steps // 4)
        task_p.train.set(num_train_steps=steps, eval_interval_steps=every, save_interval_steps=every)
        task_p.train.set(eval_skip_train=True, summary_interval_steps=max(1, steps // 50), save_max_to_keep=1)
        if begins_with := self.FROM or (self._before and self.file(self._before)):
            task_p.train.init_from_checkpoint_rules = {str(begins_with): CheckpointLoadingRules(load_rules=[LOAD_ALL])}
        return task_p

    def _input(self, cls: Any, name: str, **fields: Any) -> Any:
        """Returns an input of class `cls`; the input with the name 'train' is for training."""
        if name == "train":
            fields = {**fields, "is_training": True, "input_random_seed": 17}
        shared = {"tokenizer": self.file("tokenizer"), "seq_len": _CHAT_ROW}
        rows = self.rows() if name == "train" else min(self.rows(), _MOST_HELDOUT_ROWS)
        batch = Config(rows_per_process, global_batch_size=rows)
        return Config(cls, name=name, **{**shared, "batch_size": batch, **fields})


@experiment_registry.register(tags=["needs_folder"])
class Pretrain(Stage):
    """Pretraining on the sources and the reference of Python's library, with Muon; the first stage of `lm.chat`."""

    def datasets(self) -> list[Any]:
        parts = {"train": "train.jsonl", "heldout": "heldout.jsonl"}
        # Rows of many files are shuffled together: those of one file are alike.
        row = self.sizes().row
        fields = {"seq_len": row, "window_rows": max(256, 2**20 // row)}
        return [
            self._input(CorpusInput, name, source=Documents(self.file("data", file)), **fields)
            for name, file in parts.items()
        ]

    def task(self) -> Config[tasks_lib.SingleTask]:
        task_p = super().task()
        task_p.metrics = Config(
            stdlib.BitsPerByte,
            bytes_per_label=Config(
                stdlib.bytes_per_label, source=self.datasets()[-1].source, tokenizer=self.file("tokenizer")
            ),
        )
        return task_p


@experiment_registry.register(tags=["needs_folder"])
class Answers(Stage):
    """Fine-tunes on questions and answers; only answers count in the loss. Starts from `Pretrain`'s variables."""

    STEPS = 300
    ROWS = 32
    _before = "pretrain"

    def datasets(self) -> list[Any]:
        return [
            self._input(chat_text.ChatInput, "train", files=self.file("data", "chats.jsonl")),
        ]

    def decode_datasets(self) -> list[Any]:
        return [
            Config(
                chat_text.ChatPromptInput,
                name=name,
                files=self.file("data", "asked", f"{name}.jsonl"),
                tokenizer=self.file("tokenizer"),
                prefix_len=_CHAT_ROW // 2,
                batch_size=Config(rows_per_process, global_batch_size=32),
            )
            for name in stdlib_questions.SETS
        ]


@experiment_registry.register(tags=["needs_folder"])
class Prefer(Answers):
    """Trains the model to prefer the right one of two answers (DPO, Rafailov et al. 2023). Starts from `Answers`' variables.

    Attributes:
      LOSS, BETA: see `decoder.preferences.loss.PreferenceLoss`.
    """

    RATE = 0.02
    STEPS = 100
    LOSS, BETA = "sigmoid", 0.1
    _before = "answers"

    def datasets(self) -> list[Any]:
        parts = {"train": "pairs.jsonl", "heldout": "pairs_heldout.jsonl"}
        reference = None if self.LOSS == "simpo" else "file"
        return [
            self._input(preferences.PreferenceInput, name, files=self.file("data", file), reference=reference)
            for name, file in parts.items()
        ]

    def model(self) -> Config[PreferenceModel]:
        plain = super().model()
        model_p = Config(PreferenceModel, **{name: getattr(plain, name) for name in plain.__arguments__})
        return model_p.set(preference=Config(PreferenceLoss, loss=self.LOSS, beta=self.BETA))


@experiment_registry.register(tags=["needs_folder"])
class Choose(Prefer):
    """Evaluates (`--mode=eval`) how often a run's model prefers the right one of two answers to a question.

    It prefers the answer with the higher mean log-probability of a token, as in SimPO's loss, which needs no reference model. The
    metric `rewards/accuracies` is the share of pairs in which this is the right answer.
    """

    LOSS = "simpo"
