"""Loads variables according to `init_from_checkpoint_rules`, and restores runs with adapters (`task.lora`) on a frozen base.

A new run with adapters initializes all variables, loads those that the rules name, and then sets DoRA's magnitudes, unless they
were loaded, to the norms of the base's weights. A restarted run loads the base again and compares its checksums with those in
the checkpoint's metadata. It restores the adapters and the rest of the state from the checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
from absl import logging
from etils import epath

from spmd_trainer.checkpointing import (
    LOAD_ALL,
    CheckpointLoadingRules,
    CheckpointMismatchError,
    LoadReport,
    Restored,
    frozen_base,
    loading_rules,
    records,
)
from spmd_trainer.checkpointing.agreement import agreed_problem, decided_by_process_0
from spmd_trainer.checkpointing.checksums import checksums
from spmd_trainer.checkpointing.frozen_base import BASE_KEY, SETTINGS_KEY, BaseRecord, is_base
from spmd_trainer.checkpointing.loading_rules import ResolvedRules
from spmd_trainer.checkpointing.own_steps import OwnStep
from spmd_trainer.errors import UserError
from spmd_trainer.sharding.messages import count_text
from spmd_trainer.step.layout import Layout
from spmd_trainer.train_states import TrainState, is_adapter
from spmd_trainer.training import checkpoint_sources, rooms
from spmd_trainer.training.job import Job
from spmd_trainer.training.phases import Phase

# Key in the metadata of a run's checkpoints; the value {'path': ...} names the Hugging Face folder its variables came from.
FOLDER_KEY = "hugging_face_folder"
_ALL = CheckpointLoadingRules(load_rules=[LOAD_ALL])


def begin(
    job: Job, metadata: Layout, state: TrainState, rules: Mapping[Any, Any], *, restored_from: str | None = None
) -> tuple[TrainState, dict[str, Any], LoadReport | None]:
    """Loads variables into an initialized state according to `init_from_checkpoint_rules`. Called by every process.

    Args:
      metadata: the layout of the state, with or without optimizer states.
      state: the initialized state. Arrays that are replaced by loaded ones are deleted.
      rules: {checkpoint directory: CheckpointLoadingRules}; may be empty.
      restored_from: the Hugging Face folder of the frozen base, if no rule of the task names it; see `rules_of`.

    Returns:
      (state, origin, report). The run's checkpoints get `origin` as metadata: the Hugging Face folder that the variables came
      from and, in a run with adapters, the base and the settings of the adapters. `report` is None if `rules` is empty.

    Raises:
      UserError, CheckpointError: see `loading_rules.resolve_rules`.
      CheckpointMismatchError: loaded adapters were trained with settings that differ from `task.lora`.
    """
    variables = metadata.variables
    leaves = dict(zip(records.by_path(variables), jax.tree.leaves(state), strict=True))
    resolved = None
    if rules:
        with Phase("loading variables by init_from_checkpoint_rules"):
            resolved = _resolve(job, variables, rules)
            for path in (path for _, saved_paths in resolved.parts for path in saved_paths):
                leaves[path].delete()  # the loaded value needs the memory of the initial one
            leaves.update(resolved.read(variables, metadata.mesh))
    structure: Any = jax.tree.structure(state)
    origin: dict[str, Any] = {}
    sources = [source for source, _ in (resolved.parts if resolved else ())]
    folders = [source.metadata[FOLDER_KEY]["path"] for source in sources if FOLDER_KEY in source.metadata]
    if folder := restored_from or next(iter(folders), None):
        origin[FOLDER_KEY] = {"path": folder}
    if frozen_base.has_adapters(variables):
        if job.task.lora is None:
            raise UserError(
                "the model has variables below params/lora/, which are adapters of task.lora; rename that module"
            )
        adapters = set() if resolved is None else {p for _, paths in resolved.parts for p in paths if is_adapter(p)}
        leaves.update(_prepared(job, metadata, jax.tree.unflatten(structure, leaves.values()), adapters))
        base = {path: leaf for path, leaf in leaves.items() if is_base(path)}
        origin[BASE_KEY] = _record(variables, base, rules, resolved, restored_from).to_json()
        origin[SETTINGS_KEY] = frozen_base.settings(job.task.lora)
    loaded: TrainState = jax.tree.unflatten(structure, leaves.values())
    return loaded, origin, None if resolved is None else resolved.report


def begins_with(job: Job, directory: epath.Path) -> bool:
    """Returns True if a run with adapters begins from `directory`: the task has adapters, and this is a HF or PEFT folder.

    Called by every process.

    Raises:
      HfMismatchError: the directory contains PEFT adapters, but the task has no adapters.
    """
    has_adapters = decided_by_process_0(lambda: checkpoint_sources.is_peft_folder(directory))
    if has_adapters and job.task.lora is None:
        checkpoint_sources.open_source(directory, None, job.partitioner.metadata.variables, task=job.task)
    if job.task.lora is None:
        return False
    return has_adapters or decided_by_process_0(lambda: checkpoint_sources.is_hf_folder(directory))


def rules_of(job: Job, directory: epath.Path) -> tuple[dict[Any, Any], str | None]:
    """Returns the loading rules for a run with adapters that begins from the folder in `--restore_checkpoint_dir`.

    Args:
      directory: a Hugging Face folder with the base, or a PEFT folder with the adapters. The base of PEFT adapters is loaded by
        `task.train.init_from_checkpoint_rules` or, without rules, from the folder that adapter_config.json names.

    Returns:
      The rules; and the Hugging Face folder of the base, or None if the task's own rules load the base.

    Raises:
      UserError: the folder contains a different model, or adapters whose base folder is unknown.
    """
    if decided_by_process_0(lambda: checkpoint_sources.is_hf_folder(directory)):
        rooms.need("hf").require_model(directory, job.task)
        return {directory: _ALL}, str(directory)
    if rules := job.task.train.init_from_checkpoint_rules:
        return {directory: _ALL, **loading_rules.for_base(job.partitioner.metadata.variables, rules)}, None
    folder = decided_by_process_0(lambda: str(rooms.need("hf.peft").base_of(directory) or ""))
    if not folder:
        raise UserError(
            f"{directory} holds adapters, and the folder of their base is not known: its adapter_config.json names none that is "
            "here. Name it in task.train.init_from_checkpoint_rules"
        )
    rooms.need("hf").require_model(epath.Path(folder), job.task)
    return {directory: _ALL, folder: _ALL}, folder


class FrozenBase:
    """The frozen base of a run with adapters. The run's checkpoints lack it, so it is loaded once, for all of them."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._loaded: tuple[dict[str, jax.Array], BaseRecord] | None = None

    def joined(self, restored: Restored, variables: TrainState, directory: epath.Path) -> Restored:
        """Returns a restored checkpoint after adding the frozen base to its state, and a record of the base to its metadata.

        If `variables` contain no adapters, returns the checkpoint unchanged. Called by every process.

        Raises:
          CheckpointMismatchError: the adapters were trained with a different base or different settings.
        """
        if not frozen_base.has_adapters(variables):
            return restored
        noted = restored.metadata["metadata"]
        name = f"step {restored.step} in {directory}"

        def check() -> None:
            if BASE_KEY not in noted:
                raise CheckpointMismatchError(f"{name} does not say which base its adapters were trained on")
            frozen_base.require_settings(noted[SETTINGS_KEY], self._job.task.lora, name)

        agreed_problem(check)
        recorded = BaseRecord.from_json(noted[BASE_KEY])
        if self._loaded is None:
            with Phase("loading the frozen base"):
                self._loaded = _load_base(self._job, variables, recorded)
        arrays, record = self._loaded
        agreed_problem(functools.partial(recorded.require_same, record, name))
        state = frozen_base.joined(restored.state, arrays, variables)
        metadata = restored.metadata.copy()
        metadata["metadata"] = {**noted, BASE_KEY: record.to_json()}
        return dataclasses.replace(restored, state=state, metadata=metadata)


def origin_of(restored: Restored) -> dict[str, Any]:
    """Returns a restored checkpoint's metadata about where the run's first variables came from; later checkpoints repeat it."""
    noted = restored.metadata["metadata"]
    return {key: noted[key] for key in (FOLDER_KEY, BASE_KEY, SETTINGS_KEY) if key in noted}


def _resolve(job: Job, variables: TrainState, rules: Mapping[Any, Any]) -> ResolvedRules:
    resolved = loading_rules.resolve_rules(
        variables,
        rules,
        check_contents=True,
        open_foreign=functools.partial(checkpoint_sources.open_source, task=job.task),
    )
    if (hf := rooms.find("hf")) is not None:
        for source, _ in resolved.parts:
            hf.warn_of_differences(source, job.task)

    def check() -> None:
        for source, saved_paths in resolved.parts:
            if isinstance(source, OwnStep) and any(map(is_adapter, saved_paths)):
                frozen_base.require_settings(source.metadata.get(SETTINGS_KEY, {}), job.task.lora, source.name)

    agreed_problem(check)
    return resolved


def _load_base(job: Job, variables: TrainState, recorded: BaseRecord) -> tuple[dict[str, jax.Array], BaseRecord]:
    rules: Mapping[Any, Any] = job.task.train.init_from_checkpoint_rules or {}
    restored_from = recorded.restored_from
    is_folder = checkpoint_sources.is_hf_folder
    if restored_from is not None and decided_by_process_0(functools.partial(is_folder, restored_from)):
        rules = {restored_from: _ALL}
    elif restored_from is not None and not rules:
        raise CheckpointMismatchError(
            f"The frozen base was loaded from {restored_from}, which is no Hugging Face folder any more; put it back, or name "
            "its new place in task.train.init_from_checkpoint_rules"
        )
    else:
        restored_from = None
    variables = variables.to_eval_state()
    rules = loading_rules.for_base(variables, rules)
    # Adapters that the run began with come from the checkpoint now. Their original directory may be gone.
    if recorded.paths and set(recorded.paths) <= set(map(str, rules)):
        rules = {directory: rule for directory, rule in rules.items() if str(directory) in recorded.paths}
    arrays: dict[str, jax.Array] = {}
    resolved = None
    if rules:
        resolved = _resolve(job, variables, rules)
        arrays = resolved.only(is_base).read(variables, job.partitioner.mesh)
    if frozen_base.base_specs(variables).keys() - arrays.keys():
        initial = job.partitioner.initialize_train_state(job.prng_key, with_opt_states=False)
        found = zip(records.by_path(variables), jax.tree.leaves(initial), strict=True)
        arrays = {path: leaf for path, leaf in found if is_base(path)} | arrays
    return arrays, _record(variables, arrays, rules, resolved, restored_from)


def _record(
    variables: TrainState,
    base: Mapping[str, jax.Array],
    rules: Mapping[Any, Any],
    resolved: ResolvedRules | None,
    restored_from: str | None,
) -> BaseRecord:
    """Returns a record of the frozen base: its sources and checksums. Logs a warning about arrays that no rule loads."""
    parts = () if resolved is None else zip(rules, resolved.parts, strict=True)
    used = [(str(directory), source.name, paths) for directory, (source, paths) in parts if any(map(is_base, paths))]
    loaded = {path for _, _, saved_paths in used for path in saved_paths}
    if initial := [path for path in base if path not in loaded]:
        logging.warning(
            "%s of the frozen base, such as %s, are loaded from no checkpoint: they keep the values that "
            "task.train.random_seed gives them",
            count_text(len(initial), "variable"),
            initial[0],
        )
    directories, sources = tuple(directory for directory, _, _ in used), tuple(source for _, source, _ in used)
    with Phase("computing the checksums of the frozen base"):
        specs = frozen_base.base_specs(variables)
        dtypes = {path: records.dtype_name(specs[path].dtype) for path in base}
        return BaseRecord(directories, sources, checksums(base, specs), dtypes, restored_from)


def _prepared(job: Job, metadata: Layout, state: TrainState, loaded: set[str]) -> dict[str, jax.Array]:
    """Returns {path: array} for DoRA adapters that weren't loaded, with magnitudes set from the base; {} without DoRA.

    Args:
      state: the state. It already contains the loaded base.
      loaded: paths of the adapters that were loaded.
    """
    model = job.task.lora_model
    if not model.settings.dora:
        return {}
    layout = metadata.without_opt_states()
    specs = records.by_path(layout.variables)
    wanted = [path for path in specs if is_adapter(path) and path not in loaded]
    shardings = dict(zip(specs, jax.tree.leaves(layout.shardings), strict=True))

    def prepare(padded: TrainState) -> dict[str, jax.Array]:
        logical = layout.slice(padded)
        fitted = layout.pad(dataclasses.replace(logical, mdl_vars=model.prepare(logical.mdl_vars)))
        leaves = dict(zip(specs, jax.tree.leaves(fitted), strict=True))
        return {path: leaves[path] for path in wanted}

    compiled = jax.jit(prepare, out_shardings={path: shardings[path] for path in wanted})
    found: dict[str, jax.Array] = compiled(state.to_eval_state())
    return found
