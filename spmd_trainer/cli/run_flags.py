"""Defines the flags of the command line from the settings of all modes, and builds a mode's settings from the flags."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from absl import flags, logging

from spmd_trainer.cli.modes import MODES
from spmd_trainer.errors import UserError
from spmd_trainer.settings import Setting, Settings, setting, settings_of
from spmd_trainer.training.mode_configs import PageConfig
from spmd_trainer.training.run_config import RunConfig, TrainConfig, config_class, make_run_config

if TYPE_CHECKING:
    from etils import epath

# Matches an override whose value has a quoted text, a folder or a file suffix.
_MAY_BE_PATH = re.compile(r"=.*(['\"/]|\.[A-Za-z])")

_what = functools.partial(setting, group="What to run")
_information = functools.partial(setting, group="Information")
_processes = functools.partial(setting, group="Several processes")


@dataclasses.dataclass(frozen=True)
class CommandFlags:
    """Flags of the command line that are not settings of a mode. The Python API has function arguments instead."""

    exp: str | None = _what(
        None,
        "Name of a registered experiment, e.g. lm.stdlib.StdlibBytes; --list shows all. Without it, that of the run in "
        "--job_log_dir, with its overrides and flags.",
        value="NAME",
    )
    mode: str = _what("train", "What to do; see the modes above.", value="MODE", choices=tuple(MODES))
    exp_module: tuple[str, ...] = _what(
        (),
        "Also import this module or package of experiments, so that --list and short names find them. May be repeated.",
        value="MODULE",
    )
    overrides: tuple[str, ...] = _what(
        (),
        "Override one field of the experiment's config, e.g. --fdl.set='task.train.num_train_steps=200', or a class attribute, "
        "e.g. --fdl.set=NUM_LAYERS=3. The value is a Python literal. Paths start with task, train_datasets[i], eval_datasets[i] "
        "or decode_datasets[i]; --dump prints all paths. --fdl.PATH=VALUE means the same. May be repeated.",
        flag="fdl.set",
        value="PATH=VALUE",
    )
    list: bool = _information(False, "Print the registered experiments, one per line, and exit.")
    dump: bool = _information(False, "Print the resolved config, one 'path: value' per line, and exit.")
    doctor: bool = _information(
        False, "Check the installed versions and the devices; print the command that fixes each problem found."
    )


@dataclasses.dataclass(frozen=True)
class ProcessFlags:
    """Flags that say how the processes of a job find each other. A Python program uses `jax.distributed` instead."""

    distributed: str | None = _processes(
        None,
        "auto: Slurm, Open MPI, Kubernetes or Cloud TPU started the processes of this job, and JAX detects the coordinator's "
        "address, the number of processes and the id of this process.",
        value="auto",
        choices=("auto",),
    )
    coordinator_address: str | None = _processes(
        None,
        "Address where process 0 listens, e.g. 10.0.0.1:8476. For a job of several processes without --distributed=auto.",
        value="HOST:PORT",
    )
    coordinator_bind_address: str | None = _processes(
        None,
        "Address where process 0 listens, if it is not the one that the others reach it by, e.g. 0.0.0.0:8476.",
        value="HOST:PORT",
    )
    num_processes: int | None = _processes(
        None, "Number of processes in the job. Required with --coordinator_address.", value="N", at_least=1
    )
    process_id: int | None = _processes(
        None,
        "Id of this process, from 0 to num_processes - 1. Required with --coordinator_address.",
        value="N",
        at_least=0,
    )
    heartbeat_seconds: int = _processes(
        20,
        "If a process sends no heartbeat for this many seconds, the others treat it as lost and exit.",
        value="SECONDS",
        at_least=2,
    )


class _Parser(flags.ArgumentParser[Any]):
    """absl parser that parses and checks a flag's value as the flag's `Setting` requires."""

    syntactic_help = ""

    def __init__(self, about: Setting):
        self._about = about

    def parse(self, argument: Any) -> Any:
        if self._about.read is not None:
            return argument  # parsed later, when the settings are made from the flags
        if argument == "" and self._about.kind in (int, float) and self._about.default is None:
            return None  # an empty value counts as not given
        with contextlib.suppress(ValueError):
            # Accepts 0x20 and 0o40 too, as absl's own integer flags do.
            in_base = self._about.kind is int and str(argument)[:2].lower() in ("0x", "0o")
            argument = int(argument, 0) if in_base else self._about.kind(argument)
        if problem := self._about.problem(argument):
            raise ValueError(problem)
        return argument


def all_settings() -> Iterator[Setting]:
    """Yields every setting once, in the order of the help page."""
    return _once(CommandFlags, *(config_class(mode) for mode in MODES), ProcessFlags)


def mode_settings(mode: str) -> Iterator[Setting]:
    """Yields the settings that a mode uses, in the order of its help page."""
    return _once(CommandFlags, config_class(mode), *(cls for cls in _classes(mode) if cls is ProcessFlags))


def _once(*classes: type) -> Iterator[Setting]:
    seen: set[str] = set()
    for cls in classes:
        for about in settings_of(cls).values():
            if about.flag not in seen:
                seen.add(about.flag)
                yield about


def define() -> None:
    """Defines the flags of all settings. Called once, when this module is imported."""
    for about in all_settings():
        if about.kind is bool:
            flags.DEFINE_bool(about.flag, about.default, about.help)
        elif about.kind is tuple:
            flags.DEFINE_multi_string(about.flag, list(about.default), about.help)
        else:
            default = None if about.default == "" else about.default
            flags.DEFINE(_Parser(about), about.flag, default, about.help, serializer=flags.ArgumentSerializer())


def choose_mode(flag_values: flags.FlagValues) -> None:
    """Sets the mode to 'chat' if `--prompt` was given without `--mode`. `--prompt` exists only if `lm_eval/` is installed."""
    if "prompt" in flag_values and flag_values.prompt and not flag_values["mode"].present:
        flag_values["mode"].value = "chat"


def refuse_other_modes(flag_values: flags.FlagValues) -> None:
    own = {about.flag for cls in _classes(flag_values.mode) for about in settings_of(cls).values()}
    for about in all_settings():
        flag = flag_values[about.flag]
        # Compared by identity, because 0 == False, but --port=0 counts as given.
        is_given = flag.present and flag.value is not None and flag.value is not False and flag.value not in ([], "")
        if about.flag in own or about.carried or not is_given:
            continue
        modes = [mode for mode in MODES if about.flag in {s.flag for s in settings_of(config_class(mode)).values()}]
        listed = f"{', '.join(modes[:-1])} and {modes[-1]}" if len(modes) > 1 else modes[0]
        raise UserError("; ".join(filter(None, [f"--{about.flag} goes with --mode={listed}", about.instead])))


def _classes(mode: str) -> Sequence[type]:
    """Returns the settings classes whose flags a mode accepts. All but 'tokenise' and 'tokenizer' accept a run's flags."""
    # These modes look at a training run or its code. They accept and ignore the flags of the run's command.
    of_run = TrainConfig if mode in ("page", "port", "replay") else RunConfig
    own = config_class(mode)
    return (CommandFlags, own) if mode in ("tokenise", "tokenizer") else (CommandFlags, ProcessFlags, of_run, own)


def settings_from_flags(flag_values: flags.FlagValues, cls: type) -> dict[str, Any]:
    """Returns {field: value} for the fields of a settings class whose flags were given."""
    given = {}
    for name, about in settings_of(cls).items():
        flag = flag_values[about.flag]
        if flag.present and flag.value is not None and (flag.value != "" or about.empty):
            given[name] = flag.value
    return given


def config_without_experiment(flag_values: flags.FlagValues, arguments: Sequence[str]) -> Settings:
    """Returns the settings of a mode that takes no job (`Mode.alone`), from the flags and the command's arguments.

    For `--mode=page`, the value of `--job_log_dir` is put before the arguments.
    """
    make: Callable[..., Settings] = config_class(flag_values.mode)
    first = [flag_values.job_log_dir] if make is PageConfig and flag_values.job_log_dir else []
    return make([*first, *arguments], **settings_from_flags(flag_values, config_class(flag_values.mode)))


def run_config_from_flags(flag_values: flags.FlagValues, join: Callable[[str], int]) -> RunConfig:
    """Makes the run's config from the flags. Without `--exp`, what isn't given is taken from the run in the given directory.

    Args:
      flag_values: absl flags, parsed.
      join: connects the job's processes for a mode, and returns the number of processes. Called before any device is used.

    Raises:
      UserError: a flag is missing or can't be read, or settings of the experiment contradict each other.
    """
    mode = flag_values.mode
    settings = settings_from_flags(flag_values, config_class(mode))
    exp, overrides = flag_values.exp, list(flag_values["fdl.set"].value or ())
    if not exp:
        exp, overrides, settings = _with_those_of_the_run(flag_values, overrides, settings)
    directory = settings.pop("job_log_dir", None)
    if settings.get("topology"):
        from spmd_trainer.planner import topologies  # imports JAX, which --help doesn't need

        topologies.run_on_host()
    config = make_run_config(
        exp,
        directory or ".",
        mode=mode,
        overrides=overrides,
        join=lambda: join(mode),
        writes_reports=bool(directory),
        **settings,
    )
    if not (directory or flag_values.dump) and MODES[mode].has_run:
        raise UserError(
            "--job_log_dir=DIR is required: the directory for checkpoints, summaries and outputs of this run"
        )
    return config


def _with_those_of_the_run(
    flag_values: flags.FlagValues, overrides: Sequence[str], given: Mapping[str, Any]
) -> tuple[str, list[str], dict[str, Any]]:
    """Returns the experiment, overrides and settings of the run in the given directory, updated with those given now.

    A flag with an empty value takes the default, not the run's value. Modes other than training ignore the checkpoint that the
    run started from, and read the run's own checkpoints. With `--topology`, the run's mesh is ignored.

    Raises:
      UserError: neither `--job_log_dir` nor `--restore_checkpoint_dir` holds a run of this trainer that has begun to train, or
        the run's record can't be read.
    """
    from spmd_trainer import experiment_registry  # imports what --help doesn't need
    from spmd_trainer.training import experiment_config

    path, record = run_of_directories(given)
    of_run = record.get("settings") or {}
    kept = experiment_config.without_replaced(record["overrides"], overrides)
    own = settings_of(config_class(flag_values.mode))
    left = {"job_log_dir", *given}
    # A flag with an empty value isn't in `given`.
    left |= {name for name, about in own.items() if flag_values[about.flag].present}
    if flag_values.mode != "train":
        left |= {"restore_checkpoint_dir", "restore_checkpoint_step", "jax_profiler_port"}
    left |= {"restore_checkpoint_step"} if "restore_checkpoint_dir" in left else set()
    left |= {"mesh"} if "topology" in given else set()
    taken = {name: value for name, value in of_run.items() if name in own.keys() - left}
    exp = experiment_registry.short_name(record["experiment"])
    shown = {name: ",".join(value) if isinstance(value, list) else value for name, value in taken.items()}
    command = [f"--exp={exp}", *(f"--{own[name].flag}={value}" for name, value in shown.items())]
    command += [f"--fdl.set={override}" for override in kept]
    logging.info("as the run in %s was started: %s", path, shlex.join(command))
    if (folder := record.get("working_directory")) not in (None, os.getcwd()) and any(map(_MAY_BE_PATH.search, kept)):
        logging.warning(
            "the run was started in %s: relative paths in its overrides now begin in %s", folder, os.getcwd()
        )
    return exp, [*kept, *overrides], {**taken, **given}


def run_of_directories(given: Mapping[str, Any]) -> tuple[epath.Path, dict[str, Any]]:
    """Returns the directory and the record of the run that `--job_log_dir` or `--restore_checkpoint_dir` holds.

    The record has the run's experiment, overrides and settings.

    Args:
      given: {name: value} of the flags that were given, of which only these two are used.

    Raises:
      UserError: see `_with_those_of_the_run`.
    """
    from spmd_trainer import storage
    from spmd_trainer.storage import access, reading, run_files

    places = []
    for name in ("job_log_dir", "restore_checkpoint_dir"):
        if name in given:
            path = storage.directory(f"--{name}", given[name])
            access.check_readable(f"--{name}", path)
            places += [path] if name == "job_log_dir" else [path, path.parent]
    why = f", and {places[0]} holds no run that says its own" if places else ""
    for path in places:
        record: dict[str, Any] = {}
        try:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                record = run_files.read_record(path)
        except (OSError, ValueError) as error:
            text = reading.problem(os.fspath(path), error) if isinstance(error, OSError) else str(error)
            why = f", because what {path} says of its run can't be read: {text}"
            break
        if record.get("experiment") and "overrides" in record:
            return path, record
        if record.get("experiment"):
            why = f": the run in {path} has not begun to train, so that it is not known with which overrides and flags"
            break
    raise UserError(f"--exp=NAME is required{why}; --list shows the experiments")


define()
