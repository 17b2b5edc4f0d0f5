"""Inputs under the names that Pax's language-model experiment files use.

`SyntheticLmData` is here. Not here: `TFRecordBertInput` and `TextInput`, whose packing, re-masking and tokenizers are
lingvo's own TensorFlow ops.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from praxis import lingvo_lib
from praxis.py_utils import NestedMap

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import batches


class SyntheticLmData:
    """One packed language-model batch, always the same: token 1 throughout.

    Stands in for a lingvo input generator inside praxis' `LingvoInputAdaptor`, which imports TensorFlow and adds
    `eval_sample_weights`; lingvo's own TensorFlow ops are not needed. Example:

        input_p = input_generator.SyntheticLmData.HParams()
        input_p.batch_size, input_p.seq_len = 16, 1024
        pax_fiddle.Config(base_input.LingvoInputAdaptor, input=input_p, is_training=True)
    """

    @classmethod
    def HParams(cls) -> lingvo_lib.InstantiableParams:
        """Settings, to be assigned to: `name`, `batch_size` (rows per process) and `seq_len` (tokens per row)."""
        p = lingvo_lib.InstantiableParams(cls)
        p.Define("name", "input", "Name of the input, also of its summaries.")
        p.Define("batch_size", 0, "Rows per process.")
        p.Define("seq_len", 0, "Tokens per row.")
        return p

    @classmethod
    def input_specs(cls, p: Any) -> NestedMap:
        """What the adaptor gives with settings `p`, as `batches.lm_input_specs`; TensorFlow is not needed for this."""
        _check(p)
        return batches.lm_input_specs(p.batch_size, p.seq_len)

    def __init__(self, params: Any):
        """Takes the settings.

        Args:
          params: what `HParams()` returned.

        Raises:
          UserError: `batch_size` or `seq_len` has not been set.
        """
        _check(params)
        self.params = params

    def GetPreprocessedInputBatch(self) -> NestedMap:
        """`ids`, `labels`, `segment_ids`, `segment_pos` int32 and `paddings`, `weights` float32, all [B, T]."""
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
