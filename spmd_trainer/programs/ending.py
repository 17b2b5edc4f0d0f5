"""What a training run says at its end: how it ended, where its results lie, and the commands that show them."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping

import jax
from absl import logging

from spmd_trainer import experiment_registry
from spmd_trainer.checkpointing import steps
from spmd_trainer.programs.job import Job, JobSettings

# Metrics of an evaluation that say nothing of the model.
_TIMING = ("eval_batches", "eval_seconds")
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


def say_end(job: Job, how: str, then: str, metrics: Mapping[str, float], evaluated: int | None) -> None:
    """Logs how a training run ended, its last metrics, its results and the commands that show them. Process 0 does.

    Args:
      job: the job.
      how: how it ended, e.g. 'finished: step 600 of 600 in 5m31s'; empty where nothing was trained.
      then: how it can go on; empty where it is complete.
      metrics: the last training scalars, and those of the last evaluation as 'DATASET/metric'.
      evaluated: the step of the last evaluation of this run; None for none.
    """
    if jax.process_index():
        return
    if how:
        loss = f", loss {metrics['loss']:.4f}" if "loss" in metrics else ""
        logging.info("%s%s%s", how, loss, f"; {then}" if then else "")
    if evaluated is not None:
        logging.info("last evaluation, at step %d: %s", evaluated, _by_dataset(metrics))
    say_results(job)
    for line in _next_commands(job):
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

    Metrics that have the same value share it: praxis' models give their loss under several names.
    """
    names: dict[float, list[str]] = {}
    for name, value in metrics.items():
        is_nothing = name == "aux_loss" and not value  # most models have none
        if name not in _TIMING and not is_nothing:
            names.setdefault(value, []).append(name)
    return "  ".join(f"{' = '.join(same)} {_number(value)}" for value, same in names.items())


def _number(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) and value == round(value) else f"{value:.4f}"


def _by_dataset(metrics: Mapping[str, float]) -> str:
    datasets: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        dataset, slash, metric = name.rpartition("/")
        if slash:
            datasets.setdefault(dataset, {})[metric] = value
    return "; ".join(f"{dataset}: {shown(values)}" for dataset, values in datasets.items())


def _next_commands(job: Job) -> Iterator[str]:
    """The commands that evaluate and decode the run's checkpoints, where another process can find its experiment."""
    settings, config = job.settings, job.resolved.config
    name = job.resolved.name
    if name not in experiment_registry.get_all() or name.startswith("__main__."):
        return
    if steps.present(settings.job_log_dir / "checkpoints"):
        if config.eval_datasets:
            yield f"  to evaluate:        {_command(settings, 'eval')}"
        if config.decode_datasets:
            yield f"  to decode:          {_command(settings, 'decode_once')}"


def _steps_text(saved: list[int]) -> str:
    if len(saved) > _LISTED:
        return f"{len(saved)} steps, the newest {saved[-1]}"
    return f"step{'s' * (len(saved) > 1)} {', '.join(map(str, saved))}"


def _command(settings: JobSettings, mode: str) -> str:
    """The command that runs another mode on this run's checkpoints, with what changed its model and its data."""
    words = ["spmd-trainer", f"--exp={settings.exp}", f"--job_log_dir={settings.job_log_dir}", f"--mode={mode}"]
    if settings.mesh and settings.moved is None:
        words.append(f"--mesh={','.join(f'{axis}:{size}' for axis, size in settings.mesh)}")
    words += [f"--fdl.set={override}" for override in settings.overrides if _changes_model_or_data(override)]
    return shlex.join(words)


def _changes_model_or_data(override: str) -> bool:
    return not override.startswith("task.train.") or override.startswith(_OF_THE_MODEL)
