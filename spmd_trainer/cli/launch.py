"""Validates the command line, cheapest checks first, and starts the requested mode."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shlex
from collections.abc import Iterator
from typing import Any

import jax
from absl import flags, logging
from etils import epath

from spmd_trainer import experiment_modules, experiment_registry, multihost, storage
from spmd_trainer.callbacks import CallbackError
from spmd_trainer.checkpointing import CheckpointError
from spmd_trainer.cli import distributed, live_line, log_lines, run_flags
from spmd_trainer.cli.modes import MODES
from spmd_trainer.errors import UserError, first_paragraph, terminal, user_code
from spmd_trainer.storage import access
from spmd_trainer.training import garbage, start_checks
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import ChipsConfig, RunConfig
from spmd_trainer.training.run_directory import LOGS
from spmd_trainer.training.same_settings import check_same_settings

# Minimum compile time, in seconds, of programs that are cached. JAX's default of 1 would exclude many small programs.
_MIN_COMPILE_SECONDS = 0.1


def run(flag_values: flags.FlagValues, arguments: list[str], run_log: log_lines.RunLog) -> None:
    """Runs the command that the flags describe. Opens the file of the full log, `run_log`, as soon as the job is built.

    Raises:
      UserError: an error occurred that the user can fix.
    """
    if arguments:
        raise UserError(f"unexpected argument {arguments[0]!r}; every option is a flag, e.g. --exp=NAME")
    experiment_modules.add(flag_values.exp_module)
    if flag_values.list:
        print_experiments()
        return
    cluster = None if flag_values.dump else distributed.cluster_from_flags(flag_values)
    with distributed.Processes(cluster) as processes:
        config = run_flags.run_config_from_flags(flag_values, processes.join)
        if flag_values.dump:
            terminal.write("\n".join([*config.experiment.lines(), ""]))
            return
        check_same_settings(config)
        _, index = multihost.joined()
        with _errors_of_users(config, run_log), live_line.shown(wanted=not index):
            job = build_job(config)
            open_log(config, run_log)
            if config.mode != "train":
                garbage.resume()  # training resumes it later, once its step is traced
            program = MODES[config.mode].program()
            with access.outages_explained(config.job_log_dir):
                program(job)


@contextlib.contextmanager
def _errors_of_users(config: RunConfig, run_log: log_lines.RunLog) -> Iterator[None]:
    """Context manager that turns an error in the user's code into a UserError with the user's lines, and logs the traceback."""
    try:
        yield
    except CallbackError as error:
        raise UserError(_with_users_lines(str(error), error.__cause__ or error, config, run_log)) from error
    except UserError:
        raise
    except CheckpointError as error:
        raise UserError(str(error), exit_status=error.exit_status) from error
    except Exception as error:
        # Libraries raise these for settings that don't fit each other, when layers are built or traced.
        of_settings = isinstance(error, ValueError | TypeError | AssertionError) and user_code.library_line(error)
        if not user_code.lines(error) and not of_settings:
            raise
        what = f"experiment {config.experiment.label}: {type(error).__name__}: {first_paragraph(error)}".rstrip(": ")
        raise UserError(_with_users_lines(what, error, config, run_log)) from error


def _with_users_lines(text: str, error: BaseException, config: RunConfig, run_log: log_lines.RunLog) -> str:
    """Returns `text` followed by the lines of the user's code in the error's traceback. Logs the whole traceback."""
    open_log(config, run_log)
    log_lines.log_traceback(error)
    library = user_code.library_line(error)
    lines = [*user_code.lines(error), *([f"raised by {library}"] if library else [])]
    traceback = [] if run_log.path is None else [f"The traceback is in {run_log.path}"]
    return "\n".join([text, *(f"  {line}" for line in lines), *traceback])


def open_log(config: RunConfig, run_log: log_lines.RunLog) -> None:
    """Opens the file of the full log, `logs/MODE.log` in the run's directory. Each process has a separate file."""
    if MODES[config.mode].has_run:
        _, index = multihost.joined()
        name = f"{config.mode}.process_{index}.log" if index else f"{config.mode}.log"
        run_log.open(config.job_log_dir / LOGS / name)


def enable_compile_cache(directory: str | None) -> str | None:
    """Enables JAX's persistent compilation cache, which is on by default. Call it before anything is compiled. Uses no device.

    Several processes may share the directory: all of them read it, and JAX lets only process 0 write to it. If JAX can't read an
    entry, it compiles the entry's program again.

    JAX's own settings (JAX_COMPILATION_CACHE_DIR, jax_enable_compilation_cache) take precedence over the default directory, and
    JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS over the minimum compile time set here. If the directory can't be written, or other
    users can write or have written to it, logs a warning and leaves the cache off: JAX executes the programs it reads there.

    Args:
      directory: the cache directory; None for JAX's own setting, or else the default; '' for no cache.

    Returns:
      The cache directory, or None if the cache is off.

    Raises:
      UserError: the path is in an unknown storage (see `storage.directory`), or in an object store that can't be read.
    """
    config: Any = jax.config  # Any: its attributes are created at run time.
    if directory == "":
        config.update("jax_compilation_cache_dir", None)
        return None
    if directory is None and (own := config.jax_compilation_cache_dir):
        if not storage.is_remote(own) and (reason := _not_ours_alone(pathlib.Path(own))):
            _warn_of_no_cache(own, reason)
            config.update("jax_compilation_cache_dir", None)
        return config.jax_compilation_cache_dir
    if directory is None and not config.jax_enable_compilation_cache:
        return None
    given = None if directory is None else os.fspath(storage.directory("--jax_cache_dir", directory))
    if given and storage.is_remote(given):
        access.check_readable("--jax_cache_dir", epath.Path(given))  # JAX would ask for each program again
        path: str | None = given
    else:
        path = _cache_directory(given)
    config.update("jax_compilation_cache_dir", path)
    if path is None:
        return None
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_SECONDS)
    return path


def _cache_directory(directory: str | None) -> str | None:
    """Creates a local cache directory and returns its path; logs a warning and returns None if it can't be used."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    # The default directory belongs to one user, because the trainer executes what it reads from there.
    path = pathlib.Path(directory or f"{base}/spmd-trainer/jax").expanduser().absolute()
    try:
        # Private to the user: anyone who can write here can make the trainer execute their code.
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        reason = _not_ours_alone(path) if os.access(path, os.W_OK | os.X_OK) else "not writable"
    except (OSError, RuntimeError) as error:  # RuntimeError: the home directory is unknown.
        reason = str(error)
    if not reason:
        return str(path)
    _warn_of_no_cache(path, reason)
    return None


def _warn_of_no_cache(path: str | os.PathLike[str], reason: str) -> None:
    logging.warning(
        "the compilation cache is off: can't use %s (%s); set --jax_cache_dir=DIR, or --jax_cache_dir= for no cache",
        path,
        reason,
    )


def _not_ours_alone(path: pathlib.Path) -> str:
    """Says why a cache directory is unsafe: users other than this one and root can write, or have written, files in it.

    Returns '' if the directory is safe or does not exist. If it can't be read, returns the text of the error.
    """
    try:
        folder = path.stat()
        entries = [path, *(path / name for name in os.listdir(path))]
    except FileNotFoundError:
        return ""
    except OSError as error:
        return str(error)
    reach = (folder.st_mode & 0o011) << 1  # users who may enter the directory can write to entries with these mode bits
    for entry in entries:
        try:
            found = entry.stat()
        except FileNotFoundError:  # another process has just replaced it
            continue
        if found.st_uid not in (os.getuid(), 0):
            return f"{entry} is the user's with number {found.st_uid}, and JAX executes what it reads there"
        if found.st_mode & (0o022 if entry == path else reach):
            mend = f"chmod -R go-w {shlex.quote(str(path))}"
            return f"others may write to {entry}, and JAX executes what it reads there; `{mend}` takes that away"
    return ""


def build_job(config: RunConfig) -> Job:
    """Checks everything that can be checked before a run starts, then builds its job. Writes nothing into the run's directory.

    Raises:
      UserError: the directory, the checkpoints, the experiment, the mesh and the devices don't fit together.
    """
    # A program compiled for a topology could be read back only on a machine with its chips.
    has_topology = isinstance(config, ChipsConfig) and config.topology
    enable_compile_cache("" if has_topology else config.jax_cache_dir)
    if config.jax_profiler_port:
        with contextlib.suppress(ValueError):  # an earlier call in this process has started one
            jax.profiler.start_server(config.jax_profiler_port)
    start_checks.check_settings(config)
    if MODES[config.mode].has_run:
        start_checks.check_directories(config)
    if config.mode != "train":
        return MODES[config.mode].build_job(config)
    job = Job.build(config)
    start_checks.check_training(job)
    return job


def print_experiments() -> None:
    """Prints each registered experiment with the first line of its docstring, the user's experiments first.

    Raises:
      UserError: some modules can't be imported. The experiments of all other modules are printed first.
    """
    failures = experiment_modules.import_packages()
    shipped = f"{experiment_registry.EXPERIMENTS_PACKAGE}."
    rows = {
        experiment_registry.short_name(name): (cls.__doc__ or "").strip().split("\n")[0]
        for name, cls in sorted(
            experiment_registry.get_all().items(), key=lambda item: (item[0].startswith(shipped), item[0])
        )
    }
    width = max((len(name) for name in rows), default=0)
    for name, summary in rows.items():
        terminal.write(f"{name:{width}}  {summary}\n")
    if failures:
        raise UserError("\n".join(failures))
