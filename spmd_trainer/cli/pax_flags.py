"""Pax's flags. Each has the same effect as in Pax, or is accepted with a warning about its replacement, or is refused.

`FLAGS` lists the flags that the trainer does not have itself; `tests/cli/test_pax_flags.py` checks that no flag of paxml 1.4.0 is
missing.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from typing import Any

from absl import flags, logging

from spmd_trainer.errors import UserError, did_you_mean

_NO_TUNING = "--mode=sweep runs the trials of search(): --sweep_trials=N says how many, --trial=N runs one of them"
_OTHER_FIDDLE = (
    "give a registered experiment with --exp=NAME, and change it with --fdl.NAME=VALUE or --fdl.set=PATH=VALUE"
)
# Modes of Pax that are not modes here.
MODES = {
    name: f"--mode={name}: there is no tf.data service here; every process of a training job reads its own share of the data"
    for name in ("tf_data_service_dispatcher", "tf_data_service_worker")
}
_MULTI_PROCESS = {"server_addr": "coordinator_address", "num_hosts": "num_processes", "host_idx": "process_id"}


@dataclasses.dataclass(frozen=True)
class PaxFlag:
    """A flag of Pax.

    Attributes:
      name: the flag's name.
      kind: type of the value: bool, int, str, or list for a text that may be given several times.
      silent: values that are accepted without a warning, because they request what the trainer does anyway.
      instead: clause of the message about the flag. It says what happens instead of the flag's effect or, if the flag is
        refused, what to use instead. '' if the flag has the same effect as in Pax.
      refused: True if the flag gives an error, because ignoring it would give different results.
    """

    name: str
    kind: type
    instead: str = ""
    silent: tuple[Any, ...] = ()
    refused: bool = False


FLAGS = (
    PaxFlag("fdl_config", str),
    PaxFlag("fdl", list),
    PaxFlag("fdl_set", list),
    PaxFlag("multiprocess_gpu", bool),
    PaxFlag("server_addr", str),
    PaxFlag("num_hosts", int),
    PaxFlag("host_idx", int),
    PaxFlag("tfds_data_dir", str),
    PaxFlag("globally_use_hardware_rng", bool),
    PaxFlag("jax_traceback_filtering_option", str),
    PaxFlag(
        "jax_fully_async_checkpoint",
        bool,
        "checkpoints are always written in the background; a job of several processes is started with --distributed=auto or "
        "--coordinator_address",
    ),
    PaxFlag("maybe_use_persistence_checkpointing", bool, "checkpoints have one format, that of Orbax", (False,)),
    PaxFlag("tensorstore_use_ocdbt", bool, "checkpoints are always written in the format OCDBT", (True,)),
    PaxFlag("pmap_use_tensorstore", bool, "checkpoints are always written with TensorStore", (True,)),
    PaxFlag("enforce_restore_shape_check", bool, "shapes are always checked when a checkpoint is restored", (True,)),
    PaxFlag("async_timeout_secs", int, "a save has no time limit; --watchdog_seconds reports one that takes long"),
    PaxFlag(
        "checkpoint_todelete_subdir",
        str,
        "checkpoints beyond task.train.save_max_to_keep are deleted, not renamed",
        ("",),
    ),
    PaxFlag("decode_output_pickle", bool, "decoded examples are written as .jsonl only", (False,)),
    PaxFlag("enable_summary_writer", bool, "summaries are always written to JOB_LOG_DIR/summaries", (True,)),
    PaxFlag("eval_during_decode", bool, "decoding does not evaluate; run --mode=eval as a job of its own", (False,)),
    PaxFlag(
        "enable_auto_sharding",
        bool,
        "the split mappings of the layers and task.train.sharding_strategy decide where variables live",
        (False,),
    ),
    PaxFlag("study", str, _NO_TUNING, refused=True),
    PaxFlag("controller_mode", str, _NO_TUNING, ("auto",), refused=True),
    PaxFlag("tuner_group", str, _NO_TUNING, refused=True),
    PaxFlag("metrics_from", str, _NO_TUNING, ("eval",), refused=True),
    PaxFlag("num_trials", int, _NO_TUNING, refused=True),
    PaxFlag("pythia_port", int, _NO_TUNING, refused=True),
    PaxFlag("fdl_config_file", str, _OTHER_FIDDLE, refused=True),
    PaxFlag("fiddler", list, _OTHER_FIDDLE, refused=True),
    PaxFlag("fdl_tags_set", list, _OTHER_FIDDLE, refused=True),
)


def define() -> flags.FlagValues:
    """Returns absl flags for all `FLAGS`, and the flag `jax_arguments`, which lists the JAX flags on the command line."""
    values = flags.FlagValues()
    # Fiddle and praxis define some of these names too, in absl's global flags.
    common: dict[str, Any] = {"flag_values": values, "allow_override": True}
    for flag in FLAGS:
        text = f"Flag of Pax. {flag.instead}".strip()
        if flag.kind is list:
            flags.DEFINE_multi_string(flag.name, [], text, **common)
        else:
            by_kind: dict[type, Any] = {bool: flags.DEFINE_bool, int: flags.DEFINE_integer, str: flags.DEFINE_string}
            by_kind[flag.kind](flag.name, None, text, **common)
    flags.DEFINE_multi_string("jax_arguments", [], "JAX's own flags.", **common)
    return values


def without_dotted(arguments: Iterable[str], known: Iterable[str]) -> tuple[list[str], list[str]]:
    """Rewrites --fdl.NAME=VALUE as --fdl.set=NAME=VALUE, and separates JAX's flags from the other arguments.

    Args:
      arguments: the command line's arguments.
      known: names of the trainer's and Pax's flags, which stay as they are.

    Returns:
      (the other arguments, the --jax_* arguments that are not in `known`).
    """
    known, rest = set(known), list(arguments)
    own: list[str] = []
    of_jax: list[str] = []
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            return [*own, argument, *rest], of_jax
        dashes = argument[: len(argument) - len(argument.lstrip("-"))]
        name, equals, value = argument.removeprefix(dashes).partition("=")
        has_next = bool(rest) and not rest[0].startswith("-")
        if not dashes or name in known or name.removeprefix("no") in known:
            own.append(argument)
            if dashes and not equals and has_next:
                own.append(rest.pop(0))  # the flag's value, or an argument that absl refuses
        elif name.startswith("fdl."):
            path = name.removeprefix("fdl.")
            own.append(
                f"--fdl.set={path}={value if equals else rest.pop(0)}" if equals or rest else f"--fdl.set={path}"
            )
        elif name.removeprefix("no").startswith("jax_"):
            of_jax += [argument, *([rest.pop(0)] if not equals and has_next else [])]
        else:
            own.append(argument)
    return own, of_jax


def refuse_modes(arguments: Iterable[str]) -> None:
    """Raises UserError if the command line names a mode that only Pax has."""
    for argument in arguments:
        mode = argument.lstrip("-").removeprefix("mode=")
        if argument != mode and mode in MODES:
            raise UserError(MODES[mode])


def translate(given: flags.FlagValues, own: flags.FlagValues) -> None:
    """Copies the value of each given Pax flag to the trainer's flag with the same meaning.

    Raises:
      UserError: a flag is refused, or contradicts another flag.
    """
    for flag in FLAGS:
        if flag.refused and given[flag.name].present and given[flag.name].value not in flag.silent:
            raise UserError(f"--{flag.name} is a flag of Pax that is not supported: {flag.instead}")
    if own.mode == "decode_once" and own["restore_checkpoint_step"].present > 1:
        raise UserError("--restore_checkpoint_step is given more than once; run the command once for each step")
    for assignment in given.fdl_set:
        own["fdl.set"].parse(assignment)
    for directive in given.fdl:
        kind, _, value = directive.partition(":")
        if kind == "config" and not given.fdl_config:
            given["fdl_config"].value = value
        elif kind == "set":
            own["fdl.set"].parse(value)
        else:
            raise UserError(f"--fdl={directive}: {_OTHER_FIDDLE}")
    _set_same(own, "exp", given, "fdl_config")
    if own.exp and own.exp.startswith("paxml."):
        own["exp"].value = f"spmd_trainer.{own.exp.removeprefix('paxml.')}"
    for name, same in _MULTI_PROCESS.items():
        _set_same(own, same, given, name)
    if given.multiprocess_gpu and all(getattr(own, name) is None for name in ("distributed", *_MULTI_PROCESS.values())):
        own["distributed"].value = "auto"
    if given.globally_use_hardware_rng:
        given.jax_arguments.append("--jax_default_prng_impl=rbg")
    if given.jax_traceback_filtering_option:
        given.jax_arguments.append(f"--jax_traceback_filtering={given.jax_traceback_filtering_option}")


def _set_same(own: flags.FlagValues, name: str, given: flags.FlagValues, alias: str) -> None:
    """Sets the trainer's flag `name` to the value of Pax's flag `alias`, if given. Raises UserError if the two flags differ."""
    value, present = given[alias].value, getattr(own, name)
    if value is None:
        return
    if present not in (None, value):
        raise UserError(f"--{name}={present} and --{alias}={value} mean the same setting; give one of them")
    own[name].parse(str(value))


def take_effect(given: flags.FlagValues, known: Sequence[str]) -> None:
    """Applies Pax's and JAX's flags to the environment and `jax.config`, and logs a warning for each Pax flag without effect.

    Uses no device.

    Args:
      given: the flags that `define` returned, parsed.
      known: names of all defined flags, for the message about an unknown flag.

    Raises:
      UserError: JAX does not have a flag, or does not accept its value.
    """
    for flag in FLAGS:
        if flag.instead and not flag.refused and given[flag.name].present and given[flag.name].value not in flag.silent:
            logging.warning("--%s=%s is a flag of Pax: %s", flag.name, given[flag.name].value, flag.instead)
    if given.tfds_data_dir:
        os.environ["TFDS_DATA_DIR"] = given.tfds_data_dir  # read by TFDS, and by seqio through it
    if given.jax_arguments:
        _set_in_jax(given.jax_arguments, known)


def _set_in_jax(arguments: Sequence[str], known: Sequence[str]) -> None:
    """Sets options of `jax.config` from flags such as --jax_log_compiles, as `jax.config.config_with_absl` would."""
    import jax

    config: Any = jax.config
    values = flags.FlagValues()
    define: dict[Any, Any] = {
        bool: flags.DEFINE_bool,
        int: flags.DEFINE_integer,
        float: flags.DEFINE_float,
        str: flags.DEFINE_string,
        "enum": flags.DEFINE_enum,
        "enum_class": flags.DEFINE_enum_class,
    }
    for name, (kind, args, kwargs) in config.meta.items():
        define[kind](name, config.values[name], *args, **kwargs, flag_values=values)
    try:
        values(["", *arguments])
    except flags.UnrecognizedFlagError as error:
        near = did_you_mean(error.flagname, [*known, *config.meta], prefix="--")
        raise UserError(f"unknown flag --{error.flagname}{near}") from error
    except flags.Error as error:
        raise UserError(str(error)) from error
    for name in config.meta:
        if values[name].present:
            try:
                config.update(name, values[name].value)
            except (ValueError, TypeError, RuntimeError) as error:
                raise UserError(f"--{name}={values[name].value}: {error}") from error
