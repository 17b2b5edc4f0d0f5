"""Refuses a job whose processes were started with different settings: the result would match neither of them."""

from __future__ import annotations

import base64
import hashlib
import inspect
import pathlib
import platform
import re
import zlib
from collections.abc import Iterator, Mapping

import jax

from spmd_trainer.errors import UserError
from spmd_trainer.errors.installation import installed_version
from spmd_trainer.models.config_lines import without_addresses
from spmd_trainer.multihost import gather, joined
from spmd_trainer.training.run_config import RunConfig

_PACKAGES = ("spmd-trainer", "jax", "jaxlib", "praxis", "flax", "optax", "orbax-checkpoint", "numpy", "fiddle")
# Options of JAX that change a step's numbers or its program.
JAX_OPTIONS = ("jax_enable_x64", "jax_default_prng_impl", "jax_default_matmul_precision", "jax_threefry_partitionable")
# Each process has its own share of the data.
_OF_ONE_PROCESS = re.compile(r"\.(infeed_host_index|num_infeed_hosts): ")


def check_same_settings(config: RunConfig) -> None:
    """Makes sure that all processes of the job have the same settings, versions and experiment code. Touches no device.

    Called by every process once it has joined the job.

    Raises:
      UserError: they differ; names the process and the first difference.
    """
    if joined()[0] == 1:
        return
    lines = list(_settings(config))
    text = "\n".join(lines)
    hashes = gather("settings hash", hashlib.sha256(text.encode()).hexdigest())
    if len(set(hashes)) == 1:
        return
    texts = gather("settings", base64.b64encode(zlib.compress(text.encode())).decode())
    other = next(index for index, digest in enumerate(hashes) if digest != hashes[0])
    first, second = (_parse(zlib.decompress(base64.b64decode(texts[index])).decode()) for index in (0, other))
    raise UserError(
        f"process {other} was started with other settings than process 0: {_difference(first, second)}. Start all processes "
        "with the same command, code and packages"
    )


def _settings(config: RunConfig) -> Iterator[str]:
    """Yields 'name: value' lines of everything that all processes must share."""
    experiment = config.experiment
    yield f"--exp: {experiment.name}"
    yield f"--mode: {config.mode}"
    yield from config.compared_lines()
    for name in JAX_OPTIONS:
        yield f"--{name}: {jax.config.values[name]}"
    for line in experiment.lines():
        if not _OF_ONE_PROCESS.search(line):
            yield without_addresses(line).replace("\n", " ")
    yield f"version of Python: {platform.python_version()}"
    for package in _PACKAGES:
        yield f"version of {package}: {installed_version(package)}"
    for cls in type(experiment.experiment).__mro__:
        file = _source(cls)
        if file is not None:
            yield f"code of {cls.__module__}: crc32 {zlib.crc32(file.read_bytes()):08x}"


def _source(cls: type) -> pathlib.Path | None:
    """Returns the file that defines a class; None for builtins and a notebook's own classes."""
    try:
        file = inspect.getsourcefile(cls)
    except TypeError:
        return None
    return pathlib.Path(file) if file is not None and pathlib.Path(file).is_file() else None


def _parse(text: str) -> dict[str, str]:
    return dict(line.partition(": ")[::2] for line in text.splitlines())


def _difference(first: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Returns the first difference as a clause."""
    name = next(name for name in [*first, *other] if first.get(name) != other.get(name))
    return f"{name} is {other.get(name, 'absent')} there and {first.get(name, 'absent')} on process 0"
