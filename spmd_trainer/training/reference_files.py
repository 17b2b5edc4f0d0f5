"""Stores the reference model's log-probabilities of answers in a run's directory, and adds them to inputs of preference pairs.

`reference_logps` computes them when a run begins. `attach` adds them to each input that is built later, also after a restart.

In the job_log_dir, `reference_logps/NAME_CHECKSUM/part_N.json` has the values of the pairs from pair N on, NaN for pairs that the
input leaves out. CHECKSUM covers the pairs' files and the settings that turn them into tokens, so different pairs have different
directories. Each part names the model that computed it. A run that was killed continues after the last complete part.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

import jax
import numpy as np
from etils import epath

from spmd_trainer import multihost
from spmd_trainer.checkpointing.agreement import decided_by_process_0
from spmd_trainer.errors import UserError
from spmd_trainer.inputs.indexed import CheckpointedInput
from spmd_trainer.storage import json_values
from spmd_trainer.storage.files import write_atomically

if TYPE_CHECKING:  # reads conversations and corpora
    from spmd_trainer.inputs.preferences import PreferenceInput

DIRECTORY = "reference_logps"
_PART = re.compile(r"part_(\d+)\.json")


def attach(data: Any, job_log_dir: epath.Path) -> None:
    """Adds reference log-probabilities to an input, if the input needs them and their files are complete.

    Called by every process. An input that lacks the log-probabilities it needs refuses to return batches.

    Raises:
      UserError: the processes read different values.
    """
    if not _lacks_reference(data):
        return
    found = ReferenceFiles(job_log_dir, data).values()
    checksum = None if found is None else zlib.crc32(found.tobytes())
    multihost.agree(f"the reference log-probabilities of {data.name}", checksum)
    if found is not None:
        data.use_reference(found)


def attach_zeros(data: Any) -> Any:
    """Sets an input's missing reference log-probabilities to 0, for modes that only show or verify batches; returns the input."""
    if _lacks_reference(data):
        data.use_reference(np.zeros((data.num_pairs, 2), np.float32))
    return data


def takes_reference(cls: Any) -> bool:
    """Returns True for classes of inputs of preference pairs; False for other classes, and for functions in a config."""
    return isinstance(cls, type) and issubclass(cls, CheckpointedInput) and cls.takes_reference


def _lacks_reference(data: Any) -> TypeGuard[PreferenceInput]:
    return takes_reference(type(data)) and data.lacks_reference


class ReferenceFiles:
    """The files with the reference log-probabilities of a dataset of preference pairs.

    Attributes:
      directory: the directory with the files, which may not exist yet.
    """

    def __init__(self, job_log_dir: epath.Path, data: PreferenceInput, model: str | None = None):
        """Derives the directory from the checksum of the pairs; process 0 reads the pairs' files. Called by every process.

        Args:
          model: identifies the reference model; None accepts the values of any model.
        """
        checksum = decided_by_process_0(lambda: data.pairs_checksum)
        self.directory = job_log_dir / DIRECTORY / f"{data.name}_{checksum[:16]}"
        self._num_pairs, self._model = data.num_pairs, model

    def values(self) -> np.ndarray | None:
        """Returns the log-probabilities, float32 [pairs, 2] (chosen, rejected); None if some are missing."""
        found = self._done()
        return found if len(found) == self._num_pairs else None

    def num_done(self) -> tuple[int, int]:
        """Returns how many pairs, counted from pair 0, have stored values, and how many of these pairs have no NaN."""
        found = self._done()
        return len(found), int(np.count_nonzero(~np.isnan(found[:, 0])))

    def _done(self) -> np.ndarray:
        return np.concatenate([np.zeros((0, 2), np.float32), *self._in_order()])

    def remove_of_other_models(self) -> int:
        """Removes the files whose values a different reference model computed; returns the number of these files."""
        outdated = [path for _, path in self._paths() if _read(path)["model"] != self._model]
        for path in outdated:
            path.unlink()
        return len(outdated)

    def write(self, logps: np.ndarray, *, end: int) -> None:
        """Writes `logps`, float32 [pairs, 2 (chosen, rejected)], for the pairs just before index `end`. Only process 0 writes."""
        if jax.process_index() or not len(logps):
            return
        record = {"model": self._model, "logps": logps.astype(np.float64).tolist()}
        write_atomically(self.directory / f"part_{end - len(logps):09}.json", [json.dumps(record)])

    def _in_order(self) -> Iterator[np.ndarray]:
        """Yields each file's log-probabilities, float32 [pairs, 2 (chosen, rejected)].

        Stops at the first missing pair, or at the first file that a different model wrote.
        """
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
