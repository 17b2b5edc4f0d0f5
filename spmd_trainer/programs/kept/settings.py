"""The settings that a train step is compiled from, by name. Two runs with the same ones may share a step."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import platform
import re
from collections.abc import Mapping

import fiddle as fdl
import jax
import numpy as np
from fiddle import daglish

from spmd_trainer.models.config_lines import without_addresses
from spmd_trainer.programs.plan_versions import library_versions
from spmd_trainer.programs.run_config import RunConfig
from spmd_trainer.sharding.messages import mesh_text

# Changes with the layout of what is kept.
FORMAT = "2"
# Options of JAX that no compiled program depends on.
_NOT_OF_PROGRAMS = ("jax_compilation_cache", "jax_persistent_cache", "jax_log", "jax_traceback")
# Variables that libraries read where Python doesn't see it.
_OF_LIBRARIES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE", "TF_XLA_FLAGS", "TF_CPP_VMODULE")
_SHOWN = 2


def settings_of(config: RunConfig) -> dict[str, str]:
    """Returns the settings of a run's train step by name. Touches the devices.

    Args:
      config: the run's.
    """
    devices = jax.devices()
    options = {name: str(value) for name, value in jax.config.values.items() if not name.startswith(_NOT_OF_PROGRAMS)}
    parts = {
        "format": FORMAT,
        "--exp": config.experiment.name,
        "--mesh": mesh_text(dict(config.mesh)) if config.mesh else "",
        "--num_minibatches": str(config.num_minibatches),
        "processes": f"{jax.process_index()} of {jax.process_count()}",
        "devices": ", ".join(map(_device, devices)),
        "backend": devices[0].client.platform_version,
        "processor": _processor() if devices[0].platform == "cpu" else "",
        "Python": platform.python_version(),
        **{f"version of {name}": version for name, version in library_versions().items()},
        **{name: os.environ.get(name, "") for name in _OF_LIBRARIES},
        **options,
        "arrays of the config": _arrays(config.experiment.config),
    }
    lines = (without_addresses(line).partition(": ") for line in config.experiment.lines())
    return parts | {name: value for name, _, value in lines}


def key_of(settings: Mapping[str, str]) -> str:
    """Returns a hash of all settings, 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def difference(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Returns what differs, as a clause that names the first settings."""
    names = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    shown = [
        f"{name} was {before.get(name, 'absent'):.80}, is {now.get(name, 'absent'):.80}" for name in names[:_SHOWN]
    ]
    more = f" and {len(names) - _SHOWN} more settings" if len(names) > _SHOWN else ""
    return "; ".join(shown) + more


def _device(device: jax.Device) -> str:
    return f"{device.id} {device.device_kind} {device.process_index} {getattr(device, 'coords', '')}"


def _processor() -> str:
    """Returns what a program for host devices is compiled for: the instruction sets of this machine's processor."""
    try:
        features = re.search(r"^(?:flags|Features)\s*:(.*)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:  # not Linux
        features = None
    known = hashlib.sha256(features[1].encode()).hexdigest()[:16] if features else platform.processor()
    return f"{platform.machine()} {known}"


def _arrays(config: fdl.Buildable[object]) -> str:
    """Returns a hash of the arrays in a config: its lines show only the beginning of large ones."""
    digest = hashlib.sha256()
    for value, path in daglish.iterate(config):
        if isinstance(value, np.ndarray | jax.Array):
            array = np.asarray(value)
            digest.update(f"{daglish.path_str(path)} {array.dtype} {array.shape} ".encode() + array.tobytes())
    return digest.hexdigest()[:16]
