"""Callbacks: objects that a training run calls at its moments. The trainer has its own; experiments and callers add theirs.

Start with `base.py`. `Callback` has one method for each moment of a run, and each method gets a `Run`: the run's state, mesh,
task and directory. An experiment adds callbacks as configs in `task.train.callbacks`, a caller as objects in
`spmd_trainer.train(callbacks=[...])`. The trainer's own callbacks serve as examples:

summaries.py      writes a step's scalars to TensorBoard events and metrics.jsonl
checkpoints.py    opens, saves and closes the run's checkpoints
early_stop.py     asks `task.early_stopping_fn`, and keeps the best checkpoint
invalid_steps.py  counts steps with NaN, Inf or a rejected gradient

`step_watch.py` is for what follows each step more closely, from inside the loop. Most callbacks are in other rooms, and a run
trains without them: `watch/run.py` lists those that watch it, `tracking/tracking.py` tells trackers of it (`--track`), and
`lm_eval/` judges the model every N steps, where an experiment adds it.
"""

from __future__ import annotations

from spmd_trainer.callbacks.base import Callback, CallbackError, Run

__all__ = ["Callback", "CallbackError", "Run"]
