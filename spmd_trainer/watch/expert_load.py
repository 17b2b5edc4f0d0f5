"""Summaries of how many tokens choose each expert, and a warning about experts that no token chooses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from absl import logging

from spmd_trainer.callbacks import Callback, Run
from spmd_trainer.sharding.messages import count_text
from spmd_trainer.step.packing import Scalars

# The directory below `summaries` with the load of each layer's experts.
EXPERTS = "experts"
# An expert is dead after this many steps in a row without a token.
DEAD_AFTER = 100
# Maximum number of layers that a warning names.
_MOST_LAYERS = 20


class ExpertLoad(Callback):
    """Writes summaries of each expert's load, i.e. the number of tokens that chose the expert, without padding. Warns once if
    no token has chosen an expert for `DEAD_AFTER` steps. Warns again only if a token has chosen the expert in between.

    The training summaries have two scalars. `experts/max_over_mean` is the maximum over all experts of the expert's load divided
    by the mean load in its layer. `experts/without_tokens` is the number of experts, in all layers, that no token of the step
    chose. `summaries/experts` has both scalars for each layer. Its `metrics.jsonl` also lists each expert's share of its layer's
    load, e.g. 'LAYER/load': '0.21 0.18 ...'.
    """

    def __init__(self) -> None:
        self._idle: dict[str, np.ndarray] = {}

    def on_open(self, run: Run) -> None:
        # Reading a field of a config costs as much as waking a thread, so it isn't done at every step.
        self._interval = run.task.train.summary_interval_steps

    def on_start(self, run: Run) -> None:
        """Makes TensorBoard drop the earlier values of steps that the run repeats after a restart."""
        run.summaries.replace_from(EXPERTS, run.first_step + 1)

    def after_step(self, run: Run, step: int, scalars: Scalars) -> None:
        if not scalars.loads:
            return
        dead = [text for name, load in scalars.loads.items() for text in self._newly_dead(name, load)]
        if dead:
            _warn(step, dead)
        ratio = max(float(np.max(_ratios(load))) for load in scalars.loads.values())
        missing = sum(int(np.sum(load == 0)) for load in scalars.loads.values())
        run.log({"experts/max_over_mean": ratio, "experts/without_tokens": float(missing)})
        if step % self._interval == 0:
            _write(run, step, scalars.loads)

    def _newly_dead(self, name: str, load: np.ndarray) -> Iterator[str]:
        """Yields 'LAYER: expert, ...' for layers with experts that have just reached `DEAD_AFTER` steps without a token."""
        # A step without any tokens doesn't count.
        idle = np.where(load > 0, 0, self._idle.get(name, np.zeros(load.shape, int)) + load.any(axis=-1, keepdims=True))
        is_new = (idle == DEAD_AFTER) & load.any(axis=-1, keepdims=True)
        self._idle[name] = idle
        if is_new.any():
            for layer, experts in _by_layer(name, is_new):
                if experts.any():
                    yield f"{layer}: {', '.join(map(str, np.flatnonzero(experts)))}"


def _warn(step: int, dead: Sequence[str]) -> None:
    more = f"; and {count_text(len(dead) - _MOST_LAYERS, 'more layer')}" if len(dead) > _MOST_LAYERS else ""
    logging.warning(
        "no token has chosen these experts in the last %d steps, up to step %d: %s%s. They were not trained meanwhile; "
        "balance the load with choice_bias or aux_loss_weight of the MoeSpec",
        DEAD_AFTER,
        step,
        "; ".join(dead[:_MOST_LAYERS]),
        more,
    )


def _write(run: Run, step: int, loads: Mapping[str, np.ndarray]) -> None:
    values: dict[str, float] = {}
    notes: dict[str, str] = {}
    for name, load in loads.items():
        for layer, of_layer in _by_layer(name, load):
            values[f"{layer}/max_over_mean"] = float(_ratios(of_layer))
            values[f"{layer}/without_tokens"] = float(np.sum(of_layer == 0))
            shares = of_layer / max(float(of_layer.sum()), 1e-9)
            notes[f"{layer}/load"] = " ".join(f"{share:.4g}" for share in shares)
    run.summaries.write(EXPERTS, step, values, notes)


def _by_layer(name: str, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yields each layer's name and its values [experts] from an array [..., experts]. Repeated layers are named 'NAME/0', ..."""
    for index in np.ndindex(array.shape[:-1]):
        yield "/".join((name, *map(str, index))), array[index]


def _ratios(load: np.ndarray) -> np.ndarray:
    """Returns the highest load divided by the mean load over the last dimension; 0 if there are no tokens."""
    found: np.ndarray = load.max(axis=-1) / np.maximum(load.mean(axis=-1), 1e-9)
    return found
