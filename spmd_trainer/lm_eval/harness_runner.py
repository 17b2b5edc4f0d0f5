"""Runs the lm-eval harness on train states: loads tasks, and writes results in lm-eval's format and as summary metrics."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import pathlib
import random
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from absl import logging
from etils import epath

from spmd_trainer.checkpointing.agreement import agreed, decided_by_process_0
from spmd_trainer.checkpointing.checksums import checksum
from spmd_trainer.errors import UserError, first_paragraph, terminal
from spmd_trainer.inputs.tokenizers import Tokenizer
from spmd_trainer.lm_eval import task_code
from spmd_trainer.lm_eval.requests import Answers, Progress, Requests, Source, no_progress, request_key
from spmd_trainer.lm_eval.settings import BOOTSTRAP_ITERS, LmEvalSettings
from spmd_trainer.lm_eval.steps import training_rows
from spmd_trainer.lm_eval.texts import Texts
from spmd_trainer.models.base import vocabulary_size
from spmd_trainer.models.config_lines import lines_of
from spmd_trainer.sharding.messages import nearest_names, suggestion_text
from spmd_trainer.step.partitioner import Partitioner
from spmd_trainer.tasks_lib import SingleTask
from spmd_trainer.train_states import PyTree, TrainState
from spmd_trainer.training.summary_writers import SummaryWriters, read_metrics

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

# Description of the model in lm-eval's results.
_MODEL = "spmd-trainer"
_OLDEST = (0, 4, 13)
_YAML = (".yaml", ".yml")


def check_installed() -> str:
    """Checks that lm-eval is installed and new enough, and returns its folder.

    Raises:
      UserError: lm-eval is missing or too old; the message says how to install it.
    """
    fix = "pip install 'spmd-trainer[lm-eval]'"
    spec = importlib.util.find_spec("lm_eval")
    if spec is None:
        raise UserError(f"judging with tasks needs EleutherAI's lm-eval, which is not installed: {fix}")
    found = importlib.metadata.version("lm-eval")
    if tuple(int(part) for part in re.findall(r"\d+", found)[:3]) < _OLDEST:
        raise UserError(
            f"lm-eval {found} is installed, and {'.'.join(map(str, _OLDEST))} or newer is needed: {fix} --upgrade"
        )
    return (spec.submodule_search_locations or [""])[0]


class Tasks:
    """The lm-eval tasks named by the settings."""

    def __init__(self, settings: LmEvalSettings):
        """Finds the tasks by name, without loading them.

        Raises:
          UserError: lm-eval is missing, `include_path` is not a directory, a task is unknown, or a task runs code without
            `confirm_run_unsafe_code`.
        """
        library = check_installed()
        include = settings.include_path
        if include is not None and not os.path.isdir(include):
            raise UserError(
                f"--include_path={include}: the directory does not exist; give one with tasks as YAML files"
            )
        self._include = None if include is None else os.path.abspath(include)
        if not settings.confirm_run_unsafe_code:
            task_code.refuse(self._include, [name for name in settings.tasks if name.endswith(_YAML)], library)
        self._manager: TaskManager = self._find(with_own=False)
        # lm-eval takes 20 s to find its own tasks.
        if not all(_matching(given, self._manager) for given in settings.tasks):
            self._manager = self._find(with_own=True)
        found = [name for given in settings.tasks for name in _matching(given, self._manager)]
        for given in settings.tasks:
            if not _matching(given, self._manager):
                raise self._unknown(given)
        self.names = tuple(dict.fromkeys(found))

    def load(self) -> list[Any]:
        """Loads lm-eval's task and group objects with their datasets. They store requests, so each evaluation needs new ones.

        Raises:
          UserError: a task can't be loaded; the message names the task.
        """
        loaded: list[Any] = []
        for name in self.names:
            try:
                found = self._load(name)
            except Exception as error:  # a task's YAML, code and dataset may raise anything
                raise UserError(
                    f"--tasks: {name} can't be loaded: {type(error).__name__}: {first_paragraph(error)}"
                ) from error
            group = found.get("groups", {}).get(name)
            loaded += found["tasks"].values() if group is None else [group]
        return loaded

    def _load(self, name: str) -> Mapping[str, Any]:
        try:
            return self._manager.load([name])
        except KeyError:
            if self._has_own:
                raise
        # A user's group may contain tasks of lm-eval.
        self._manager = self._find(with_own=True)
        return self._manager.load([name])

    def _find(self, *, with_own: bool) -> TaskManager:
        from lm_eval.tasks import TaskManager

        self._has_own = with_own
        return TaskManager(include_path=self._include, include_defaults=with_own)

    def _unknown(self, given: str) -> UserError:
        if given.endswith(_YAML):
            return UserError(f"--tasks: the file {given} does not exist")
        # There are thousands of names, so list only similar ones.
        similar = suggestion_text(nearest_names(given, self._manager.all_tasks, count=5))
        where = "" if self._include is None else f" and {self._include}"
        return UserError(
            f"--tasks: lm-eval{where} has no task {given!r}{similar}; `lm-eval ls tasks` "
            "lists its own, and --include_path=DIR adds a directory with tasks as YAML files"
        )


def _matching(given: str, manager: TaskManager) -> list[str]:
    """Returns the task names that one entry of --tasks matches; for a YAML file, its absolute path."""
    if given.endswith(_YAML):
        return [os.path.abspath(given)] if os.path.isfile(given) else []
    found: list[str] = manager.match_tasks([given])
    return found


class HarnessRunner:
    """Evaluates train states on lm-eval tasks. Programs are compiled for the first state, and reused for later states.

    Attributes:
      requests: runs requests on the mesh.
    """

    def __init__(
        self,
        settings: LmEvalSettings,
        task: SingleTask,
        partitioner: Partitioner,
        *,
        tokenizer: Tokenizer,
        start_id: int | None,
        batch: PyTree,
        config_lines: Sequence[str],
        experiment: str,
        tasks: Tasks | None = None,
        progress: Progress | None = None,
    ):
        """Finds the tasks. Compiles nothing.

        Args:
          settings: the settings of the evaluation.
          task, partitioner: the job's task, and its partitioner after setup.
          tokenizer: the tokenizer.
          start_id: the token before each text in training; None if there is none.
          batch: ShapeDtypeStructs of the global training batch.
          config_lines: the resolved config, lines 'path: value'.
          experiment: name of the experiment, for the results.
          tasks: the tasks, if they are already found.
          progress: makes the context manager around a series of batches, see `requests.Progress`; None reports nothing.

        Raises:
          UserError: lm-eval is missing, a task or the chat template is unknown, or the model isn't a language model.
        """
        self._settings = settings
        self._tasks = tasks or Tasks(settings)
        self._config_lines = config_lines
        self._progress = progress or no_progress
        arguments = settings.model_args
        vocab_size = vocabulary_size(task)
        texts = Texts(
            tokenizer, start_id, arguments=arguments, vocab_size=vocab_size, chat_template=settings.apply_chat_template
        )
        rows, length = training_rows(batch)
        max_positions = getattr(getattr(getattr(task.model, "lm_tpl", None), "spec", None), "max_positions", 0)
        self.requests = Requests(
            task,
            partitioner,
            tokens_per_batch=rows * length // partitioner.num_minibatches,
            max_length=arguments.max_length or max_positions or length,
            batch_size=arguments.batch_size,
            tokenizer=tokenizer,
        )
        from spmd_trainer.lm_eval.model import HarnessModel

        info = {
            "model_num_parameters": partitioner.metadata.num_params() + partitioner.metadata.num_frozen_params(),
            "model_dtype": np.dtype(task.fprop_dtype).name,
        }
        self._model = HarnessModel(self.requests, texts, getattr(task.model, "generation", None), info)
        self._experiment = experiment

    def run(
        self,
        state: TrainState,
        step: int,
        job_log_dir: epath.Path,
        writers: SummaryWriters,
    ) -> dict[str, float]:
        """Evaluates a state on all tasks. Reuses answers that an earlier run computed with the same variables.

        Args:
          state: a state without optimizer states.
          step: the training step of the state.
          job_log_dir: the run's directory; files go to `lm_eval/step_N`.
          writers: the summary writers, which receive the metrics as `lm_eval_TASK`.

        Returns:
          {'TASK/metric': value}, the same on every process.

        Raises:
          UserError: a task can't be loaded or run, or the results can't be written.
          CheckpointError: another process could not load the tasks or write the results; has the message of that process.
        """
        from lm_eval.utils import make_table

        directory = job_log_dir / "lm_eval" / f"step_{step}"
        opened: list[Answers] = []
        decided_by_process_0(lambda: opened.append(Answers(directory)))
        identity = self._identity(state)
        self._model.source = Source(state, identity, next(iter(opened), None), self._progress)
        results, tracker = self._evaluate()

        def write() -> dict[str, dict[str, float]]:
            metrics = scalars(results)
            results["config"] |= {"model": _MODEL, "model_args": self._described(step)}
            tracker.general_config_tracker.model_source = _MODEL
            tracker.general_config_tracker.model_name = self._experiment
            _write_results(results, tracker, directory, samples=self._settings.log_samples)
            for name, values in metrics.items():
                written = read_metrics(job_log_dir, f"lm_eval_{name}").get(step, {})
                if not written.items() >= values.items():  # an earlier run may have written them
                    writers.write(f"lm_eval_{name}", step, values, {"identity": identity})
            tables = [make_table(results), *([make_table(results, "groups")] if results.get("groups") else [])]
            terminal.write(f"step {step}\n" + "\n".join(tables) + "\n")
            logging.info("results of lm-eval: %s", directory)
            return metrics

        # Only process 0 has bootstrapped standard errors.
        metrics = decided_by_process_0(write)
        return {f"{name}/{metric}": value for name, values in metrics.items() for metric, value in values.items()}

    def _identity(self, state: TrainState) -> str:
        """Returns a fingerprint of the model's variables and settings. It is the same on any mesh."""
        settings = lines_of(self._config_lines, ("task.model", "task.lora"))
        return request_key(settings, int(state.step), checksum(state.mdl_vars))

    def _described(self, step: int) -> dict[str, Any]:
        given = {key: value for key, value in vars(self._settings.model_args).items() if value is not None}
        return {"experiment": self._experiment, "step": step, **given}

    def _evaluate(self) -> tuple[dict[str, Any], Any]:
        """Returns lm-eval's results, and its tracker, which holds the settings of the evaluation."""
        from lm_eval import evaluator
        from lm_eval.loggers import EvaluationTracker

        settings, tracker = self._settings, EvaluationTracker()
        multiturn = settings.fewshot_as_multiturn
        tasks = agreed(self._tasks.load)
        with _harness_settings():
            results = evaluator.simple_evaluate(
                model=self._model,
                tasks=tasks,
                num_fewshot=settings.num_fewshot,
                limit=settings.limit,
                # The other processes' results are dropped.
                bootstrap_iters=BOOTSTRAP_ITERS if jax.process_index() == 0 else 0,
                log_samples=True,
                evaluation_tracker=tracker,
                system_instruction=settings.system_instruction,
                apply_chat_template=settings.apply_chat_template,
                fewshot_as_multiturn=bool(settings.apply_chat_template) if multiturn is None else multiturn,
                gen_kwargs=dict(settings.gen_kwargs) or None,
                confirm_run_unsafe_code=settings.confirm_run_unsafe_code,
            )
        assert results is not None
        return dict(results), tracker


@contextlib.contextmanager
def _harness_settings() -> Iterator[None]:
    """Context manager for a call to lm-eval: keeps lm-eval from forking, and sends its output to stderr.

    On exit, restores the state of the random generators of Python and numpy, which lm-eval seeds.
    """
    before = random.getstate(), np.random.get_state(), os.environ.get("DISABLE_MULTIPROC")
    os.environ["DISABLE_MULTIPROC"] = "1"
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        if before[2] is None:
            del os.environ["DISABLE_MULTIPROC"]
        else:
            os.environ["DISABLE_MULTIPROC"] = before[2]


def scalars(results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Extracts {task or group: {metric: value}} from lm-eval's results.

    Metrics have lm-eval's names, e.g. 'acc' and 'acc_stderr', or with a filter's name, e.g. 'exact_match/strict-match'.
    """
    found: dict[str, dict[str, float]] = {}
    for name, entries in {**results["results"], **results.get("groups", {})}.items():
        values = {}
        for key, value in entries.items():
            metric, comma, filter_name = key.partition(",")
            if comma and isinstance(value, int | float) and not isinstance(value, bool):
                values[metric if filter_name == "none" else f"{metric}/{filter_name}"] = float(value)
        if values:
            found[name] = values
    return found


def _write_results(results: dict[str, Any], tracker: Any, directory: epath.Path, *, samples: bool) -> None:
    """Writes `results_DATE.json`, and optionally `samples_TASK_DATE.jsonl`, with lm-eval's own writer.

    lm-eval's writer supports only local files, and logs its errors instead of raising them.
    """
    examples = results.pop("samples", {})
    with tempfile.TemporaryDirectory() as folder:
        tracker.output_path = os.path.join(folder, "results.json")
        tracker.save_results_aggregated(results=results, samples=examples)
        for name in results["configs"] if samples else ():
            tracker.save_results_samples(task_name=name, samples=examples[name])
        written = sorted(pathlib.Path(folder).iterdir())
        if len(written) != 1 + (len(results["configs"]) if samples else 0):
            raise UserError("lm-eval could not write its results; the log says why")
        directory.mkdir(parents=True, exist_ok=True)
        for path in written:
            (directory / path.name).write_bytes(path.read_bytes())
