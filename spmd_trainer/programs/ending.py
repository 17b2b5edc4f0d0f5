"""What a training run says at its end: how it ended, where its results lie, and the commands that show them."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping

import jax
from absl import logging

from spmd_trainer import experiment_registry
from spmd_trainer.checkpointing import steps
from spmd_trainer.programs.job import Job, JobSettings
from spmd_trainer.programs.mesh_choice import mesh_flag

# Metrics of an evaluation that say nothing of the model.
_TIMING = ("eval_batches", "eval_seconds")
# Names under which praxis' models give one and the same loss.
_LOSS = ("avg_xent", "log_pplx", "total_loss")
# Smaller numbers are shown by their first digits.
_SMALL = 1e-3
# Checkpoints that are listed by their steps.
_LISTED = 5
# Fields of `task.train` that evaluation and decode read too; the others are intervals and the like.
_OF_THE_MODEL = tuple(
    f"task.train.{field}"
    for field in (
        "learner",
        "eval_use_ema_states",
        "decode_use_ema_states",
        "inputs_split_mapping",
        "sharding_strategy",
        "always_use_train_for_model_init",
        "enforce_input_specs",
    )
)
# What training alone reads.
_OF_TRAINING = ("task.train.", "task.early_stopping_fn", "train_datasets")


def say_end(
    job: Job, how: str, then: str, loss: float | None, results: Mapping[str, float], evaluated: int | None
) -> None:
    """Logs how a training run ended, its last metrics, its results and the commands that show them. Process 0 does.

    Args:
      job: the job.
      how: how it ended, e.g. 'finished: step 600 of 600 in 5m31s'; empty where nothing was trained.
      then: how it can go on; empty where it is complete.
      loss: of the last step; None where none was taken.
      results: those of the last evaluation, as 'DATASET/metric'.
      evaluated: the step of the last evaluation of this run; None for none.
    """
    if jax.process_index():
        return
    if how:
        logging.info("%s%s%s", how, "" if loss is None else f", loss {loss:.4f}", f"; {then}" if then else "")
    if evaluated is not None:
        names = ["train", *(input_p.name for input_p in job.resolved.config.eval_datasets)]
        logging.info("last evaluation, at step %d: %s", evaluated, _by_dataset(results, names))
    say_results(job)
    for line in next_commands(job):
        logging.info("%s", line)


def say_results(job: Job) -> None:
    """Logs which directories of the job have something in them, and how to look at the curves. Process 0 does."""
    directory = job.settings.job_log_dir
    if jax.process_index() or not directory.exists():
        return
    parts = [
        f"{name}/ ({_steps_text(saved)})"
        for name in ("checkpoints", "best")
        if (saved := steps.present(directory / name))
    ]
    parts += [f"{name}/" for name in ("summaries", "eval_out", "decode_out", "profile") if (directory / name).exists()]
    logging.info("results in %s: %s", directory, ", ".join(parts) or "nothing yet")
    if (directory / "summaries").exists():
        logging.info("  to see the curves:  tensorboard --logdir %s", shlex.quote(str(directory / "summaries")))


def shown(metrics: Mapping[str, float]) -> str:
    """Returns metrics as a line for people: 'avg_xent = log_pplx 4.2746  num_predictions 608', without timings.

    praxis' models give their loss under several names; those that have the same value share it.
    """
    names: dict[float | str, list[str]] = {}
    for name, value in metrics.items():
        is_nothing = name == "aux_loss" and not value  # most models have none
        if name not in _TIMING and not is_nothing:
            names.setdefault(value if name in _LOSS else name, []).append(name)
    return "  ".join(f"{' = '.join(same)} {_number(metrics[same[0]])}" for same in names.values())


def _number(value: float) -> str:
    if math.isfinite(value) and value == round(value):
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) < _SMALL else f"{value:.4f}"


def _by_dataset(results: Mapping[str, float], names: Iterable[str]) -> str:
    """Metrics by dataset. Names of datasets and of metrics may both have slashes."""
    datasets: dict[str, dict[str, float]] = {}
    longest_first = sorted(names, key=len, reverse=True)
    for key, value in results.items():
        dataset = next(name for name in longest_first if key.startswith(f"{name}/"))
        datasets.setdefault(dataset, {})[key.removeprefix(f"{dataset}/")] = value
    return "; ".join(f"{dataset}: {shown(values)}" for dataset, values in datasets.items())


def next_commands(job: Job) -> Iterator[str]:
    """Yields the commands that evaluate and decode the run's checkpoints, or the Python calls.

    Calls where another process can't find the experiment by its name: a notebook's own class, one that isn't registered.
    """
    settings, config, name = job.settings, job.resolved.config, job.resolved.name
    if not steps.present(settings.job_log_dir / "checkpoints"):
        return
    has_command = name in experiment_registry.get_all() and not name.startswith("__main__.")
    for what, mode, function, datasets in (
        ("to evaluate:", "eval", "evaluate", config.eval_datasets),
        ("to decode:", "decode_once", "decode", config.decode_datasets),
    ):
        if datasets:
            yield f"  {what:<19} {_command(job, mode) if has_command else _python_call(job, function)}"


def _steps_text(saved: list[int]) -> str:
    if len(saved) > _LISTED:
        return f"{len(saved)} steps, the newest {saved[-1]}"
    return f"step{'s' * (len(saved) > 1)} {', '.join(map(str, saved))}"


def _command(job: Job, mode: str) -> str:
    """The command that runs another mode on this run's checkpoints, with what changed its model and its data."""
    # In full: a short name may be known only after --exp_module.
    name, directory = experiment_registry.short_name(job.resolved.name), job.settings.job_log_dir
    words = ["spmd-trainer", f"--exp={name}", f"--job_log_dir={directory}", f"--mode={mode}"]
    if mesh := _mesh(job.settings):
        words.append(f"--mesh={mesh}")
    return shlex.join([*words, *(f"--fdl.set={override}" for override in _overrides(job.settings))])


def _python_call(job: Job, function: str) -> str:
    """The same as a call of `spmd_trainer.evaluate` or `decode`."""
    arguments = [type(job.experiment).__name__, repr(str(job.settings.job_log_dir))]
    if overrides := _overrides(job.settings):
        arguments.append(f"overrides={overrides!r}")
    if mesh := _mesh(job.settings):
        arguments.append(f"mesh={mesh!r}")
    return f"spmd_trainer.{function}({', '.join(arguments)})"


def _mesh(settings: JobSettings) -> str:
    """What `--mesh` was; empty where it wasn't given, and where the devices have changed since."""
    if not settings.mesh or settings.moved is not None:
        return ""
    return mesh_flag(settings.mesh)


def _overrides(settings: JobSettings) -> list[str]:
    """The overrides that change the model or what is evaluated and decoded."""
    return [
        override
        for override in settings.overrides
        if override.startswith(_OF_THE_MODEL) or not override.startswith(_OF_TRAINING)
    ]
