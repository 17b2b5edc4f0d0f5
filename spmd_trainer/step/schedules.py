"""Learning-rate schedules in addition to praxis', for a praxis optimizer's `lr_schedule`. They multiply its `learning_rate`.

For inverse square root decay, use praxis' `LinearRampupSqrtDecay`; for cosine decay, its `LinearRampupCosineDecay`. The fields
of all schedules can be overridden, e.g. `--fdl.set=task.train.learner.optimizer.lr_schedule.decay_steps=5000`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from praxis import schedules

from spmd_trainer.errors import require_one_of

# {form of the decay: fraction of the total decrease as a function of the fraction of the decay steps that are over}
_DECAYS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "linear": lambda x: x,
    "cosine": lambda x: (1 - jnp.cos(jnp.pi * x)) / 2,
    "sqrt": jnp.sqrt,
}


class WarmupStableDecay(schedules.BaseSchedule):  # type: ignore[misc]  # untyped
    """Linear warm-up from 0 to 1, then constant 1, then decay to `min_ratio`, then constant.

    A run may be continued from a checkpoint before the decay, with a longer plateau. Published in MiniCPM (Hu et al. 2024,
    arXiv:2404.06395). The decay 'sqrt', 1 - sqrt(fraction of the decay steps), is from Hägele et al. 2024 (arXiv:2405.18392).

    Attributes:
      total_steps: total number of training steps; the decay ends at this step.
      warmup_steps: number of warm-up steps; 0 for no warm-up.
      decay_steps: number of decay steps; 0 for no decay.
      min_ratio: value of the schedule after the decay.
      decay: form of the decay: 'linear', 'cosine' or 'sqrt'.
    """

    total_steps: int = 0
    warmup_steps: int = 0
    decay_steps: int = 0
    min_ratio: float = 0.0
    decay: str = "linear"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("WarmupStableDecay.decay", self.decay, tuple(_DECAYS))
        if min(self.warmup_steps, self.decay_steps) < 0 or self.warmup_steps + self.decay_steps > self.total_steps:
            raise ValueError(
                f"WarmupStableDecay: warmup_steps={self.warmup_steps} and decay_steps={self.decay_steps} must be at least 0, "
                f"and together at most total_steps={self.total_steps}"
            )

    def value_at(self, step: jax.Array) -> jax.Array:
        """Returns the schedule's value at a training step, as a float32 scalar. `step`: integer scalar."""
        step = jnp.asarray(step, jnp.float32)
        up = jnp.minimum(step / self.warmup_steps, 1.0) if self.warmup_steps else jnp.float32(1.0)
        if not self.decay_steps:
            return up
        over = jnp.clip((step - (self.total_steps - self.decay_steps)) / self.decay_steps, 0.0, 1.0)
        return up * (1 - (1 - self.min_ratio) * _DECAYS[self.decay](over))


class PiecewiseByTokens(schedules.BaseSchedule):  # type: ignore[misc]  # untyped
    """Piecewise linear interpolation of values over the number of tokens that the model has been trained on.

    The schedule is constant before the first and after the last number of tokens. It jumps at a number that occurs twice.

    Attributes:
      tokens: ascending numbers of tokens at which `values` are given.
      values: the schedule's value at each number of tokens.
      tokens_per_step: tokens in a global batch, including padding: rows times length. If they change during the run (with a
        `batch_ramp`), {first step: tokens per step from this step on}.
    """

    tokens: Sequence[float] = ()
    values: Sequence[float] = ()
    tokens_per_step: int | Mapping[int, int] = 0

    @property
    def step_sizes(self) -> dict[int, int]:
        """{first step: tokens per step from this step on}."""
        sizes = self.tokens_per_step
        return dict(sorted(sizes.items())) if isinstance(sizes, Mapping) else {0: sizes}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tokens or len(self.tokens) != len(self.values):
            raise ValueError(
                f"PiecewiseByTokens has {len(self.tokens)} tokens and {len(self.values)} values; give a value for each count "
                "of tokens, at least one"
            )
        if list(self.tokens) != sorted(self.tokens):
            raise ValueError(f"PiecewiseByTokens.tokens={list(self.tokens)} must ascend")
        if 0 not in self.step_sizes or min(self.step_sizes.values()) <= 0:
            raise ValueError(
                f"PiecewiseByTokens.tokens_per_step={self.tokens_per_step}; give the tokens of a global batch, rows times length"
            )

    def value_at(self, step: jax.Array) -> jax.Array:
        """Returns the schedule's value at a training step, as a float32 scalar. `step`: integer scalar."""
        at, values = (jnp.asarray(numbers, jnp.float32) for numbers in self._by_steps())
        step = jnp.asarray(step, jnp.float32)
        after = jnp.searchsorted(at, step, side="right")
        left, right = jnp.maximum(after - 1, 0), jnp.minimum(after, len(values) - 1)
        share = jnp.where(at[right] > at[left], (step - at[left]) / jnp.maximum(at[right] - at[left], 1e-30), 0.0)
        return jnp.where(after == 0, values[0], values[left] + share * (values[right] - values[left]))

    def _by_steps(self) -> tuple[np.ndarray, np.ndarray]:
        """Converts the schedule from tokens to training steps. Returns the steps where its slope changes, and its values there.

        Both are float64, with ascending steps. The schedule's value is interpolated over steps, because numbers of tokens exceed
        int32 and float32 rounds them. Its slope over steps also changes where the number of tokens per step changes.
        """
        begins, sizes = (np.array(one, np.float64) for one in zip(*self.step_sizes.items(), strict=True))
        before = np.append(0.0, np.cumsum(sizes[:-1] * np.diff(begins)))
        bends = [count for count in before[1:] if count not in self.tokens]
        tokens = np.array([*self.tokens, *bends], np.float64)
        values = np.array([*self.values, *np.interp(bends, self.tokens, self.values)], np.float64)
        order = np.argsort(tokens, kind="stable")
        tokens, values = tokens[order], values[order]
        stage = np.maximum(np.searchsorted(before, tokens, side="right") - 1, 0)
        return begins[stage] + (tokens - before[stage]) / sizes[stage], values


class OptaxSchedule(schedules.BaseSchedule):  # type: ignore[misc]  # untyped
    """An optax schedule as a praxis schedule: `Config(OptaxSchedule, schedule=Config(optax.cosine_decay_schedule, ...))`.

    Attributes:
      schedule: a function step -> value, or a config of such a function. Command-line flags can override a config's fields.
    """

    schedule: optax.Schedule | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.schedule):
            raise ValueError(
                f"OptaxSchedule.schedule is {self.schedule!r:.80}; give a schedule of optax, such as "
                "Config(optax.cosine_decay_schedule, init_value=1.0, decay_steps=1000)"
            )

    def value_at(self, step: jax.Array) -> jax.Array:
        """Returns the schedule's value at a training step, as a float32 scalar. `step`: integer scalar."""
        assert self.schedule is not None  # checked above
        return jnp.asarray(self.schedule(step), jnp.float32)
