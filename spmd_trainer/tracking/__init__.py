"""Trackers: services and files that keep the history of many runs. Chosen by `--track=wandb,mlflow` or by the experiment.

base.py         `Tracker`, the interface; `RunFacts`, what a tracker is told of a run
registry.py     the known trackers by name
feed.py         one tracker's queue and thread: a tracker that is slow or fails never touches the run
run_ids.py      `tracking.json`: under which ids a run continues after a restart
settings.py     a run's config as nested dicts
samples.py      decoded examples as texts and pictures
wandb.py, mlflow.py, trackio.py, tensorboard.py   the trackers; each needs the extra of its name, TensorBoard none

A new tracker is one file with a class that derives from `Tracker`, and one line in `registry.TRACKERS`. The packages of trackers
are imported in the trackers' methods: on their own threads, and only when they were asked for.
"""

# How the names of trackers' threads begin.
THREADS = "tracker: "
