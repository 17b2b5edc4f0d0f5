"""What the command line shows of the log: the trainer's own lines, libraries' warnings once each."""

import subprocess
import sys

PROGRAM = """
import logging, sys
from absl import flags, logging as absl_logging
from spmd_trainer.cli import log_lines
log_lines.install()
flags.FLAGS(["program"])

def say(path, level, text):
    absl_logging.get_absl_handler().handle(logging.LogRecord("absl", level, path, 1, text, (), None))

library, own = "/x/site-packages/praxis/optimizers.py", log_lines.__file__
say(library, logging.INFO, "how I work")
for _ in range(3):
    say(library, logging.WARNING, "soon gone")
say(library, logging.WARNING, "another")
for _ in range(2):
    say(library, logging.ERROR, "broken")
for _ in range(2):
    say(own, logging.INFO, "step")
"""


def test_own_lines_and_errors_all_and_warnings_of_libraries_once():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    lines = [line.split(" ", 1)[1] for line in done.stderr.splitlines()]
    assert lines == ["WARNING: soon gone", "WARNING: another", "ERROR: broken", "ERROR: broken", "step", "step"]
