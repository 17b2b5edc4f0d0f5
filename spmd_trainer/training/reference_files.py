"""Where a run keeps the log-probabilities of answers by the reference model, and how inputs get them.

`reference_logps` computes them when a run begins. `attach` gives them to each input that is built later, in this start of the run
or another.

In the job_log_dir, `reference_logps/NAME_CHECKSUM/part_N.json` holds the values of the pairs from N on, NaN for one that the
input leaves out. CHECKSUM is that of the files and of what makes their tokens, so that other pairs have other files. Each part
names the model that it was computed with. A start of the run that was killed continues after the last whole part.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from etils import epath

from spmd_trainer import multihost
from spmd_trainer.checkpointing.agreement import decided_by_process_0
from spmd_trainer.errors import UserError
from spmd_trainer.inputs.preferences import PreferenceInput
from spmd_trainer.storage import json_values
from spmd_trainer.storage.files import write_atomically

DIRECTORY = "reference_logps"
_PART = re.compile(r"part_(\d+)\.json")


def attach(data: Any, job_log_dir: epath.Path) -> None:
    """Gives an input its reference log-probabilities, if it takes some and all of them are there.

    Called by every process. An input that lacks them refuses to give batches.

    Raises:
      UserError: the processes read different values.
    """
    if not isinstance(data, PreferenceInput) or data.reference is None:
        return
    found = ReferenceFiles(job_log_dir, data).values()
    checksum = None if found is None else zlib.crc32(found.tobytes())
    multihost.agree(f"the reference log-probabilities of {data.name}", checksum)
    if found is not None:
        data.use_reference(found)


def attach_zeros(data: Any) -> Any:
    """Sets an input's missing log-probabilities of the reference to 0, where they don't matter: to show or to verify batches."""
    if isinstance(data, PreferenceInput) and data.lacks_reference:
        data.use_reference(np.zeros((data.num_pairs, 2), np.float32))
    return data


class ReferenceFiles:
    """The files of a dataset of pairs.

    Attributes:
      directory: where they are.
    """

    def __init__(self, job_log_dir: epath.Path, data: PreferenceInput, model: str | None = None):
        """Called by every process; process 0 reads the pairs' files.

        Args:
          model: identifies the model; None takes the values of any.
        """
        checksum = decided_by_process_0(lambda: data.pairs_checksum)
        self.directory = job_log_dir / DIRECTORY / f"{data.name}_{checksum[:16]}"
        self._num_pairs, self._model = data.num_pairs, model

    def values(self) -> np.ndarray | None:
        """Returns float32 [num_pairs, 2]; None if some are missing."""
        found = self._done()
        return found if len(found) == self._num_pairs else None

    def num_done(self) -> tuple[int, int]:
        """Returns how many pairs are done, from the first on, and how many of them are not left out."""
        found = self._done()
        return len(found), int(np.count_nonzero(~np.isnan(found[:, 0])))

    def _done(self) -> np.ndarray:
        return np.concatenate([np.zeros((0, 2), np.float32), *self._in_order()])

    def remove_of_other_models(self) -> int:
        """Removes files that were computed with another model; returns how many."""
        outdated = [path for _, path in self._paths() if _read(path)["model"] != self._model]
        for path in outdated:
            path.unlink()
        return len(outdated)

    def write(self, logps: np.ndarray, *, end: int) -> None:
        """Writes the values float32 [n, 2] of the pairs before `end`. Process 0 does."""
        if jax.process_index() or not len(logps):
            return
        record = {"model": self._model, "logps": logps.astype(np.float64).tolist()}
        write_atomically(self.directory / f"part_{end - len(logps):09}.json", [json.dumps(record)])

    def _in_order(self) -> Iterator[np.ndarray]:
        """Yields the values of the files, up to the first gap."""
        end = 0
        for first, path in self._paths():
            if first < end:  # left over from before a file was removed
                continue
            record = _read(path)
            if first > end or self._model not in (None, record["model"]):
                return
            part = np.asarray(record["logps"], np.float32).reshape(-1, 2)
            end += len(part)
            yield part

    def _paths(self) -> list[tuple[int, epath.Path]]:
        try:
            paths = list(self.directory.iterdir())
        except FileNotFoundError:
            return []
        return sorted((int(match[1]), path) for path in paths if (match := _PART.fullmatch(path.name)))


def _read(path: epath.Path) -> dict[str, Any]:
    try:
        record = json_values.parse_object(json_values.content_of(path), finite=False)
        return {"model": str(record["model"]), "logps": list(record["logps"])}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is damaged: {error}. If the run has no checkpoint yet, remove the file, and it is computed again"
        ) from error
