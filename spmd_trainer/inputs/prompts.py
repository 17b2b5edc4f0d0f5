"""Base of the inputs that give prompts to decode."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from praxis.py_utils import NestedMap

from spmd_trainer.inputs import indexed, text_base


class PromptRows(text_base.TokenizedFiles):
    """Prompts for `LanguageModel.decode`, each one once and in order, then StopIteration.

    A batch is a NestedMap of numpy arrays: `ids` int32 [B, P], prompts at the left; `paddings`, `weights` float32 [B, P], 1 and 0
    after the end of the prompt; `prefix_lengths` int32 [B], tokens of the prompt; `prompt_index` int32 [B], the prompt's number;
    `eval_sample_weights` float32 [B]. Rows that fill up the last batch hold one token, with weight 0 and prompt_index -1.

    A subclass implements `num_available` and `tokens_of_prompt`.

    Attributes:
      prefix_len: maximum number of tokens in a prompt, P.
      num_prompts: number of prompts to use, from the first; None uses all.
    """

    prefix_len: int = 0
    num_prompts: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("prefix_len")
        if self.num_prompts is not None:
            self.require_positive("num_prompts")
        if self.is_training:
            raise self.error("is_training: prompts are for decode; use TextInput for training")

    @property
    def num_available(self) -> int:
        """Number of prompts in the files."""
        raise NotImplementedError

    def tokens_of_prompt(self, index: int) -> np.ndarray:
        """Returns the tokens of a prompt, integers [n], 1 <= n <= prefix_len."""
        raise NotImplementedError

    @property
    def order(self) -> indexed.ExampleOrder:
        available = self.num_available
        count = available if self.num_prompts is None else min(self.num_prompts, available)
        return indexed.ExampleOrder(num_examples=count, endless=False)

    def input_specs(self) -> NestedMap:
        def spec(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self.batch_size, *shape), dtype)

        return NestedMap(
            ids=spec(np.int32, self.prefix_len),
            paddings=spec(np.float32, self.prefix_len),
            weights=spec(np.float32, self.prefix_len),
            prefix_lengths=spec(np.int32),
            prompt_index=spec(np.int32),
            eval_sample_weights=spec(np.float32),
        )

    def batch_at(self, position: int) -> NestedMap:
        prompts = self.examples_at(position)
        real = prompts < self.order.num_examples
        ids = np.zeros((self.batch_size, self.prefix_len), np.int32)
        ids[:, 0] = self.tokenizer.eos_id if self.start_id is None else self.start_id
        lengths = np.ones(self.batch_size, np.int32)
        for row in np.flatnonzero(real):
            tokens = self.tokens_of_prompt(int(prompts[row]))
            ids[row, : len(tokens)] = tokens
            lengths[row] = len(tokens)
        inside = np.arange(self.prefix_len) < lengths[:, None]
        return NestedMap(
            ids=ids,
            paddings=1.0 - inside.astype(np.float32),
            weights=(inside & real[:, None]).astype(np.float32),
            prefix_lengths=lengths,
            prompt_index=np.where(real, prompts, -1).astype(np.int32),
            eval_sample_weights=real.astype(np.float32),
        )

    def _fingerprint(self) -> dict[str, Any]:
        return {**super()._fingerprint(), "prefix_len": self.prefix_len}
