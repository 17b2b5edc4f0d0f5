"""Trackers: services and files that keep the history of many runs. Chosen by `--track=wandb,mlflow` or by the
experiment.

base.py         `Tracker`, the interface; `RunFacts`, a run's description; the known trackers by name
feed.py         one tracker's queue and thread, which keep its errors and delays from the run; `tracking.json`
settings.py     a run's config as nested dicts
samples.py      decoded examples as texts and pictures
wandb.py, mlflow.py, trackio.py, tensorboard.py   the trackers; each needs the extra of its name, TensorBoard none

A new tracker is one file with a class that derives from `Tracker`, and one line in `base.TRACKERS`. The trackers'
methods import their packages lazily, on their own threads.
"""

# Prefix of the names of trackers' threads.
THREADS = "tracker: "
