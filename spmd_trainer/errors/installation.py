"""Packages that no resolver can install together with a current JAX, and the command that installs them.

praxis 1.4.0 and lingvo 0.14.2 pin old versions of JAX and TensorFlow. So the trainer does not declare the two as dependencies. It
declares the packages that their modules import, and `install_command` installs the two without their dependencies.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import pathlib
import shlex
import sys
from collections.abc import Iterable
from typing import Any

from spmd_trainer.errors import UserError

# The installed version of the trainer.
__version__ = importlib.metadata.version("spmd-trainer")
# Distribution (and import) name -> version.
UNRESOLVABLE = {"praxis": "1.4.0", "lingvo": "0.14.2"}
# Libraries that a compiled program and its estimate depend on.
_LIBRARIES = (
    "spmd-trainer",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "praxis",
    "libtpu",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-cuda-nvcc-cu12",
    "nvidia-cuda-nvcc",  # of CUDA 13
    *(f"jax-cuda{cuda}-pjrt" for cuda in (12, 13)),
)


def installed_version(distribution: str) -> str | None:
    """Returns a distribution's version; None if it is not installed, even if a source tree of it is on the path."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def library_versions() -> dict[str, str]:
    """Returns the versions of the libraries that a compiled program depends on, without those that aren't installed."""
    return {name: version for name in _LIBRARIES if (version := installed_version(name))}


def pip_install() -> str:
    """Returns the shell command that installs packages into the running Python environment. Append the packages' names."""
    python = shlex.quote(sys.executable)
    # Environments made by uv have no pip.
    return f"{python} -m pip install" if importlib.util.find_spec("pip") else f"uv pip install --python {python}"


def imported(module: str, message: str) -> Any:
    """Imports and returns an optional module. Raises UserError with `message`, which says how to install it, if that fails."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(message) from error


def install_extra(extra: str) -> str:
    """Returns the shell command that installs an extra (optional dependencies) of the trainer into the running environment."""
    checkout = pathlib.Path(__file__).parents[2]
    if (checkout / "pyproject.toml").exists():
        return f"uv sync --extra {extra}"
    return f"{pip_install()} {shlex.quote(f'spmd-trainer[{extra}]')}"


def install_command(packages: Iterable[str] = ("praxis", "lingvo")) -> str:
    """Returns the shell command that installs packages into the running environment without their dependencies.

    Args:
      packages: names among `UNRESOLVABLE`.
    """
    return f"{pip_install()} --no-deps {' '.join(f'{name}=={UNRESOLVABLE[name]}' for name in packages)}"


def missing_packages_text(packages: Iterable[str]) -> str:
    names = " and ".join(packages)
    return (
        f"{names} is not installed. Its own pins are too old for this JAX, so it is installed by a command of its own: "
        f"{install_command()}"
    )
