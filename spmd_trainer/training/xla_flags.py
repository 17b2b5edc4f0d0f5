"""Passes an experiment's XLA flags (`BaseExperiment.XLA_FLAGS`) to the compiler of its train step."""

from __future__ import annotations

import contextlib
import mmap
import pathlib
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jaxlib
from absl import logging

from spmd_trainer.base_experiment import BaseExperiment
from spmd_trainer.errors import UserError, did_you_mean

Options: TypeAlias = Mapping[str, bool | int | float | str]

# {prefix of a flag's name: the kind of device that the flag is for}
_PLATFORMS = {"xla_cpu_": "cpu", "xla_gpu_": "gpu", "xla_tpu_": "tpu"}
_UNKNOWN = re.compile(r"No such compile option: '(\w+)'")
# A field in the binary description of a protocol buffer message: tag, length of the name, name.
_FIELD = re.compile(rb"\n([\x05-\x7f])(xla_\w+)")
_INVALID = re.compile(r"While setting option (\w+), (.*)")


def flags_for(experiment: BaseExperiment, device: jax.Device) -> dict[str, Any]:
    """Returns the experiment's flags for a device. Flags for other kinds of devices are left out, and logged.

    Args:
      device: a device of the mesh; its platform is 'cpu', 'tpu', or for GPUs 'gpu' or 'cuda'.

    Raises:
      UserError: a name doesn't begin with 'xla_', or a value is not a bool, number or string.
    """
    flags, others = {}, []
    for name, value in experiment.XLA_FLAGS.items():
        _check(name, value)
        if is_for(name, device):
            flags[name] = value
        else:
            others.append(name)
    if others:
        logging.info("XLA flags of other devices, not used: %s", ", ".join(others))
    return flags


def is_for(name: str, device: jax.Device) -> bool:
    """Returns False if an XLA flag is for a different kind of device, e.g. `xla_tpu_...` if `device` is a GPU."""
    platform = device.platform if device.platform in ("cpu", "tpu") else "gpu"
    return next((of for start, of in _PLATFORMS.items() if name.startswith(start)), platform) == platform


def _check(name: object, value: object) -> None:
    """Checks the name and the value of an XLA flag.

    Raises:
      UserError: the name doesn't begin with 'xla_', or the value is not a bool, number or string.
    """
    if not isinstance(name, str) or not re.fullmatch(r"xla_\w+", name):
        near = re.sub(r"\W", "_", str(name).lstrip("-"))
        near = near if near.startswith("xla_") else f"xla_{near}"
        raise UserError(f"XLA_FLAGS has {name!r}; names begin with 'xla_', without dashes, e.g. {near!r}")
    if not isinstance(value, bool | int | float | str):
        raise UserError(f"XLA_FLAGS[{name!r}] is {value!r}; set it to a bool, a number or a string")


def read(where: str, given: str | Options) -> Options:
    """Parses XLA options that are written as in XLA_FLAGS, '--xla_a=true --xla_b=2'. The dashes are optional.

    Args:
      where: the command-line flag that the options are from, for messages.
      given: the options, separated by spaces or commas. A name without a value means true. A mapping is returned unchanged.

    Raises:
      UserError: an item is not an option, an option has two values, or there is no option.
    """
    if not isinstance(given, str):
        return given
    options: dict[str, bool | int | float | str] = {}
    # Only a comma before an option's name separates options; other commas belong to a value.
    for item in re.sub(r",(?=\s*-*xla_)", " ", given).split():
        name, _, value = item.lstrip("-").partition("=")
        if not re.fullmatch(r"xla_\w+", name):
            raise UserError(f"{where}: {item!r} is no XLA option; write NAME=VALUE, e.g. xla_cpu_enable_fast_math=true")
        parsed = _value(value or "true")
        if value_text(options.setdefault(name, parsed)) != value_text(parsed):
            raise UserError(f"{where}: {name} has two values, {options[name]} and {parsed}; give one")
    if not options:
        raise UserError(f"{where} is empty; write NAME=VALUE, e.g. xla_cpu_enable_fast_math=true")
    return options


def _value(text: str) -> bool | int | float | str:
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def value_text(value: bool | int | float | str) -> str:
    """Returns a value as XLA writes it, e.g. 'true' or '3'."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def compile_with(
    lowered: jax.stages.Lowered, flags: Mapping[str, Any], experiment: str, where: str = "XLA_FLAGS"
) -> jax.stages.Compiled:
    """Compiles a lowered program with XLA flags.

    Args:
      flags: {name without '--': value}.
      experiment: the experiment's name, for messages.
      where: the setting that the flags are from, for messages.

    Raises:
      UserError: the installed XLA doesn't know a flag, or refuses its value.
    """
    try:
        return lowered.compile(compiler_options=dict(flags) or None)
    except jax.errors.JaxRuntimeError as error:
        if (unknown := _UNKNOWN.search(str(error))) and (name := unknown[1]) in flags:
            start = next((start for start in _PLATFORMS if name.startswith(start)), "xla_")
            raise UserError(
                f"{experiment}: {where} has {name!r}, which the installed XLA (jaxlib {jaxlib.__version__}) doesn't know"
                f"{did_you_mean(name, _known(start), otherwise='')}"
            ) from error
        if (invalid := _INVALID.search(str(error))) and invalid[1] in flags:
            raise UserError(f"{experiment}: {where}[{invalid[1]!r}]: {invalid[2]}") from error
        raise


def _known(start: str) -> list[str]:
    """Returns the names of the installed XLA's flags that begin with `start`.

    Flags are the fields of the protocol buffer message DebugOptions, whose description is in jaxlib's shared libraries. They
    include the flags for CPUs, for GPUs and for all platforms. libtpu's flags are listed nowhere.
    """
    names = set()
    for library in pathlib.Path(jaxlib.__file__).parent.glob("*.so"):
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            fields = (m for m in _FIELD.finditer(content) if m[1][0] == len(m[2]))
            names |= {m[2].decode() for m in fields}
    return sorted(name for name in names if name.startswith(start))
