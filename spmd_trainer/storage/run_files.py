"""Names of files in a run's directory that several rooms read."""

from __future__ import annotations

import re

# Says which experiment a job_log_dir belongs to.
MARKER = "experiment.json"
# What the newest start of the run is: its experiment, overrides, versions and devices.
ABOUT = "run.json"
# Full logs of the processes that worked in a job_log_dir.
LOGS = "logs"
# The step with which training has ended, which may be earlier than num_train_steps.
END_OF_TRAINING = "end_of_training.json"
# Why the last training process failed.
FAILURE = "failure.json"
# The settings of the newest start, and those of earlier ones that had others.
CONFIG_FILE = "config.txt"
EARLIER_CONFIG = re.compile(r"config\.(\d{4,})\.txt")
# The sharding report as data.
SHARDING_REPORT = "sharding_report.json"
# The page that shows the run.
PAGE = "run.html"
# The page that compares it with other runs.
COMPARISON = "compare.html"
