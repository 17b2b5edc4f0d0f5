"""Flags and arguments become one `RunConfig`: the mesh is parsed, paths are made absolute, the experiment is resolved, once."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeAlias

from absl import flags

from spmd_trainer import sharding, storage
from spmd_trainer.base_experiment import BaseExperiment
from spmd_trainer.cli.modes import MODES
from spmd_trainer.errors import UserError
from spmd_trainer.lm_eval import settings as lm_eval_settings
from spmd_trainer.planner import plan_candidates, topologies
from spmd_trainer.tracking import registry as trackers
from spmd_trainer.training import host_devices, xla_flags
from spmd_trainer.training.run_config import ExportSettings, FailurePolicy, RunConfig

Experiment: TypeAlias = str | type[BaseExperiment] | BaseExperiment
MeshSizes: TypeAlias = Sequence[tuple[str, int]]

# The size of an axis in --mesh.
_SIZE = re.compile(r"-?[0-9]{1,18}")
# Flags of --mode=lm_eval, named as those of the lm-eval command.
LM_EVAL_FLAGS = (
    "tasks",
    "include_path",
    "num_fewshot",
    "limit",
    "apply_chat_template",
    "system_instruction",
    "fewshot_as_multiturn",
    "gen_kwargs",
    "log_samples",
    "confirm_run_unsafe_code",
    "model_args",
)
# Other values of --apply_chat_template are names of templates.
_TRUTH = {"true": True, "false": False}


def run_config_from_flags(flag_values: flags.FlagValues, join: Callable[[str], int]) -> RunConfig:
    """Makes the run's config of the flags.

    Args:
      flag_values: absl flags, parsed.
      join: joins the job's processes for a mode and returns how many there are. Called before any device is touched.

    Raises:
      UserError: a missing or unreadable flag, or an experiment that contradicts itself.
    """
    mode = flag_values.mode
    _check_mode(flag_values)
    search, budget = _search_settings(flag_values)
    if flag_values.topology:
        topologies.run_on_host()
    export, lm_eval = _export_settings(flag_values), _lm_eval_settings(flag_values)
    mesh = parse_mesh(flag_values.mesh) if flag_values.mesh else None
    restore = flag_values.restore_checkpoint_dir
    directory = storage.directory("--job_log_dir", flag_values.job_log_dir or ".")
    restore_dir = storage.directory("--restore_checkpoint_dir", restore) if restore else None
    experiment = host_devices.resolve(flag_values.exp, flag_values["fdl.set"].value or (), mesh, lambda: join(mode))
    if not (flag_values.job_log_dir or flag_values.dump) and MODES[mode].has_run:
        raise UserError(
            "--job_log_dir=DIR is required: the directory for checkpoints, summaries and outputs of this run"
        )
    return RunConfig(
        experiment=experiment,
        job_log_dir=directory,
        mode=mode,
        restore_checkpoint_dir=restore_dir,
        restore_checkpoint_step=flag_values.restore_checkpoint_step,
        eval_on_test=flag_values.eval_on_test,
        decode_during_train=flag_values.decode_during_train,
        enable_checkpoint_saving=flag_values.enable_checkpoint_saving,
        exit_after_ondemand_checkpoint=flag_values.exit_after_ondemand_checkpoint,
        verify_steps=flag_values.verify_steps,
        verify_against=_verify_options(flag_values),
        plan=flag_values.plan,
        topology=flag_values.topology,
        num_slices=flag_values.num_slices,
        search=search,
        budget=budget,
        num_minibatches=flag_values.num_minibatches,
        writes_reports=bool(flag_values.job_log_dir),
        mesh=mesh,
        failure_policy=FailurePolicy(
            flag_values.watchdog_seconds,
            flag_values.stop_on_invalid_step,
            flag_values.check_replicas_every,
            flag_values.check_repeat_every,
            flag_values.hang_seconds,
        ),
        track=trackers.split_names(flag_values.track),
        jax_cache_dir=flag_values.jax_cache_dir,
        export=export,
        lm_eval=lm_eval,
        replay_step=flag_values.step,
    )


def _check_mode(flag_values: flags.FlagValues) -> None:
    """Raises UserError for a flag that the mode does not have."""
    mode = flag_values.mode
    if flag_values.topology and mode not in ("inspect", "plan"):
        raise UserError("--topology goes with --mode=inspect and --mode=plan")
    if flag_values.plan and mode != "inspect":
        raise UserError("--plan goes with --mode=inspect; --mode=plan searches for a topology")
    if flag_values["num_slices"].present and not flag_values.topology:
        raise UserError("--num_slices goes with --topology")
    if flag_values.num_minibatches is not None and mode not in ("train", "inspect", "plan", "verify", "replay"):
        raise UserError("--num_minibatches goes with --mode=train, inspect, plan, verify and replay")
    if flag_values.step is not None and mode != "replay":
        raise UserError("--step goes with --mode=replay")
    if mode == "replay" and flag_values.step is None:
        raise UserError("--mode=replay needs --step=N, the step to look into")
    if flag_values.track and mode != "train":
        raise UserError("--track goes with --mode=train")


def _verify_options(flag_values: flags.FlagValues) -> xla_flags.Options | None:
    """Returns the XLA options that `verify` compares with."""
    if flag_values.verify_against is None:
        return None
    if flag_values.mode != "verify":
        raise UserError("--verify_against goes with --mode=verify")
    return xla_flags.parse("--verify_against", flag_values.verify_against)


def _search_settings(flag_values: flags.FlagValues) -> tuple[tuple[str, ...], float]:
    """Returns what `--mode=plan` searches, and for how many seconds."""
    given = [name for name in ("search", "budget") if flag_values[name].present]
    if given and flag_values.mode != "plan":
        raise UserError(f"--{given[0]} goes with --mode=plan")
    if flag_values.mode == "plan" and not flag_values.topology:
        raise UserError("--mode=plan needs --topology=CHIP:SHAPE, e.g. v5e:16x16 or h100:32x8")
    return plan_candidates.parse_dimensions(flag_values.search), plan_candidates.parse_budget(flag_values.budget)


def _export_settings(flag_values: flags.FlagValues) -> ExportSettings | None:
    """Returns what to export; None in the other modes."""
    if flag_values.mode != "export":
        given = [
            name
            for name in ("export_dir", "export_dtype", "export_use_ema", "export_adapter")
            if flag_values[name].value
        ]
        if given:
            raise UserError(f"--{given[0]} goes with --mode=export")
        return None
    if not flag_values.export_dir:
        raise UserError("--mode=export needs --export_dir=DIR, the folder to write")
    if flag_values.export_adapter and flag_values.export_dtype:
        raise UserError("--export_adapter writes float32; leave --export_dtype out")
    directory = storage.directory("--export_dir", flag_values.export_dir)
    return ExportSettings(directory, flag_values.export_dtype, flag_values.export_use_ema, flag_values.export_adapter)


def _lm_eval_settings(flag_values: flags.FlagValues) -> lm_eval_settings.LmEvalSettings | None:
    """Returns what to judge the model with; None in the other modes."""
    if flag_values.mode != "lm_eval":
        given = [name for name in LM_EVAL_FLAGS if flag_values[name].value not in (None, False, [])]
        if given:
            raise UserError(f"--{given[0]} goes with --mode=lm_eval")
        return None
    tasks = lm_eval_settings.split_names(flag_values.tasks)
    if not tasks:
        raise UserError("--mode=lm_eval needs --tasks=NAME,NAME: tasks of lm-eval, or of --include_path=DIR")
    template = flag_values.apply_chat_template
    return lm_eval_settings.LmEvalSettings(
        tasks=tasks,
        include_path=flag_values.include_path,
        num_fewshot=flag_values.num_fewshot,
        limit=flag_values.limit,
        apply_chat_template=_TRUTH.get(str(template).lower(), template or False),
        system_instruction=flag_values.system_instruction,
        fewshot_as_multiturn=flag_values.fewshot_as_multiturn,
        gen_kwargs=lm_eval_settings.parse_arguments("--gen_kwargs", flag_values.gen_kwargs),
        log_samples=flag_values.log_samples,
        confirm_run_unsafe_code=flag_values.confirm_run_unsafe_code,
        model_args=lm_eval_settings.model_args(flag_values.model_args),
    )


def parse_mesh(text: str) -> list[tuple[str, int]]:
    """Parses 'data:4,mdl:2'.

    Raises:
      UserError: not of that form; a size that is neither a positive number nor -1; several sizes of -1.
    """
    axes = []
    for part in text.split(","):
        name, colon, number = part.partition(":")
        # int() alone would take '1_0' for 10.
        size = int(number) if _SIZE.fullmatch(number.strip()) else None
        if not (name.strip() and colon) or size is None:
            raise UserError(f"--mesh={text}: {part!r} is not of the form axis:size, e.g. --mesh=data:4,mdl:2")
        problem = sharding.size_problem(size)
        if problem:
            raise UserError(f"--mesh={text}: axis {name.strip()!r}: {problem}")
        axes.append((name.strip(), size))
    if sum(size == -1 for _, size in axes) > 1:
        raise UserError(f"--mesh={text}: only one size may be -1, the rest of the devices")
    return axes
