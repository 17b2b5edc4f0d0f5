"""Log lines for people: the trainer's own progress, other libraries' warnings, nothing else."""

from __future__ import annotations

import logging as std_logging
import pathlib
import time

from absl import logging

_OWN = pathlib.Path(__file__).resolve().parents[2]


class _Format(std_logging.Formatter):
    def format(self, record: std_logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno <= std_logging.INFO else f"{record.levelname}: "
        text = super().format(record)
        return f"{clock} {level}{text}"


class _Wanted:
    """Libraries log how they work at INFO (optimizer names, missing backends): that is not this run's progress. And some warn
    of one thing again for each variable: once is enough. Errors, and whatever has a traceback, are all shown.
    """

    def __init__(self) -> None:
        self._warnings: set[tuple[str, int, str]] = set()

    def __call__(self, record: std_logging.LogRecord) -> bool:
        if "site-packages" not in record.pathname and pathlib.Path(record.pathname).is_relative_to(_OWN):
            return True
        if record.levelno != std_logging.WARNING or record.exc_info:
            return record.levelno > std_logging.INFO
        # Not the finished text: making it fails where a library's arguments don't fit, and that is the handler's to report.
        warning = record.pathname, record.lineno, f"{record.msg} {record.args}"
        is_new = warning not in self._warnings
        self._warnings.add(warning)
        return is_new


def install() -> None:
    """Makes absl's handler print 'HH:MM:SS message' to stderr."""
    logging.use_absl_handler()
    logging.set_verbosity(logging.INFO)
    handler = logging.get_absl_handler()
    handler.setFormatter(_Format())
    handler.addFilter(_Wanted())
