"""The trainer from a notebook or a script: `import spmd_trainer as st; st.train("lm.stdlib.StdlibBytesTiny", "runs/mine")`.

Each function does what the command of its name does, shows the same progress lines, and returns what came out. Experiments are
given by name, as a class (registered or not), or as an instance.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar

import jax

from spmd_trainer import multihost, sharding, storage
from spmd_trainer.checkpointing import CheckpointError
from spmd_trainer.cli import launch, live_line, log_lines
from spmd_trainer.errors import UserError, user_code
from spmd_trainer.inputs import tensorflow_bridge
from spmd_trainer.settings import refuse_unknown, settings_of
from spmd_trainer.storage import access
from spmd_trainer.training import rooms
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import config_class, make_run_config
from spmd_trainer.training.train import TrainResult

if TYPE_CHECKING:
    from spmd_trainer.planner.plan import Plan
    from spmd_trainer.sweeps.trials import Trial
    from spmd_trainer.training.run_config import Experiment

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
Directory: TypeAlias = str | os.PathLike[str]
# Fields of settings that are no keywords: the functions have arguments of their own for them, or none.
_NO_KEYWORDS = {"experiment", "job_log_dir", "mode", "writes_reports", "directory", "trial", "step_inputs"}

tensorflow_bridge.keep_quiet()


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """What `evaluate` returns.

    Attributes:
      step: the training step of the checkpoint.
      metrics: {'DATASET/metric': mean over the whole dataset}.
    """

    step: int
    metrics: dict[str, float]


@dataclasses.dataclass(frozen=True)
class DecodeResult:
    """What `decode` returns.

    Attributes:
      step: the training step of the checkpoint.
      examples: {DATASET: one record for each example, as in `decode_out/DATASET/step_N.jsonl`}.
    """

    step: int
    examples: dict[str, list[dict[str, Any]]]


def _message_last(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Makes a function's errors end with their message, which says what to do, after the user's own frames.

    The full log has the whole traceback; JAX_TRACEBACK_FILTERING=off shows it here too.
    """

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        except (UserError, CheckpointError) as error:
            if jax.config.values["jax_traceback_filtering"] != "off":
                user_code.keep_own(error)
            raise

    return call


@_message_last
def train(exp: Experiment, job_log_dir: Directory, *, overrides: Iterable[str] = (), **settings: Any) -> TrainResult:
    """Trains an experiment, from the newest checkpoint in `job_log_dir` if there is one. Ctrl-C saves and returns.

    Args:
      exp: a registered name, an experiment class or an instance.
      job_log_dir: where checkpoints, summaries and the log go.
      overrides: as `--fdl.set`, e.g. ['task.train.num_train_steps=200'].
      **settings: fields of `TrainConfig`, named as the flags of `--mode=train`, e.g. mesh='data:4,mdl:2' or
        {'data': 4, 'mdl': 2}, track=['wandb', 'mlflow'], num_minibatches=2; and callbacks=[...], called after those of
        `task.train.callbacks`.

    Raises:
      UserError: something in the arguments, the experiment or its files is wrong; the message says what would be right.
    """
    from spmd_trainer.training import train as program

    with _job("train", exp, job_log_dir, overrides, settings) as job:
        return program.train(job)


@_message_last
def evaluate(exp: Experiment, job_log_dir: Directory, *, overrides: Iterable[str] = (), **settings: Any) -> EvalResult:
    """Evaluates one checkpoint on all evaluation datasets.

    Args:
      exp, job_log_dir, overrides: see `train`.
      **settings: fields of `RunConfig`: mesh; restore_checkpoint_dir, the checkpoints to read instead of those in `job_log_dir`;
        restore_checkpoint_step, the step instead of the newest; eval_averages='ema', 'schedule_free' or 'last:5'; ...

    Raises:
      UserError: as `train`; there is no checkpoint, or nothing to evaluate.
    """
    from spmd_trainer.training import averages, checkpoints
    from spmd_trainer.training.evaluate import Evaluations
    from spmd_trainer.training.summary_writers import SummaryWriters

    with _job("eval", exp, job_log_dir, overrides, settings) as job:
        restored = checkpoints.restore_for_inference(job, averages.of(job))
        with contextlib.closing(SummaryWriters(job.config.job_log_dir)) as writers:
            return EvalResult(restored.step, Evaluations(job, writers).run(restored.state, restored.step))


@_message_last
def decode(exp: Experiment, job_log_dir: Directory, *, overrides: Iterable[str] = (), **settings: Any) -> DecodeResult:
    """Decodes every decode dataset with one checkpoint.

    Args:
      exp, job_log_dir, overrides, **settings: see `evaluate`.

    Raises:
      UserError: as `train`; there is no checkpoint, or nothing to decode.
    """
    from spmd_trainer.training import decode as program

    with _job("decode_once", exp, job_log_dir, overrides, settings) as job:
        step = program.decode_once(job)
        # Process 0 writes what all of them read.
        multihost.barrier("spmd_trainer:decoded")
        examples = {}
        for dataset in job.config.experiment.config.decode_datasets:
            text = (job.config.job_log_dir / "decode_out" / dataset.name / f"step_{step}.jsonl").read_text()
            examples[dataset.name] = [json.loads(line) for line in text.splitlines()]
        return DecodeResult(step, examples)


@_message_last
def export(
    exp: Experiment, job_log_dir: Directory, export_dir: Directory, *, overrides: Iterable[str] = (), **settings: Any
) -> int:
    """Writes one checkpoint as a Hugging Face folder, which transformers opens. Returns its step.

    Args:
      exp, job_log_dir, overrides: see `train`.
      export_dir: the folder; new or empty.
      **settings: fields of `ExportConfig`: dtype='float32', 'bfloat16' or 'float16';
        adapter=True writes the adapters of `task.lora` alone, in PEFT's format and float32; checkpoint=True
        writes a checkpoint for warm starts; and those of `evaluate`.

    Raises:
      UserError: as `train`; there is no checkpoint, the folder is not empty, or transformers has no architecture for the model.
    """
    program = rooms.need("hf.export_mode")
    with _job("export", exp, job_log_dir, overrides, settings, directory=export_dir) as job:
        return int(program.export(job))


@_message_last
def generate(
    exp: Experiment, job_log_dir: Directory, prompts: Iterable[str], *, overrides: Iterable[str] = (), **settings: Any
) -> list[str]:
    """Returns the model's answer to each prompt, as `--mode=chat` gives it to the first of a conversation.

    Args:
      exp, job_log_dir, overrides: see `train`.
      prompts: the texts; with a chat template, what a user says.
      **settings: fields of `ChatSettings`: max_tokens, temperature, top_p, system; and those of `evaluate`.

    Raises:
      UserError: as `train`; there is no checkpoint, the model can't generate text, or a prompt is too long.
    """
    program = rooms.need("lm_eval.chat")
    with _job("chat", exp, job_log_dir, overrides, settings) as job:
        talk, answers = program.Talk.of_job(job), []
        for prompt in prompts:
            talk.reset()
            answers.append("".join(talk.answer(prompt)))
        return answers


@_message_last
def sweep(exp: Experiment, job_log_dir: Directory, *, overrides: Iterable[str] = (), **settings: Any) -> list[Trial]:
    """Trains an experiment once for each trial of a sweep, each in a process of its own, and returns the trials.

    Args:
      exp: a registered name, or the class of a module that the trials' processes can import.
      job_log_dir: where the trials' runs and `sweep.html` go. A sweep that was ended goes on from there.
      overrides: see `train`; for all trials.
      **settings: fields of `SweepConfig`: sweep={'LEARNING_RATE': [1e-3, 1e-2]}, what to vary; sweep_method, sweep_trials,
        sweep_metric, sweep_goal, sweep_prune, sweep_seed; and those of `train`, without callbacks.

    Raises:
      UserError: as `train`; there is nothing to vary, or all trials are broken.
    """
    program = rooms.need("sweeps.run")
    with _job("sweep", exp, job_log_dir, overrides, settings) as prepared:
        trials: list[Trial] = program.run(prepared)
        return trials


@_message_last
def inspect(exp: Experiment, *, overrides: Iterable[str] = (), **settings: Any) -> sharding.ShardingReport:
    """Returns where every variable lives on the mesh, and why, and how inputs are split. Trains nothing and writes nothing.

    Args:
      exp, overrides: see `train`.
      **settings: fields of `InspectConfig`: mesh, num_minibatches, ...

    Raises:
      UserError: as `train`.
    """
    from spmd_trainer.training import report_parts

    with _job("inspect", exp, ".", overrides, settings) as job:
        return job.sharding_report(report_parts.of_forward_pass(job), report_parts.of_inputs(job))


@_message_last
def plan(exp: Experiment, *, overrides: Iterable[str] = (), **settings: Any) -> Plan:
    """Compiles the train step and returns what it needs of one chip. Trains nothing and writes nothing.

    Args:
      exp, overrides: see `train`.
      **settings: fields of `InspectConfig`: mesh; topology, chips that aren't here, e.g. 'v5e:16x16' (extra `tpu`) or
        'h100:32x8', 32 hosts with 8 GPUs each (extra `plan-gpu`); num_slices, the number of slices of `topology`; ...

    Raises:
      UserError: as `train`; an unknown topology, or the step does not fit.
    """
    program = rooms.need("planner.plan")
    with _job("inspect", exp, ".", overrides, settings) as job:
        made: Plan = program.plan(job)
        return made


@_message_last
def load_variables(job_log_dir: Directory, step: int | None = None) -> dict[str, Any]:
    """Returns the model's variables of a run's checkpoint, on the host. Needs neither the run's mesh nor its experiment.

    Args:
      job_log_dir: the run's directory, its `checkpoints`, or one step in it.
      step: the training step; None for the newest whole one.

    Returns:
      {'params': {...}, 'non_trainable': {...}}, nested by the parts of the variables' paths: NumPy arrays without padding.

    Raises:
      CheckpointError: there is no such checkpoint, it is damaged, or it holds adapters alone, as those of a run with `task.lora`.
    """
    from spmd_trainer.checkpointing import frozen_base, own_steps

    directory = storage.directory("job_log_dir", job_log_dir)
    found = own_steps.find_step(directory, step, check_contents=True, asked="load_variables")
    if lacks_base := frozen_base.lacks_base_text(found.metadata):
        raise CheckpointError(
            f"load_variables: {found.name} {lacks_base}. spmd_trainer.export(exp, {str(job_log_dir)!r}, export_dir=...) writes "
            "the base with the adapters merged into it; the state of spmd_trainer.train(exp, job_log_dir), of a run that has "
            "ended, has both"
        )
    return found.variables_on_host()


@contextlib.contextmanager
def _job(
    mode: str, exp: Experiment, job_log_dir: Directory, overrides: Iterable[str], settings: dict[str, Any], **more: Any
) -> Iterator[Job]:
    """Builds the job of a call, and shows its log lines as the command line does."""
    count, index = multihost.joined()
    # Of several processes, the first one tells the progress.
    with log_lines.shown(warnings_only=index > 0) as run_log:
        with _named_as_in_python(mode):
            known = [field.name for field in dataclasses.fields(config_class(mode)) if field.name not in _NO_KEYWORDS]
            refuse_unknown(known, settings, f"--mode={mode}")
            given = {**settings, **more}
            config = make_run_config(exp, job_log_dir, mode=mode, overrides=overrides, join=lambda: count, **given)
            job = launch.build_job(config)
        launch.open_log(config, run_log)
        shows = live_line.shown(wanted=not index and run_log.is_shown)
        try:
            with shows, access.outages_explained(config.job_log_dir):
                yield job
        except (UserError, CheckpointError) as error:
            log_lines.log_traceback(error)
            raise


@contextlib.contextmanager
def _named_as_in_python(mode: str) -> Iterator[None]:
    """Names the caller's keywords in errors that name the flags of a mode."""
    own = {about.flag: name for name, about in settings_of(config_class(mode)).items() if name not in _NO_KEYWORDS}
    names = {**own, "job_log_dir": "job_log_dir", "export_dir": "export_dir", "exp": "exp", "fdl.set": "overrides"}
    try:
        yield
    except (UserError, CheckpointError) as error:
        text = re.sub(r"--fdl\.set=('[^']*')", r"overrides=[\1]", str(error))
        error.args = (re.sub(r"--([\w.]+)", lambda flag: names.get(flag[1], flag[0]), text),)
        raise
