"""Judges the model with lm-eval's tasks during training."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from spmd_trainer.callbacks.base import Callback, Run
from spmd_trainer.errors import UserError
from spmd_trainer.inputs.tokenizer_field import make_tokenizer, start_token
from spmd_trainer.inputs.tokenizers import Tokenizer
from spmd_trainer.lm_eval.judge import Judge, Tasks
from spmd_trainer.lm_eval.settings import LmEvalSettings
from spmd_trainer.optim.learner import extract_ema, has_ema


class LmEval(Callback):
    """Evaluates tasks of lm-eval every N steps, and at the last step.

        task_p.train.callbacks = [Config(LmEval, tasks="my_task", every_steps=500, tokenizer="models/llama")]

    Metrics go to the summaries `lm_eval_TASK`, files to `lm_eval/step_N` of the run. A run that was killed goes on with the
    requests that are not answered yet when it comes to the same step again.

    Attributes:
      metrics: {'TASK/metric': value} of the last evaluation.
    """

    def __init__(
        self,
        tasks: str | tuple[str, ...] = (),
        *,
        every_steps: int,
        tokenizer: Any = None,
        start: str = "tokenizer",
        settings: LmEvalSettings | None = None,
        **options: Any,
    ):
        """Finds nothing yet.

        Args:
          tasks: names of tasks, 'a,b' or a tuple.
          every_steps: steps between two evaluations.
          tokenizer: as the `tokenizer` of text inputs: a path, a tokenizer or its config; None reads by byte.
          start: the token before each text, as the `start` of text inputs.
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
        self._judge: Judge | None = None

    def on_open(self, run: Run) -> None:
        """Finds the tasks and the tokenizer, so that a wrong name ends the run before it begins.

        Raises:
          UserError: lm-eval is missing, or there is no such task or tokenizer.
        """
        del run
        self._tasks = Tasks(self._settings)
        given = self._settings.model_args.tokenizer or self._tokenizer
        tokenizer = make_tokenizer(given)
        self._texts: tuple[Tokenizer, int | None] = (tokenizer, start_token(tokenizer, self._start))

    def after_dispatch(self, run: Run, step: int) -> None:
        """Evaluates the state where that is due."""
        if step % self._every_steps and step != run.num_steps:
            return
        if self._judge is None or self._partitioner is not run.partitioner:
            self._judge = self._make(run)
        run.begin(f"lm_eval at step {step}")
        state = run.state.to_eval_state()
        if run.task.train.eval_use_ema_states and has_ema(run.task.learner):
            state = dataclasses.replace(state, mdl_vars=extract_ema(run.state.opt_states, run.state.mdl_vars))
        with jax.transfer_guard_device_to_host("allow"):
            self.metrics = self._judge.run(state, step, run.job_log_dir, run.summaries)
        run.begin(f"training step {step + 1}")

    def _make(self, run: Run) -> Judge:
        self._partitioner = run.partitioner
        tokenizer, start_id = self._texts
        return Judge(
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
