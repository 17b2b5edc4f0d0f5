"""Runs the trainer from Python code: `import spmd_trainer as st; st.train("lm.stdlib.StdlibBytesTiny", "runs/mine")`.

Each function except `load_variables` does the work of one `--mode`, shows the same progress lines, and returns the results. An
experiment is given by its name, as a class (registered or not), or as an instance.
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
from spmd_trainer.storage import access, json_values
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
# Settings that can't be given as keywords: the functions have their own arguments for them, or don't offer them.
_NO_KEYWORDS = {"experiment", "job_log_dir", "mode", "writes_reports", "directory", "trial", "step_inputs"}

tensorflow_bridge.keep_quiet()


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """The result of `evaluate`.

    Attributes:
      step: the training step of the evaluated checkpoint.
      metrics: {'DATASET/metric': mean over the whole dataset}.
    """

    step: int
    metrics: dict[str, float]


@dataclasses.dataclass(frozen=True)
class DecodeResult:
    """The result of `decode`.

    Attributes:
      step: the training step of the checkpoint that decoded.
      examples: {DATASET: one record for each example, as in `decode_out/DATASET/step_N.jsonl`}.
    """

    step: int
    examples: dict[str, list[dict[str, Any]]]


def _message_last(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorator that removes all frames but the user's from the traceback of a UserError or CheckpointError.

    The run's log file, if there is one, has the whole traceback. With JAX_TRACEBACK_FILTERING=off, the raised error keeps it too.
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
    """Trains an experiment, from the newest checkpoint in `job_log_dir` if there is one. On Ctrl-C, saves and returns.

    Args:
      exp: a registered name, an experiment class or an instance.
      job_log_dir: the run's directory, for checkpoints, summaries and the log.
      overrides: changes to the config, as for `--fdl.set`, e.g. ['task.train.num_train_steps=200'].
      **settings: fields of `TrainConfig`, named as the flags of `--mode=train`, e.g. mesh='data:4,mdl:2' or
        {'data': 4, 'mdl': 2}, track=['wandb', 'mlflow'], num_minibatches=2. The callbacks in callbacks=[...] are called
        after those of `task.train.callbacks`.

    Raises:
      UserError: an error in the arguments, the experiment or its files; the message says how to fix it.
      CheckpointError: a checkpoint could not be read or written.
    """
    from spmd_trainer.training import train as program

    with _job("train", exp, job_log_dir, overrides, settings) as job:
        return program.train(job)


@_message_last
def evaluate(exp: Experiment, job_log_dir: Directory, *, overrides: Iterable[str] = (), **settings: Any) -> EvalResult:
    """Evaluates one checkpoint on all evaluation datasets.

    Args:
      exp, job_log_dir, overrides: see `train`.
      **settings: fields of `RunConfig`, e.g. mesh, restore_checkpoint_dir (read these checkpoints instead of those in
        `job_log_dir`), restore_checkpoint_step (read this step instead of the newest) and eval_averages ('ema', 'schedule_free'
        or 'last:5').

    Raises:
      UserError: as for `train`; also if there is no checkpoint, or the experiment has no evaluation dataset.
    """
    from spmd_trainer.training import averages, checkpoints
    from spmd_trainer.training.evaluate import Evaluations
    from spmd_trainer.training.summary_writers import SummaryWriters

    with _job("eval", exp, job_log_dir, overrides, settings) as job:
        restored, directory = checkpoints.restore_for_inference(job, averages.of(job)), job.config.job_log_dir
        with contextlib.closing(SummaryWriters(directory, enabled=jax.process_index() == 0)) as writers:
            return EvalResult(restored.step, Evaluations(job, writers).run(restored.state, restored.step))


@_message_last
def decode(exp: Experiment, job_log_dir: Directory, *, overrides: Iterable[str] = (), **settings: Any) -> DecodeResult:
    """Decodes every decode dataset with one checkpoint.

    Args:
      exp, job_log_dir, overrides, **settings: see `evaluate`.

    Raises:
      UserError: as for `train`; also if there is no checkpoint, or the experiment has no decode dataset.
    """
    from spmd_trainer.training import decode as program

    with _job("decode_once", exp, job_log_dir, overrides, settings) as job:
        step = program.decode_once(job)
        # Process 0 writes the files that all processes read.
        multihost.barrier("spmd_trainer:decoded")
        examples = {}
        for dataset in job.config.experiment.config.decode_datasets:
            text = (job.config.job_log_dir / "decode_out" / dataset.name / f"step_{step}.jsonl").read_text()
            examples[dataset.name] = [json.loads(line) for line in json_values.lines(text)]
        return DecodeResult(step, examples)


@_message_last
def export(
    exp: Experiment, job_log_dir: Directory, export_dir: Directory, *, overrides: Iterable[str] = (), **settings: Any
) -> int:
    """Writes one checkpoint as a Hugging Face folder that transformers can open. Returns the checkpoint's step.

    Args:
      exp, job_log_dir, overrides: see `train`.
      export_dir: the folder to write. It must be new or empty.
      **settings: the settings of `evaluate`, and fields of `ExportConfig`: dtype='float32', 'bfloat16' or 'float16';
        adapter=True writes only the adapters of `task.lora`, in PEFT's format and float32; checkpoint=True writes a checkpoint
        for warm starts instead of a folder.

    Raises:
      UserError: as for `train`; also if there is no checkpoint, the folder is not empty, or transformers lacks the architecture.
    """
    program = rooms.need("hf.export_mode")
    with _job("export", exp, job_log_dir, overrides, settings, directory=export_dir) as job:
        return int(program.export(job))


@_message_last
def generate(
    exp: Experiment, job_log_dir: Directory, prompts: Iterable[str], *, overrides: Iterable[str] = (), **settings: Any
) -> list[str]:
    """Returns the model's answer to each prompt, as in `--mode=chat`. Each prompt begins a new conversation.

    Args:
      exp, job_log_dir, overrides: see `train`.
      prompts: the texts to continue; user messages if the tokenizer has a chat template.
      **settings: the settings of `evaluate`, and fields of `ChatSettings`: max_tokens, temperature, top_p, system.

    Raises:
      UserError: as for `train`; also if there is no checkpoint, the model can't generate text, or a prompt is too long.
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
    """Trains an experiment once for each trial of a sweep, every trial in a separate process, and returns the trials.

    Args:
      exp: a registered name, or a class in a module that the trials' processes can import.
      job_log_dir: directory for the trials' runs and `sweep.html`. An interrupted sweep in this directory is continued.
      overrides: overrides of the config in all trials, see `train`.
      **settings: the settings of `train` except callbacks, and fields of `SweepConfig`: sweep (the values to try), e.g.
        {'LEARNING_RATE': [1e-3, 1e-2]}; sweep_method, sweep_trials, sweep_metric, sweep_goal, sweep_prune, sweep_seed.

    Raises:
      UserError: as for `train`; also if there is nothing to vary, or all trials failed.
    """
    program = rooms.need("sweeps.run")
    with _job("sweep", exp, job_log_dir, overrides, settings) as prepared:
        trials: list[Trial] = program.run(prepared)
        return trials


@_message_last
def inspect(exp: Experiment, *, overrides: Iterable[str] = (), **settings: Any) -> sharding.ShardingReport:
    """Returns a report of how every variable and every input is sharded, and why. Trains nothing and writes nothing.

    Args:
      exp, overrides: see `train`.
      **settings: fields of `InspectConfig`: mesh, num_minibatches, ...

    Raises:
      UserError: as for `train`.
    """
    from spmd_trainer.training import report_parts

    with _job("inspect", exp, ".", overrides, settings) as job:
        return job.sharding_report(report_parts.of_forward_pass(job), report_parts.of_inputs(job))


@_message_last
def plan(exp: Experiment, *, overrides: Iterable[str] = (), **settings: Any) -> Plan:
    """Compiles the train step and returns its memory, FLOPs, collectives and estimated time per chip. Does not train or write.

    Args:
      exp, overrides: see `train`.
      **settings: fields of `InspectConfig`, e.g. mesh. To plan for chips that this machine lacks, give topology, e.g. 'v5e:16x16'
        (needs the pip extra `tpu`) or 'h100:32x8' for 32 hosts with 8 GPUs each (pip extra `plan-gpu`), and num_slices.

    Raises:
      UserError: as for `train`; also if the topology is unknown, or the step does not fit the chip's memory.
    """
    program = rooms.need("planner.plan")
    with _job("inspect", exp, ".", overrides, settings) as job:
        made: Plan = program.plan(job)
        return made


@_message_last
def load_variables(job_log_dir: Directory, step: int | None = None) -> dict[str, Any]:
    """Returns the model's variables from a run's checkpoint, on the host. Needs neither the run's mesh nor its experiment.

    Args:
      job_log_dir: the run's directory, its folder `checkpoints`, or the folder of one step.
      step: the training step; None for the newest complete one.

    Returns:
      {'params': {...}, 'non_trainable': {...}}, nested by the parts of the variables' paths: NumPy arrays without padding.

    Raises:
      CheckpointError: there is no such checkpoint, it is damaged, or it has only adapters (of a run with `task.lora`).
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
    """Context manager that builds the `Job` for a call of `train`, `evaluate` etc., and shows log lines while its body runs."""
    count, index = multihost.joined()
    # With several processes, only process 0 shows progress lines.
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
    """Context manager that replaces flag names in error messages with keyword names, e.g. `--fdl.set` with `overrides`."""
    own = {about.flag: name for name, about in settings_of(config_class(mode)).items() if name not in _NO_KEYWORDS}
    names = {**own, "job_log_dir": "job_log_dir", "export_dir": "export_dir", "exp": "exp", "fdl.set": "overrides"}
    try:
        yield
    except (UserError, CheckpointError) as error:
        text = re.sub(r"--fdl\.set=('[^']*')", r"overrides=[\1]", str(error))
        error.args = (re.sub(r"--([\w.]+)", lambda flag: names.get(flag[1], flag[0]), text),)
        raise
