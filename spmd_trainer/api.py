"""The trainer from a notebook or a script: `import spmd_trainer as st; st.train("lm.stdlib.StdlibBytesTiny", "runs/mine")`.

Each function does what the command of its name does, shows the same progress lines, and returns what came out. Experiments are
given by name, as a class (registered or not), or as an instance.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from spmd_trainer import multihost, sharding, storage
from spmd_trainer.callbacks import Callback
from spmd_trainer.cli import launch, live_line, log_lines, run_flags
from spmd_trainer.cli.run_flags import Experiment
from spmd_trainer.errors import UserError
from spmd_trainer.inputs import tensorflow_bridge
from spmd_trainer.planner.plan import Plan
from spmd_trainer.step.mesh_choice import mesh_flag
from spmd_trainer.training import host_devices
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import ExportSettings, RunConfig
from spmd_trainer.training.train import TrainResult

# 'data:4,mdl:2', {'data': 4, 'mdl': 2}, or pairs.
MeshSizes: TypeAlias = str | Mapping[str, int] | Sequence[tuple[str, int]]
Directory: TypeAlias = str | os.PathLike[str]

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


def train(
    exp: Experiment,
    job_log_dir: Directory,
    *,
    overrides: Iterable[str] = (),
    mesh: MeshSizes | None = None,
    callbacks: Sequence[Callback] = (),
    track: Sequence[str] = (),
) -> TrainResult:
    """Trains an experiment, from the newest checkpoint in `job_log_dir` if there is one. Ctrl-C saves and returns.

    Args:
      exp: a registered name, an experiment class or an instance.
      job_log_dir: where checkpoints, summaries and the log go.
      overrides: as `--fdl.set`, e.g. ['task.train.num_train_steps=200'].
      mesh: as `--mesh`, e.g. 'data:4,mdl:2' or {'data': 4, 'mdl': 2}; None for the experiment's own.
      callbacks: called while training goes on, after those of `task.train.callbacks`.
      track: as `--track`, e.g. ['wandb', 'mlflow'].

    Raises:
      UserError: something in the arguments, the experiment or its files is wrong; the message says what would be right.
    """
    from spmd_trainer.training import train as program

    if isinstance(track, str):
        raise UserError(f"track={track!r} is one text; give a list of names, e.g. track=[{track!r}]")
    with _job("train", exp, job_log_dir, overrides, mesh, callbacks=tuple(callbacks), track=tuple(track)) as job:
        return program.train(job)


def evaluate(
    exp: Experiment,
    job_log_dir: Directory,
    *,
    overrides: Iterable[str] = (),
    mesh: MeshSizes | None = None,
    restore_checkpoint_dir: Directory | None = None,
    restore_checkpoint_step: int | None = None,
) -> EvalResult:
    """Evaluates one checkpoint on all evaluation datasets.

    Args:
      exp, job_log_dir, overrides, mesh: see `train`.
      restore_checkpoint_dir: the checkpoints to read; None for those in `job_log_dir`.
      restore_checkpoint_step: the step; None for the newest.

    Raises:
      UserError: as `train`; there is no checkpoint, or nothing to evaluate.
    """
    from spmd_trainer.metrics.writers import SummaryWriters
    from spmd_trainer.training import checkpoints
    from spmd_trainer.training.evaluate import Evaluations

    checkpoint = _checkpoint(restore_checkpoint_dir, restore_checkpoint_step)
    with _job("eval", exp, job_log_dir, overrides, mesh, **checkpoint) as job:
        step, state = checkpoints.restore_for_inference(job, use_ema=job.task.train.eval_use_ema_states)
        with contextlib.closing(SummaryWriters(job.config.job_log_dir)) as writers:
            return EvalResult(step, Evaluations(job, writers).run(state, step))


def decode(
    exp: Experiment,
    job_log_dir: Directory,
    *,
    overrides: Iterable[str] = (),
    mesh: MeshSizes | None = None,
    restore_checkpoint_dir: Directory | None = None,
    restore_checkpoint_step: int | None = None,
) -> DecodeResult:
    """Decodes every decode dataset with one checkpoint.

    Args:
      exp, job_log_dir, overrides, mesh, restore_checkpoint_dir, restore_checkpoint_step: see `evaluate`.

    Raises:
      UserError: as `train`; there is no checkpoint, or nothing to decode.
    """
    from spmd_trainer.training import decode as program

    checkpoint = _checkpoint(restore_checkpoint_dir, restore_checkpoint_step)
    with _job("decode_once", exp, job_log_dir, overrides, mesh, **checkpoint) as job:
        step = program.decode_once(job)
        # Process 0 writes what all of them read.
        multihost.barrier("spmd_trainer:decoded")
        examples = {}
        for dataset in job.config.experiment.config.decode_datasets:
            text = (job.config.job_log_dir / "decode_out" / dataset.name / f"step_{step}.jsonl").read_text()
            examples[dataset.name] = [json.loads(line) for line in text.splitlines()]
        return DecodeResult(step, examples)


def export(
    exp: Experiment,
    job_log_dir: Directory,
    export_dir: Directory,
    *,
    dtype: str | None = None,
    use_ema: bool = False,
    adapter: bool = False,
    overrides: Iterable[str] = (),
    mesh: MeshSizes | None = None,
    restore_checkpoint_dir: Directory | None = None,
    restore_checkpoint_step: int | None = None,
) -> int:
    """Writes one checkpoint as a Hugging Face folder, which transformers opens. Returns its step.

    Args:
      exp, job_log_dir, overrides, mesh, restore_checkpoint_dir, restore_checkpoint_step: see `evaluate`.
      export_dir: the folder; new or empty.
      dtype: 'float32', 'bfloat16' or 'float16'; None for that of the variables.
      use_ema: write the moving averages of the variables.
      adapter: write the adapters of `task.lora` alone, as a folder of PEFT in float32, instead of a model that they are merged
        into.

    Raises:
      UserError: as `train`; there is no checkpoint, the folder is not empty, or transformers has no architecture for the model.
    """
    from spmd_trainer.training import export as program

    if adapter and dtype is not None:
        raise UserError("adapter=True writes float32; leave dtype out")
    settings = ExportSettings(storage.directory("export_dir", export_dir), dtype, use_ema, adapter)
    checkpoint = _checkpoint(restore_checkpoint_dir, restore_checkpoint_step)
    with _job("export", exp, job_log_dir, overrides, mesh, export=settings, **checkpoint) as job:
        return program.export(job)


def inspect(
    exp: Experiment, *, overrides: Iterable[str] = (), mesh: MeshSizes | None = None
) -> sharding.ShardingReport:
    """Returns where every variable lives on the mesh, and why, and how inputs are split. Trains nothing and writes nothing.

    Args:
      exp, overrides, mesh: see `train`.

    Raises:
      UserError: as `train`.
    """
    from spmd_trainer.training import attention_kernels, input_layouts

    with _job("inspect", exp, ".", overrides, mesh) as job:
        return job.sharding_report(attention_kernels.of_forward_pass(job), input_layouts.of_job(job))


def plan(
    exp: Experiment,
    *,
    topology: str | None = None,
    num_slices: int = 1,
    overrides: Iterable[str] = (),
    mesh: MeshSizes | None = None,
) -> Plan:
    """Compiles the train step and returns what it needs of one chip. Trains nothing and writes nothing.

    Args:
      exp, overrides, mesh: see `train`.
      topology: chips that aren't here, e.g. 'v5e:16x16' (extra `tpu`) or 'h100:32x8', 32 hosts with 8 GPUs each (extra `cuda12`
        or `cuda13`); None for the devices that are here.
      num_slices: number of slices of `topology`; for GPUs it multiplies the hosts.

    Raises:
      UserError: as `train`; an unknown topology, or the step does not fit.
    """
    from spmd_trainer.planner import plan as program

    with _job("inspect", exp, ".", overrides, mesh, topology=topology, num_slices=num_slices) as job:
        return program.plan(job)


@contextlib.contextmanager
def _job(
    mode: str,
    exp: Experiment,
    job_log_dir: Directory,
    overrides: Iterable[str],
    mesh: MeshSizes | None,
    **settings: Any,
) -> Iterator[Job]:
    """Builds the job of a call, and shows its log lines as the command line does."""
    if isinstance(overrides, str):
        raise UserError(f"overrides={overrides!r} is one text; give a list of them, e.g. overrides=[{overrides!r}]")
    sizes = _sizes(mesh)
    count, index = multihost.joined()
    # Of several processes, the first one tells the progress.
    with log_lines.shown(warnings_only=index > 0) as run_log:
        config = RunConfig(
            experiment=host_devices.resolve(exp, overrides, sizes, lambda: count),
            job_log_dir=storage.directory("job_log_dir", job_log_dir),
            mode=mode,
            mesh=sizes,
            **settings,
        )
        job = launch.build_job(config)
        launch.open_log(config, run_log)
        with live_line.shown(wanted=not index and run_log.is_shown):
            yield job


def _checkpoint(directory: Directory | None, step: int | None) -> dict[str, Any]:
    """Returns the settings that say which checkpoint to read."""
    path = None if directory is None else storage.directory("restore_checkpoint_dir", directory)
    return {"restore_checkpoint_dir": path, "restore_checkpoint_step": step}


def _sizes(mesh: MeshSizes | None) -> list[tuple[str, int]] | None:
    if mesh is None:
        return None
    if isinstance(mesh, str):
        return run_flags.parse_mesh(mesh)
    pairs = mesh.items() if isinstance(mesh, Mapping) else mesh
    return run_flags.parse_mesh(mesh_flag(pairs))
