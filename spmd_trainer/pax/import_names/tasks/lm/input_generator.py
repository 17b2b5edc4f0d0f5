"""Inputs that Pax's language-model experiment files use: `SyntheticLmData` and `TFRecordBertInput`.

Pax's `TextInput` is missing, because its tokenizers are lingvo's TensorFlow ops. The name can be imported, but using it raises
an error that names the replacement.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from praxis import lingvo_lib
from praxis.py_utils import NestedMap

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import batches
from spmd_trainer.pax.absent_names import getter
from spmd_trainer.pax.bert_records import TFRecordBertInput

__all__ = ["SyntheticLmData", "TFRecordBertInput"]

_TEXT = "use spmd_trainer.inputs.TextInput or PromptInput, with a tokenizer of spmd_trainer.inputs"
ABSENT = {
    "TextInput": _TEXT,
    "make_masked_ml_data_augmenter": "fill in the mlm_augmenter of TFRecordBertInput's config: p.mlm_augmenter.Set(...)",
}
__getattr__ = getter(__name__, ABSENT)


class SyntheticLmData:
    """A language-model input that always returns the same batch, in which every token is 1.

    Takes the place of a lingvo input generator in praxis' `LingvoInputAdaptor`. The adaptor imports TensorFlow and adds
    `eval_sample_weights`; lingvo's TensorFlow ops are not needed. Example:

        input_p = input_generator.SyntheticLmData.HParams()
        input_p.batch_size, input_p.seq_len = 16, 1024
        pax_fiddle.Config(base_input.LingvoInputAdaptor, input=input_p, is_training=True)
    """

    @classmethod
    def HParams(cls) -> lingvo_lib.InstantiableParams:
        """Returns the settings to fill in: `name`, `batch_size` (rows per process) and `seq_len` (tokens per row)."""
        p = lingvo_lib.InstantiableParams(cls)
        p.Define("name", "input", "Name of the input, also of its summaries.")
        p.Define("batch_size", 0, "Rows per process.")
        p.Define("seq_len", 0, "Tokens per row.")
        return p

    @classmethod
    def input_specs(cls, p: Any) -> NestedMap:
        """Returns the shapes and dtypes of the batches that the adaptor makes with settings `p`. Needs no TensorFlow."""
        _check(p)
        return batches.lm_input_specs(p.batch_size, p.seq_len)

    def __init__(self, params: Any):
        """Checks and stores the settings. `params`: the result of `HParams()`, filled in.

        Raises:
          UserError: `batch_size` or `seq_len` is not set.
        """
        _check(params)
        self.params = params

    def GetPreprocessedInputBatch(self) -> NestedMap:
        """Returns [batch_size, seq_len] arrays: int32 ids, labels, segment_ids, segment_pos; float32 paddings, weights."""
        shape = (self.params.batch_size, self.params.seq_len)
        ones = np.ones(shape, np.int32)
        return NestedMap(
            ids=ones,
            labels=ones,
            paddings=np.zeros(shape, np.float32),
            weights=np.ones(shape, np.float32),
            segment_ids=ones,
            segment_pos=np.broadcast_to(np.arange(self.params.seq_len, dtype=np.int32), shape),
        )


def _check(p: Any) -> None:
    if p.batch_size < 1 or p.seq_len < 1:
        raise UserError(
            f"SyntheticLmData has batch_size={p.batch_size} and seq_len={p.seq_len}; set both to 1 or more on what "
            "SyntheticLmData.HParams() returns"
        )
