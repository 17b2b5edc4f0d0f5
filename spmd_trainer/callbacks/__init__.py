"""Callbacks: objects that a training run calls at its moments. The trainer has its own; experiments and callers add theirs.

Start with `base.py`. `Callback` has one method for each moment of a run, and each method gets a `Run`: the run's state, mesh,
task and directory. An experiment adds callbacks as configs in `task.train.callbacks`, a caller as objects in
`spmd_trainer.train(callbacks=[...])`. The trainer's own callbacks serve as examples:

progress.py       logs the progress lines
summaries.py      writes a step's scalars to TensorBoard events and metrics.jsonl
checkpoints.py    opens, saves and closes the run's checkpoints
early_stop.py     asks `task.early_stopping_fn`, and keeps the best checkpoint
invalid_steps.py  counts steps with NaN, Inf or a rejected gradient
invalid_batches.py  writes the batches of the first of them, for --mode=replay
loss_spikes.py    counts steps whose loss is far above that of the steps before
replica_check.py  compares the copies of the state on different devices (--check_replicas_every)
profiler.py       profiles some steps
watchdog.py       reports a run that makes no progress, and ends it (--hang_seconds)
run_times.py      keeps where the time goes in run_times.jsonl
run_page.py       writes the run's page, run.html, at the end
tracking.py       tells trackers of the run (--track)
lm_eval.py        judges the model with lm-eval's tasks every N steps; an experiment adds it
variable_histograms.py  counts the variables' values for trackers
"""

from __future__ import annotations

from spmd_trainer.callbacks.base import Callback, CallbackError, Run

__all__ = ["Callback", "CallbackError", "Run"]
