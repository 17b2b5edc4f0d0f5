"""Byte-level language models, trained on the source code of Python's standard library, which every machine has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from praxis import base_hyperparams, base_layer, decoder_hparams, layers, pax_fiddle, py_utils

from spmd_trainer import base_experiment, experiment_registry, sharding, task_defaults, tasks_lib
from spmd_trainer.inputs import Documents, stdlib_text, text, tokenizer_field
from spmd_trainer.inputs.corpus.documents import BadRecord
from spmd_trainer.inputs.corpus.open_source import open_documents
from spmd_trainer.tasks.lm import cheaper_layers

# 256 bytes and end-of-text. 257 is prime, so no mesh divides it and every run exercises padding.
VOCAB_SIZE = 257
END_OF_TEXT = 256


class BitsPerByte(base_hyperparams.FiddleBaseParameterizable):
    """Adds `bits_per_byte`, the cross-entropy in bits per byte of text, to a language model's metrics.

    Attributes:
      source: name of the metric with the cross-entropy in nats per label.
      bytes_per_label: 1 for a byte-level model; for others, see the function `bytes_per_label`.
    """

    source: str = "avg_xent"
    bytes_per_label: float = 1.0

    def __call__(self, weighted_scalars: Any) -> Any:
        """Returns {name: (mean, weight)} with `bits_per_byte` added. Raises ValueError if the metric `source` is missing."""
        if self.source not in weighted_scalars:
            raise ValueError(f"BitsPerByte reads {self.source!r}; the model's outputs are {sorted(weighted_scalars)}")
        nats, weight = weighted_scalars[self.source]
        bits = nats / (math.log(2) * self.bytes_per_label)
        return type(weighted_scalars)({**weighted_scalars, "bits_per_byte": (bits, weight)})


def bytes_per_label(source: Documents, tokenizer: Any) -> float:
    """Returns a text's mean number of bytes per label. Labels are the text's tokens and one end token per document.

    With this number, bits per byte are exact for an evaluation on this text, and an estimate for other text.

    Args:
      source: the text.
      tokenizer: path of a tokenizer, see `text_base.TokenizedInput`.
    """
    made = tokenizer_field.make_tokenizer(tokenizer)
    read = open_documents(source)
    size = labels = 0
    for document in (one for chunk in range(read.num_chunks) for one in read.read_chunk(chunk, 0)):
        if isinstance(document, BadRecord):
            continue
        assert isinstance(document.content, bytes)
        size += len(document.content)
        labels += len(made.encode(document.content, document.where)) + 1
    return size / max(1, labels)


@experiment_registry.register
class StdlibBytes(base_experiment.BaseExperiment):
    """4-layer byte-level LM on the standard library's sources; mesh (1, 4, 2); trains in under 8 minutes on 2 cores."""

    ICI_MESH_SHAPE = (1, 4, 2)
    MESH_AXIS_NAMES = ("replica", "data", "mdl")

    NUM_LAYERS = 4
    MODEL_DIMS = 256
    HIDDEN_DIMS = 1024
    NUM_HEADS = 4
    MAX_SEQ_LEN = 256
    GLOBAL_BATCH_SIZE = 8
    # A scan of one layer over stacked weights: the step compiles in a third of the time.
    USE_REPEATED_LAYER = True

    LEARNING_RATE = 2e-3
    WARMUP_STEPS = 100
    NUM_TRAIN_STEPS = 600
    EVAL_INTERVAL_STEPS = 300
    CHECKPOINT_EVERY_N_STEPS = 200
    NUM_EVAL_WINDOWS = 256

    NUM_PROMPTS = 5
    PROMPT_BYTES = 64
    DECODE_STEPS = 64

    def datasets(self) -> list[Any]:
        train = pax_fiddle.Config(
            text.TextInput,
            name="stdlib_train",
            files=stdlib_text.stdlib_train_files,
            seq_len=self.MAX_SEQ_LEN,
            batch_size=self.GLOBAL_BATCH_SIZE,
            is_training=True,
            shuffle=True,
            input_random_seed=17,
        )
        heldout = pax_fiddle.Config(
            text.TextInput,
            name="heldout",
            files=stdlib_text.stdlib_heldout_files,
            seq_len=self.MAX_SEQ_LEN,
            batch_size=self.GLOBAL_BATCH_SIZE,
            max_windows=self.NUM_EVAL_WINDOWS,
        )
        return [train, heldout]

    def vocab_size(self) -> int:
        return VOCAB_SIZE

    def adapt_mesh(self, mesh_shape: Mapping[str, int], num_devices: int) -> dict[str, int]:
        return sharding.fit_mesh_shape(mesh_shape, num_devices, grow="data")

    def decode_datasets(self) -> list[Any]:
        prompts = pax_fiddle.Config(
            text.PromptInput,
            name="heldout_prompts",
            files=stdlib_text.stdlib_heldout_files,
            prefix_len=self.PROMPT_BYTES,
            num_prompts=self.NUM_PROMPTS,
            batch_size=self.NUM_PROMPTS,
        )
        return [prompts]

    def task(self) -> pax_fiddle.Config[tasks_lib.SingleTask]:
        """Returns the task: a decoder-only transformer with Pax's v1 sharding, Adam, and greedy decode."""
        task_p = pax_fiddle.Config(tasks_lib.SingleTask, name="stdlib_bytes")
        task_p.model = self._model()
        task_p.metrics = pax_fiddle.Config(BitsPerByte)
        train_p = task_p.train
        train_p.num_train_steps = self.NUM_TRAIN_STEPS
        train_p.save_interval_steps = self.CHECKPOINT_EVERY_N_STEPS
        train_p.eval_interval_steps = self.EVAL_INTERVAL_STEPS
        train_p.eval_skip_train = True
        train_p.summary_interval_steps = 20
        train_p.save_max_to_keep = 2
        train_p.inputs_split_mapping = py_utils.NestedMap(
            map_1d=(("replica", "data"),), map_2d=(("replica", "data"), None)
        )
        task_defaults.set_adam_with_cosine_decay(
            train_p.learner,
            "total_loss",
            learning_rate=self.LEARNING_RATE,
            warmup_steps=self.WARMUP_STEPS,
            num_train_steps=self.NUM_TRAIN_STEPS,
        )
        return task_p

    def _model(self) -> Any:
        model_p = pax_fiddle.Config(layers.LanguageModel, name="lm")
        model_p.ici_mesh_shape = list(self.ICI_MESH_SHAPE)
        model_p.mesh_axis_names = list(self.MESH_AXIS_NAMES)
        lm_p = model_p.lm_tpl
        lm_p.vocab_size = self.vocab_size()
        lm_p.model_dims = self.MODEL_DIMS
        lm_p.packed_input = True
        # Rotary embeddings, because windows begin anywhere in a file.
        lm_p.position_emb_tpl = None
        lm_p.softmax_tpl.scale_sqrt_depth = True
        lm_p.softmax_tpl.params_init = base_layer.WeightInit.Gaussian(1.0 / math.sqrt(self.MODEL_DIMS))
        stack_p = lm_p.stacked_transformer_tpl
        stack_p.model_dims = self.MODEL_DIMS
        stack_p.hidden_dims = self.HIDDEN_DIMS
        stack_p.num_layers = 1 if self.USE_REPEATED_LAYER else self.NUM_LAYERS
        stack_p.num_heads = self.NUM_HEADS
        layer_p = stack_p.transformer_layer_params_tpl
        layer_p.tr_atten_tpl.use_bias = False
        layer_p.tr_atten_tpl.combine_qkv = True
        layer_p.tr_atten_tpl.use_rotary_position_emb = True
        layer_p.tr_fflayer_tpl.activation_tpl = pax_fiddle.Config(layers.GELU)
        if self.USE_REPEATED_LAYER:
            lm_p.stacked_transformer_tpl = pax_fiddle.Config(
                layers.StackedTransformerRepeated, block=stack_p, x_times=self.NUM_LAYERS
            )
        model_p.lm_tpl = layers.TransformerLm.set_sharding_params_v1(
            lm_p,
            replica_axis="replica",
            data_axis="data",
            mdl_axis="mdl",
            ici_mesh_shape=model_p.ici_mesh_shape,
            mesh_axis_names=model_p.mesh_axis_names,
            training_optimized=False,
        )
        cheaper_layers.use_layer_norm(model_p)
        model_p.decoder_tpl = decoder_hparams.GreedyDecoderHParams(
            seqlen=self.PROMPT_BYTES + self.DECODE_STEPS,
            max_decode_steps=self.DECODE_STEPS,
            eos_id=END_OF_TEXT,
            fprop_for_prefix=True,
        )
        return model_p


@experiment_registry.register(tags=["tiny"])
class StdlibBytesTiny(StdlibBytes):
    """StdlibBytes in a size for tests: 2 layers, width 32, uneven feed-forward width."""

    NUM_LAYERS = 2
    MODEL_DIMS = 32
    HIDDEN_DIMS = 67
    NUM_HEADS = 2
    MAX_SEQ_LEN = 32
    GLOBAL_BATCH_SIZE = 8

    LEARNING_RATE = 5e-3
    WARMUP_STEPS = 2
    NUM_TRAIN_STEPS = 8
    EVAL_INTERVAL_STEPS = 4
    CHECKPOINT_EVERY_N_STEPS = 4
    NUM_EVAL_WINDOWS = 19

    PROMPT_BYTES = 12
    DECODE_STEPS = 6
