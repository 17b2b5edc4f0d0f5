"""Logs the end of a training run: how the run ended, where its results are, and the commands that show the results."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import jax
from absl import logging
from etils import epath

from spmd_trainer import experiment_registry
from spmd_trainer.checkpointing import steps
from spmd_trainer.sharding.messages import named_text
from spmd_trainer.step.mesh_choice import mesh_flag
from spmd_trainer.storage.run_files import PAGE
from spmd_trainer.training.live_status import SHOWN_LIVE, live
from spmd_trainer.training.run_config import RunConfig

if TYPE_CHECKING:
    from rich.table import Table

    from spmd_trainer.training.experiment_config import ResolvedExperiment

# Metrics of an evaluation that describe its size and duration, not the model.
TIMING = ("eval_batches", "eval_seconds")
# praxis' models give the same loss under these names.
_LOSS = ("avg_xent", "log_pplx", "total_loss")
# Smaller numbers are shown with four significant digits.
_SMALL = 1e-3
# Up to this many checkpoints are listed by step.
_LISTED = 5
# Fields of `task.train` that evaluation and decode read too.
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
# Only training reads these.
_OF_TRAINING = ("task.train.", "task.early_stopping_fn", "train_datasets")


def log_summary(
    config: RunConfig,
    outcome: str,
    next_step: str,
    *,
    loss: float | None,
    metrics: Mapping[str, float],
    evaluated: int | None,
) -> None:
    """Logs how a training run ended, its last metrics, where its results are and which commands show them. Process 0 only.

    Args:
      outcome: how the run ended, e.g. 'finished: step 600 of 600 in 5m31s'; empty if nothing was trained.
      next_step: how the run can continue; empty if it is complete.
      loss: the loss of the last step; None if no step was taken.
      metrics: the metrics of the last evaluation, as 'DATASET/metric'.
      evaluated: the step of the last evaluation of this run; None if there was no evaluation.
    """
    if jax.process_index():
        return
    names = ["train", *(input_p.name for input_p in config.experiment.config.eval_datasets)]
    found = {} if evaluated is None else _by_dataset(metrics, names)
    last = "" if loss is None else f"{loss:.4f}"
    lines = []
    if outcome:
        lines.append(f"{outcome}{f', loss {last}' if last else ''}{f'; {next_step}' if next_step else ''}")
    if evaluated is not None:
        shown = "; ".join(f"{dataset}: {text}" for dataset, text in found.items())
        lines.append(f"last evaluation, at step {evaluated}: {shown}")
    commands = [*_results(config.job_log_dir), *next_commands(config, evaluated=evaluated)]
    if live.display is not None:
        of_step = {f"{dataset} at step {evaluated}": text.replace("  ", "\n") for dataset, text in found.items()}
        live.display.print(_table(outcome, next_step, last, of_step))
        live.display.print("\n".join(commands))
    # If there is a live display, these lines go to the log file only.
    for line in [*lines, *commands]:
        logging.info("%s", line, extra=SHOWN_LIVE)


def say_results(directory: epath.Path) -> None:
    """Logs which outputs are in a run's directory, and the command that shows the curves. Process 0 only."""
    if jax.process_index():
        return
    for line in _results(directory):
        logging.info("%s", line)


def _results(directory: epath.Path) -> Iterator[str]:
    if not directory.exists():
        return
    yield f"results in {directory}: {_contents(directory)}"
    if (directory / PAGE).exists():
        yield f"  to see the run:     {directory / PAGE}"
    if (directory / "summaries").exists():
        yield f"  to see the curves:  tensorboard --logdir {shlex.quote(str(directory / 'summaries'))}"


def _contents(directory: epath.Path) -> str:
    """Returns the names of a run's outputs, e.g. 'checkpoints/ (steps 0, 20), summaries/'."""
    parts = [
        f"{name}/ ({_steps_text(saved)})"
        for name in ("checkpoints", "best")
        if (saved := steps.present(directory / name))
    ]
    parts += [
        f"{name}/"
        for name in ("summaries", "eval_out", "decode_out", "lm_eval", "profile")
        if (directory / name).exists()
    ]
    return ", ".join(parts) or "nothing yet"


def shown(metrics: Mapping[str, float]) -> str:
    """Formats metrics as one line, e.g. 'avg_xent = log_pplx 4.2746  num_predictions 608', without timings.

    praxis' models report their loss under several names; names with the same value are joined by ' = '.
    """
    names: dict[float | str, list[str]] = {}
    for name, value in metrics.items():
        is_nothing = name == "aux_loss" and not value  # most models have none
        if name not in TIMING and not is_nothing:
            names.setdefault(value if name in _LOSS else name, []).append(name)
    return "  ".join(f"{' = '.join(same)} {_number(metrics[same[0]])}" for same in names.values())


def _number(value: float) -> str:
    if math.isfinite(value) and value == round(value):
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) < _SMALL else f"{value:.4f}"


def _by_dataset(results: Mapping[str, float], names: Iterable[str]) -> dict[str, str]:
    """Returns {dataset: its metrics, formatted by `shown`}.

    Args:
      results: {'DATASET/metric': value}. Both names may contain slashes.
      names: the names of all datasets. A metric belongs to the dataset with the longest name that its key begins with.
    """
    datasets: dict[str, dict[str, float]] = {}
    longest_first = sorted(names, key=len, reverse=True)
    for key, value in results.items():
        dataset = next(name for name in longest_first if key.startswith(f"{name}/"))
        datasets.setdefault(dataset, {})[key.removeprefix(f"{dataset}/")] = value
    return {dataset: shown(values) for dataset, values in datasets.items()}


def next_commands(config: RunConfig, *, evaluated: int | None = None) -> Iterator[str]:
    """Yields the commands that evaluate and decode the run's checkpoints, and that prompt a language model.

    If other processes can't find the experiment by its name (it is a notebook's class, or not registered), yields Python calls
    instead.

    Args:
      config: the run's config.
      evaluated: the step of the run's last evaluation, or None. If it is the newest checkpoint, no evaluation command is yielded.
    """
    experiment = config.experiment
    if not (saved := steps.present(config.job_log_dir / "checkpoints")):
        return
    has_command = experiment.name in experiment_registry.get_all() and not experiment.name.startswith("__main__.")
    for what, mode, function, datasets in (
        ("to evaluate:", "eval", "evaluate", experiment.config.eval_datasets),
        ("to decode:", "decode_once", "decode", experiment.config.decode_datasets),
    ):
        if datasets and not (mode == "eval" and evaluated == saved[-1]):
            # The run's directory records the rest of the command.
            command = ["spmd-trainer", f"--job_log_dir={config.job_log_dir}", f"--mode={mode}"]
            yield f"  {what:<19} {shlex.join(command) if has_command else _python_call(config, function)}"
    if has_command and _answers(experiment):
        yield f'  {"to talk to it:":<19} {shlex.join(["spmd-trainer", f"--job_log_dir={config.job_log_dir}"])} --prompt="..."'


def _answers(experiment: ResolvedExperiment) -> bool:
    """Returns True if the run's model can answer a `--prompt`: it generates text, and an input has a tokenizer."""
    lora, config = experiment.task_p.lora, experiment.config
    if not hasattr(experiment.task_p.model, "generation") or (lora is not None and lora.adapters):
        return False
    from spmd_trainer.inputs.text_base import reads_texts  # imports what reads texts

    return any(map(reads_texts, (*config.train_datasets, *config.eval_datasets, *config.decode_datasets)))


def _table(how: str, then: str, loss: str, evaluated: Mapping[str, str]) -> Table:
    """Returns a table for the terminal: how the run ended, how to continue (`then`), the loss, and {dataset: metrics}."""
    # Only terminals need rich.
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=box.ROUNDED, show_header=False, border_style="dim")
    shown.add_column(style="dim", no_wrap=True)
    shown.add_column(overflow="fold")
    colour = "yellow" if then else "green"
    rows = [("end", how, f"bold {colour}"), ("next", then, colour), ("loss", loss, "bold")]
    for name, value, style in [*rows, *((name, metrics, "") for name, metrics in evaluated.items())]:
        if value:
            shown.add_row(Text(name), Text(value, style))
    return shown


def _steps_text(saved: list[int]) -> str:
    if len(saved) > _LISTED:
        return f"{len(saved)} steps, the newest {saved[-1]}"
    return named_text(saved, "step")


def _python_call(config: RunConfig, function: str) -> str:
    """Returns the code of a call of `spmd_trainer.evaluate` or `decode`, with the overrides that this function needs."""
    arguments = [type(config.experiment.experiment).__name__, repr(str(config.job_log_dir))]
    given = config.experiment.overrides
    if overrides := [one for one in given if one.startswith(_OF_THE_MODEL) or not one.startswith(_OF_TRAINING)]:
        arguments.append(f"overrides={overrides!r}")
    if config.mesh:
        arguments.append(f"mesh={mesh_flag(config.mesh)!r}")
    return f"spmd_trainer.{function}({', '.join(arguments)})"
