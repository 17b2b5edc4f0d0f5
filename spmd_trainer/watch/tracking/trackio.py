"""The tracker for Hugging Face's trackio. Needs the package trackio, which the extra `trackio` installs.

Runs go to local files in trackio's directory (TRACKIO_DIR, by default in Hugging Face's cache), which `trackio show`
displays, or to the server of TRACKIO_SPACE_ID or TRACKIO_SERVER_URL.
"""

from __future__ import annotations

import builtins
import threading
import uuid
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from absl import logging
from etils import epath

from spmd_trainer.callbacks import Status
from spmd_trainer.watch.tracking.base import RunFacts
from spmd_trainer.watch.tracking.wandb import LikeWandb

if TYPE_CHECKING:
    import trackio


class TrackioTracker(LikeWandb):
    """Sends a run to trackio, which identifies a run by its project and its name."""

    def open(self, facts: RunFacts) -> str:
        import trackio
        import trackio.run
        import trackio.utils

        self.library = trackio
        for module in (trackio, trackio.run, trackio.utils):
            _send_prints_to_log(module)
        self._run: trackio.Run = trackio.init(
            project=facts.project,
            name=facts.resume_id or _free_name(trackio, facts),
            resume="allow" if facts.resume_id else "never",
            config={"experiment": facts.experiment, "tags": list(facts.tags), **facts.settings},
            embed=False,
        )
        self.where = (
            f"run {self._run.name} of project {facts.project}; to see it: trackio show --project {facts.project}"
        )
        return str(self._run.name)

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(dict(values), step=step)

    def page(self, path: epath.Path) -> None:
        self._run.log({"page": self.library.Html(path.read_text())})

    def close(self, status: Status) -> None:
        """Records the run's status as an alert, and waits until everything is written."""
        levels = self.library.AlertLevel
        self._run.alert(title=f"run {status}", level=levels.ERROR if status == "failed" else levels.INFO)
        self._run.finish()  # type: ignore[no-untyped-call]


def _free_name(trackio: ModuleType, facts: RunFacts) -> str:
    """Returns the run's name, with a random suffix if the project already has a run with this name."""
    try:
        taken = {run.name for run in trackio.Api().runs(facts.project)}
    except ValueError:  # there is no such project yet
        return facts.name
    return facts.name if facts.name not in taken else f"{facts.name}-{uuid.uuid4().hex[:8]}"


def _send_prints_to_log(module: ModuleType) -> None:
    """Redirects a module's prints on this thread from the trainer's terminal to debug lines in the log."""
    own = threading.get_ident()

    def print_elsewhere(*values: object, **options: Any) -> None:
        if threading.get_ident() == own:
            logging.debug("%s", " ".join(map(str, values)))
        else:
            builtins.print(*values, **options)  # noqa: T201

    vars(module)["print"] = print_elsewhere
