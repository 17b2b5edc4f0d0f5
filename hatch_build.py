"""Where files go in a wheel that do not lie there in the checkout."""

from __future__ import annotations

from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# At interpreter start, waits for praxis; see the module.
_BRIDGE = {name: name for name in ("spmd_trainer_bridge.pth", "spmd_trainer_bridge.py")}
# A user's own package may be called `experiments`: the shipped ones are installed inside spmd_trainer.
_EXPERIMENTS = {"experiments": "spmd_trainer/experiments"}


class WheelFiles(BuildHookInterface):
    """Adds the bridge and the experiments. An editable install reads the experiments where they are."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Called before a build; `version` is 'standard' or 'editable'."""
        if version == "editable":
            build_data["force_include_editable"] = {"spmd_trainer_bridge.pth": "spmd_trainer_bridge.pth"}
        else:
            build_data["force_include"] |= _BRIDGE | _EXPERIMENTS
