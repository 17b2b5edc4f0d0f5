"""The lines of a resolved config that say which model there is, whatever machine it runs on."""

from __future__ import annotations

import re
from collections.abc import Iterable

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# The devices that a job runs on change no result.
_DEVICES = re.compile(r"\.(ici_mesh_shape|dcn_mesh_shape|mesh_axis_names|contiguous_submeshes|infeed_host_index): ")


def without_addresses(text: str) -> str:
    """Removes memory addresses from the text of a setting."""
    return _ADDRESS.sub("", text)


def lines_of(lines: Iterable[str], beginnings: tuple[str, ...]) -> list[str]:
    """Returns the lines that begin with one of `beginnings`, without those and parts of those that depend on the machine.

    Args:
      lines: lines of a config, 'task.model.name: value'.
      beginnings: e.g. ('task.model', 'task.lora').
    """
    return [without_addresses(line) for line in lines if line.startswith(beginnings) and not _DEVICES.search(line)]
