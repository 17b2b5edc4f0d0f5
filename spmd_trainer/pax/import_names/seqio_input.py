"""Pax's `seqio_input`: SeqIO tasks and mixtures as inputs. The code is in `inputs/seqio_*.py`."""

from spmd_trainer.inputs.seqio_evaluation import get_eval_hparams_for_seqio, select_split
from spmd_trainer.inputs.seqio_input import (
    MetricType,
    SeqIOInput,
    configure_deterministic_input,
    feature_converter_class,
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
