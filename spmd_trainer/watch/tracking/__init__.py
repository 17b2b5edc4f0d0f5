"""Trackers: services and files that keep the history of many runs. The flag `--track=wandb,mlflow` or the experiment
chooses them.

base.py         `Tracker`, the interface; `RunFacts`, a run's description; the known trackers by name
feed.py         a tracker's queue and thread, so that its errors and delays don't affect the run; `tracking.json`
settings.py     a run's config as nested dicts
samples.py      decoded examples as texts and pictures
wandb.py, mlflow.py, trackio.py, tensorboard.py   the trackers; all but TensorBoard need the package extra of their name

To add a tracker, add one file with a class that derives from `Tracker`, and one line in `base.TRACKERS`. The trackers'
methods import their packages lazily, on the trackers' own threads.
"""

# Prefix of the names of trackers' threads.
THREADS = "tracker: "
