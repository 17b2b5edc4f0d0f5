"""Refuses a job whose processes were started with different settings or code."""

from __future__ import annotations

import ast
import functools
import os
import pathlib
import platform
import re
import sys
import sysconfig
import zlib
from collections.abc import Iterator

import jax

from spmd_trainer.errors import UserError
from spmd_trainer.errors.installation import installed_version
from spmd_trainer.models.config_lines import without_addresses
from spmd_trainer.multihost import broadcast, gather, joined
from spmd_trainer.training.run_config import RunConfig

_TRAINER = pathlib.Path(__file__).parents[1]
_PACKAGES = ("spmd-trainer", "jax", "jaxlib", "praxis", "flax", "optax", "orbax-checkpoint", "numpy", "fiddle")
# Options of JAX that change a step's numbers or its program.
JAX_OPTIONS = ("jax_enable_x64", "jax_default_prng_impl", "jax_default_matmul_precision", "jax_threefry_partitionable")
# Each process has its own share of the data.
_OF_ONE_PROCESS = re.compile(r"\.(infeed_host_index|num_infeed_hosts): ")
# Flags of XLA that change no program.
_OF_ONE_HOST = re.compile(r"--xla_(dump_\w+|force_host_platform_device_count)\b")
_XLA_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]+")
# Environment variables that differ between the processes of a job because a launcher or a host sets them.
_OWN_VARIABLE = re.compile(
    r"SLURM_|OMPI_|PMI|PBS_|FLUX_|PALS_|MV2_|SGE_|JAX_|TPU_|CLOUD_TPU_|NCCL_|SSH_|WANDB_|XLA_FLAGS$|LIBTPU_INIT_ARGS$|POD_|HOST|PWD$"
    r"|.*(RANK|RANKID|PROCESS_ID|NODEID|TASKNUM|INDEX|VISIBLE_DEVICES|IFNAME|NODE_NAME)$"
    r"|(PATH|HOME|USER|LOGNAME|TMPDIR|SHELL|LANG|TERM|COLUMNS|LINES)$|LC_|SPMD_TRAINER_"
)
# The environment variable with the names of further such variables, separated by commas.
_OWN_VARIABLES = "SPMD_TRAINER_OWN_VARIABLES"


def check_same_settings(config: RunConfig) -> None:
    """Makes sure that all processes of the job have the same settings, versions and experiment code. Touches no device.

    Called by every process once it has joined the job.

    Raises:
      UserError: a process differs from process 0. The message names the process and its first difference.
    """
    if joined()[0] == 1:
        return
    own = dict(line.partition(": ")[::2] for line in _settings(config))
    first = broadcast(own, name="the settings")
    name = next((name for name in {**first, **own} if first.get(name) != own.get(name)), None)
    here, there = own.get(name or "", "absent"), first.get(name or "", "absent")
    _refuse_if_any(None if name is None else f"{name} is {here} there and {there} on process 0")
    check_same_code()


def check_same_code() -> None:
    """Makes sure that imported code, and the environment variables that the user's code names, are the same on all processes.

    Called by every process: at the start, and again after a step is traced, because the user's functions may import modules.
    A module is compared only between process 0 and processes that have imported it too. Touches no device.

    Raises:
      UserError: a module, or an environment variable that the user's code names, differs from process 0.
    """
    if joined()[0] == 1:
        return
    own = _code()
    first = broadcast(own, name="the code")
    _refuse_if_any(
        next((f"{name} differs" for name in sorted(own.keys() & first.keys()) if own[name] != first[name]), None)
    )


def _refuse_if_any(difference: str | None) -> None:
    """Raises UserError on all processes if one of them differs from process 0.

    Args:
      difference: how this process differs from process 0, for the message; None if it doesn't.
    """
    for process, found in enumerate(gather("differences from process 0", difference)):
        if found is not None:
            raise UserError(
                f"process {process} was started with other settings than process 0: {found}. Start all processes with the "
                "same command, code, packages and environment"
            )


def _code() -> dict[str, str]:
    """Returns checksums, by name, of the modules imported so far and of the environment variables that the user's code names."""
    checksums: dict[str, str] = {}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or not file.endswith(".py") or _is_library(file):
            continue
        checksum, variables = _of_file(file)
        checksums[f"the code of {name}"] = checksum
        for variable in variables.difference(os.environ.get(_OWN_VARIABLES, "").split(",")):
            value = os.environ.get(variable, "not set")
            # Paths may differ between hosts; the files that they name are compared elsewhere.
            checksums[f"the environment variable {variable}"] = (
                "a path" if os.sep in value else _checksum(value.encode())
            )
    return checksums


def _is_library(file: str) -> bool:
    """Returns True if a file belongs to Python or to an installed package, which are compared by version."""
    if "site-packages" in file or "dist-packages" in file:
        return not pathlib.Path(file).is_relative_to(_TRAINER)
    return file.startswith(tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")))


@functools.cache
def _of_file(file: str) -> tuple[str, frozenset[str]]:
    """Returns a file's checksum, and the environment variables that its code may read: its string constants in capitals."""
    try:
        source = pathlib.Path(file).read_bytes()
        if pathlib.Path(file).is_relative_to(_TRAINER):
            return _checksum(source), frozenset()
        nodes = list(ast.walk(ast.parse(source)))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return "", frozenset()
    quoted = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return _checksum(source), frozenset(
        name for name in quoted if _VARIABLE.fullmatch(name) and not _OWN_VARIABLE.match(name)
    )


def _checksum(text: bytes) -> str:
    return f"{zlib.crc32(text):08x}"


def _settings(config: RunConfig) -> Iterator[str]:
    """Yields 'name: value' lines for everything that must be the same on all processes."""
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
    for name in _XLA_VARIABLES:
        yield f"{name}: {' '.join(flag for flag in os.environ.get(name, '').split() if not _OF_ONE_HOST.match(flag))}"
