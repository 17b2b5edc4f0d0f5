"""The size of a model's vocabulary."""

from __future__ import annotations

from typing import Any


def vocabulary_size(task: Any) -> int | None:
    """Returns the size of the model's vocabulary; None for a model without one.

    It is `task.model.lm_tpl.vocab_size`, or `task.model.lm_tpl.spec.vocab_size` of a `decoder`.
    """
    lm_p = getattr(task.model, "lm_tpl", None)
    vocab_size = getattr(lm_p, "vocab_size", None) or getattr(getattr(lm_p, "spec", None), "vocab_size", None)
    return vocab_size if isinstance(vocab_size, int) and vocab_size else None
