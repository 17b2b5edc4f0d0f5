"""Pax's `model_params`: experiment classes and helpers for language-model experiment files.

    from spmd_trainer.tasks.lm import model_params

    class Mine(model_params.TransformerLmSpmdAdafactor, MyDataset):
        NUM_LAYERS = 18
        MODEL_DIMS = 3072
        ICI_MESH_SHAPE = [1, 4, 1]

Names, class attributes and defaults are those of paxml 1.4.0. The docstring of each class documents its attributes.
"""

from spmd_trainer.task_defaults import (
    UnsupportedError,
    maybe_setup_moe_params,
    set_default_adafactor,
    set_default_adam,
    set_sharding_annotations_v1,
    set_sharding_annotations_with_expert_parallelism,
)
from spmd_trainer.tasks.lm.classification import ClassificationModelAdam
from spmd_trainer.tasks.lm.transformer_bert import TransformerBertPmapAdam, TransformerBertSpmdAdafactor
from spmd_trainer.tasks.lm.transformer_lm import (
    TransformerLmPmapAdam,
    TransformerLmSpmdAdafactor,
    TransformerLmSpmdPipelineAdafactor,
)

__all__ = [
    "ClassificationModelAdam",
    "TransformerBertPmapAdam",
    "TransformerBertSpmdAdafactor",
    "TransformerLmPmapAdam",
    "TransformerLmSpmdAdafactor",
    "TransformerLmSpmdPipelineAdafactor",
    "UnsupportedError",
    "maybe_setup_moe_params",
    "set_default_adafactor",
    "set_default_adam",
    "set_sharding_annotations_v1",
    "set_sharding_annotations_with_expert_parallelism",
]
