"""Callback that evaluates the model on lm-eval's tasks during training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spmd_trainer.callbacks import Callback, Run
from spmd_trainer.checkpointing.agreement import decided_by_process_0
from spmd_trainer.errors import UserError
from spmd_trainer.inputs.tokenizer_field import default_start, make_tokenizer, start_token
from spmd_trainer.inputs.tokenizers import Tokenizer
from spmd_trainer.lm_eval.harness_runner import HarnessRunner, Tasks
from spmd_trainer.lm_eval.settings import LmEvalSettings
from spmd_trainer.training.averages import evaluated


class LmEval(Callback):
    """Evaluates the model on lm-eval tasks every `every_steps` steps, and at step `num_train_steps`.

        task_p.train.callbacks = [Config(LmEval, tasks="my_task", every_steps=500, tokenizer="models/llama")]

    Metrics are written to the summaries `lm_eval_TASK`, and files to `lm_eval/step_N` in the run's directory. Training
    waits for the evaluation, whose time is excluded from the steps per second. A step that is due to be saved is saved
    first. A run killed during an evaluation continues from its last checkpoint. When it reaches the same step with the
    same variables, it runs only the unanswered requests. If a run starts at a checkpoint whose evaluation is due and
    has no results, that step is evaluated before training continues. If a run stops before `num_train_steps`, its last
    step is not evaluated, but `--mode=lm_eval` can evaluate its checkpoint.

    Attributes:
      metrics: {'TASK/metric': value} of the last evaluation.
    """

    def __init__(
        self,
        tasks: str | tuple[str, ...] = (),
        *,
        every_steps: int,
        tokenizer: Any = None,
        start: str | None = None,
        settings: LmEvalSettings | None = None,
        **options: Any,
    ):
        """Checks and stores the settings.

        Args:
          tasks: names of tasks, 'a,b' or a tuple.
          every_steps: steps between two evaluations.
          tokenizer: as the `tokenizer` of text inputs: a path, a tokenizer or its config; None uses bytes as tokens.
          start: the token before each text, as the `start` of text inputs; None means 'tokenizer' for a Hugging Face
            tokenizer, and 'eos' for others.
          settings: all settings, instead of `tasks` and `options`.
          **options: further fields of `LmEvalSettings`.

        Raises:
          UserError: `every_steps` is not positive, or a setting is wrong.
        """
        if every_steps < 1:
            raise UserError(f"LmEval: every_steps={every_steps}; give 1 or more")
        self.metrics: Mapping[str, float] = {}
        self._settings = settings or LmEvalSettings(tasks, **options)  # type: ignore[arg-type]  # it splits a text
        self._every_steps = every_steps
        self._tokenizer = tokenizer
        self._start = start
        self._tasks: Tasks | None = None
        self._runner: HarnessRunner | None = None

    def on_open(self, run: Run) -> None:
        """Loads the tasks and the tokenizer, so that wrong settings stop the run before it trains.

        Raises:
          UserError: lm-eval is missing, a task, the tokenizer or the chat template is unknown, a task can't be loaded,
            or the model isn't a language model.
        """
        self._tasks = Tasks(self._settings)
        tokenizer = make_tokenizer(self._settings.model_args.tokenizer or self._tokenizer)
        start = default_start(tokenizer) if self._start is None else self._start
        self._texts: tuple[Tokenizer, int | None] = (tokenizer, start_token(tokenizer, start))
        self._runner = self._make(run)
        self._tasks.load()

    def on_start(self, run: Run) -> None:
        """Evaluates the restored state if its evaluation is due and has no results."""
        if run.first_step and self._due(run, run.first_step):
            directory = run.job_log_dir / "lm_eval" / f"step_{run.first_step}"
            if not decided_by_process_0(lambda: any(directory.glob("results_*.json"))):
                self._evaluate(run, run.first_step)

    def asks_for_pause(self, run: Run, step: int) -> bool:
        return self._due(run, step)

    def on_pause(self, run: Run, step: int) -> None:
        if self._due(run, step):
            self._evaluate(run, step)

    def _due(self, run: Run, step: int) -> bool:
        return step % self._every_steps == 0 or step == run.num_steps

    def _evaluate(self, run: Run, step: int) -> None:
        if self._runner is None or self._partitioner is not run.partitioner:
            self._runner = self._make(run)
        run.begin(f"lm_eval at step {step}", "evaluation")
        state = evaluated(run.state, run.eval_averages)
        self.metrics = self._runner.run(state, step, run.job_log_dir, run.summaries)

    def _make(self, run: Run) -> HarnessRunner:
        self._partitioner = run.partitioner
        tokenizer, start_id = self._texts
        return HarnessRunner(
            self._settings,
            run.task,
            run.partitioner,
            tokenizer=tokenizer,
            start_id=start_id,
            batch=run.batch,
            config_lines=run.config_lines,
            experiment=run.experiment,
            tasks=self._tasks,
        )
