"""Settings for low-rank adapters."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from spmd_trainer.errors import UserError
from spmd_trainer.sharding.specs import entry_axes

ALL_LINEAR = "all-linear"
_NAME = re.compile(r"[\w-][\w.-]*")


@dataclasses.dataclass(frozen=True)
class Lora:
    """Settings of low-rank adapters for a model's weights: LoRA (arXiv:2106.09685) or DoRA (arXiv:2402.09353).

        task_p.lora = Config(lora.Lora, targets=["attention/(query|value)/w"], rank=8, alpha=16.0)

    All variables of the model are frozen; only the adapters learn.

    Attributes:
      targets: regexes; a variable gets adapters if one of them is found in its path (`re.search`, e.g. in
        'params/lm/layers/sub/layer_0/attention/query/w'). 'all-linear': every variable used only in matrix products, except
        embeddings (multiplied by one-hot vectors) and output layers (no other weight multiplies their results).
      rank: inner dimension of the product of the two adapter matrices.
      alpha: the product of the two adapter matrices is multiplied by alpha / rank.
      dropout: probability with which an element of the adapters' input is set to 0 in training.
      rslora: multiply by alpha / sqrt(rank) instead of alpha / rank (rank-stabilized LoRA, arXiv:2312.03732).
      dora: learn the norm of each output's weights separately from their direction.
      rank_axis: mesh axes that shard the rank dimension, padded if needed; None: not sharded. An adapter's other dimensions
        are sharded like its weight's, and axes used there don't shard the rank.
      dtype: dtype of the adapters.
      adapters: names of several adapters on the same targets. The batch entry `adapter`, int32 [rows], gives each row's index
        into these names; -1 is the base model alone. None: one adapter for all rows.
      reference: True to use the base model, without dropout and gradient, as the reference model for preference pairs. Its
        method `with_reference` adds the reference log-probabilities to each batch that lacks them.
    """

    targets: str | Sequence[str] = ALL_LINEAR
    rank: int = 8
    alpha: float = 16.0
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False
    rank_axis: str | Sequence[str] | None = None
    dtype: Any = jnp.float32
    adapters: Sequence[str] | None = None
    reference: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.targets, str) and self.targets != ALL_LINEAR:
            raise UserError(
                f"task.lora.targets is {self.targets!r}; give a list of regexes, e.g. [{self.targets!r}], or {ALL_LINEAR!r}"
            )
        if not self.targets:
            raise UserError(f"task.lora.targets is empty; give a list of regexes, or {ALL_LINEAR!r}")
        for regex in self.regexes:
            try:
                re.compile(regex)
            except (re.error, TypeError) as error:
                raise UserError(f"task.lora.targets: {regex!r} is not a valid regex: {error}") from error
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise UserError(f"task.lora.rank is {self.rank!r}; it must be an integer of at least 1, e.g. 8")
        if not (isinstance(self.alpha, int | float) and math.isfinite(self.alpha) and self.alpha > 0):
            raise UserError(f"task.lora.alpha is {self.alpha!r}; it must be a positive number, e.g. {2 * self.rank}")
        if not (isinstance(self.dropout, int | float) and 0 <= self.dropout < 1):
            raise UserError(f"task.lora.dropout is {self.dropout!r}; it must be at least 0 and less than 1")
        if not jnp.issubdtype(self.dtype, jnp.floating):
            raise UserError(f"task.lora.dtype is {self.dtype!r}; it must be a dtype of floats, e.g. float32")
        self._check_adapters()

    def _check_adapters(self) -> None:
        names = self.adapters
        if names is None:
            return
        # Names of adapters are also used as directory names.
        valid = not isinstance(names, str) and all(isinstance(x, str) and _NAME.fullmatch(x) for x in names)
        if not (valid and names and len(set(names)) == len(names)):
            raise UserError(
                f"task.lora.adapters is {names!r}; give a list of different names of letters, digits, '_', '-' and '.', at least "
                "one, or None for one adapter"
            )

    @property
    def regexes(self) -> tuple[str, ...]:
        """The regexes of the targets; () for 'all-linear'."""
        return () if isinstance(self.targets, str) else tuple(self.targets)

    @property
    def rank_axes(self) -> tuple[str, ...]:
        """The mesh axes that may split the rank dimension."""
        return entry_axes(self.rank_axis)

    @property
    def scale(self) -> float:
        """Factor by which the product of the two adapter matrices is multiplied."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)
