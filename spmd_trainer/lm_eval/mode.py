"""Evaluates a checkpoint with EleutherAI's lm-eval harness: --mode=lm_eval. See `spmd_trainer.lm_eval`."""

from __future__ import annotations

import contextlib
from typing import Any

import jax

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.text_base import reads_texts
from spmd_trainer.inputs.tokenizer_field import default_start, make_tokenizer, start_token
from spmd_trainer.inputs.tokenizers import Tokenizer
from spmd_trainer.lm_eval.harness_runner import HarnessRunner, Tasks
from spmd_trainer.lm_eval.settings import LmEvalSettings
from spmd_trainer.training import averages, checkpoints
from spmd_trainer.training.ending import say_results
from spmd_trainer.training.experiment_config import ResolvedExperiment
from spmd_trainer.training.job import Job
from spmd_trainer.training.phases import Phase
from spmd_trainer.training.summary_writers import SummaryWriters


def evaluate(job: Job) -> dict[str, float]:
    """Evaluates one checkpoint, `--restore_checkpoint_step` or the newest, on `--tasks`. All processes must call it.

    Writes `lm_eval/step_N/results_DATE.json` and the metrics. If the job was killed, the same command runs only the
    requests that have no answer.

    Returns:
      {'TASK/metric': value}.

    Raises:
      UserError: lm-eval, the tokenizer or the checkpoint is missing, or a task is unknown or can't be loaded.
    """
    settings = job.config.of(LmEvalSettings)
    with Phase("finding the tasks of lm-eval", announce_after=2.0):
        tasks = Tasks(settings)
    harness = make_runner(job, settings, tasks)
    restored = checkpoints.restore_for_inference(job, averages.of(job))
    directory = job.config.job_log_dir
    with contextlib.closing(SummaryWriters(directory, enabled=jax.process_index() == 0)) as writers:
        results = harness.run(restored.state, restored.step, directory, writers)
        writers.flush()
        say_results(directory)
    return results


def make_runner(job: Job, settings: LmEvalSettings, tasks: Tasks | None = None) -> HarnessRunner:
    """Makes the runner for a job's model. Raises the errors of `tokenizer_of` and `HarnessRunner`."""
    experiment = job.config.experiment
    tokenizer, start_id = tokenizer_of(experiment, settings.model_args.tokenizer)
    return HarnessRunner(
        settings,
        job.task,
        job.partitioner,
        tokenizer=tokenizer,
        start_id=start_id,
        batch=job.inputs_shape_dtype,
        config_lines=experiment.lines(),
        experiment=experiment.name,
        tasks=tasks,
        progress=lambda what, total: Phase(what, announce_after=2.0, total=total),
    )


def tokenizer_of(experiment: ResolvedExperiment, given: str | None = None) -> tuple[Tokenizer, int | None]:
    """Returns the tokenizer of the experiment's first text input, and the input's start token (None: it has none).

    Args:
      experiment: the experiment.
      given: path of a tokenizer to use instead.

    Raises:
      UserError: no input has a tokenizer, and none is given.
    """
    config = experiment.config
    datasets = [*config.train_datasets, *config.eval_datasets, *config.decode_datasets]
    of_texts: Any = next(filter(reads_texts, datasets), None)
    if of_texts is None and given is None:
        raise UserError(
            f"no input of experiment {experiment.label} has a tokenizer, to write and read texts with; lm-eval takes "
            "--model_args=tokenizer=PATH"
        )
    if of_texts is None:
        tokenizer = make_tokenizer(given)
        return tokenizer, start_token(tokenizer, default_start(tokenizer))
    tokenizer = make_tokenizer(given) if given else make_tokenizer(of_texts.tokenizer, of_texts.eos_id)
    return tokenizer, start_token(tokenizer, of_texts.start)
