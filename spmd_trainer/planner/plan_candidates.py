"""The candidates that `--mode=plan` searches: meshes, rematerialization policies, numbers of minibatches and batch sizes.

`Try` is a change of a candidate that `--search=memory` may make.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence

from praxis.layers import AutodiffCheckpointType

from spmd_trainer.errors import UserError
from spmd_trainer.step.mesh_choice import mesh_flag
from spmd_trainer.training.experiment_config import ResolvedExperiment

_MOST_MINIBATCHES = 8
# A candidate's global batch size is the experiment's, multiplied by one of these.
_BATCH_FACTORS = (0.5, 1, 2, 4)
_POLICY_FIELD = re.compile(r"^(task\.model\.\S*\bcheckpoint_policy): (.*)", re.MULTILINE)
_BATCH_FIELD = re.compile(r"^(train_datasets\[0\]\.batch_size(?:\.global_batch_size)?): (\d+)$", re.MULTILINE)

# See `Candidate.settings`.
Settings = tuple[str | None, int | None, tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to run an experiment on the chips of a topology.

    Attributes:
      mesh: name and size of each mesh axis, outermost first.
      remat: value for all `checkpoint_policy` fields of the model; None to keep the experiment's values.
      minibatches: the partitioner's `num_minibatches`; None to keep the experiment's number.
      rows: number of rows (examples) in the global batch; None to keep the experiment's number.
      more: further overrides of the experiment's config, each as 'path=value'.
    """

    mesh: tuple[tuple[str, int], ...]
    remat: str | None = None
    minibatches: int | None = None
    rows: int | None = None
    more: tuple[str, ...] = ()

    @property
    def settings(self) -> Settings:
        """(remat, rows, more), the candidate's changes to the experiment's config. Its mesh and minibatches are set by flags."""
        return self.remat, self.rows, self.more

    def overrides(self, experiment: ResolvedExperiment) -> tuple[str, ...]:
        """Returns the config overrides that apply the candidate's settings, each as 'path=value'."""
        found = [f"{path}={self.remat!r}" for path in policy_fields(experiment)] if self.remat else []
        if self.rows is not None:
            field, _ = batch_field(experiment)
            found.append(f"{field}={self.rows}")
        return (*found, *self.more)

    def flags(self, experiment: ResolvedExperiment) -> str:
        parts = [f"--mesh={mesh_flag(self.mesh)}"]
        if self.minibatches is not None:
            parts.append(f"--num_minibatches={self.minibatches}")
        parts += [f"--fdl.set={quoted(override)}" for override in self.overrides(experiment)]
        return " ".join(parts)

    def __str__(self) -> str:
        parts = [mesh_flag((axis, size) for axis, size in self.mesh if size > 1) or "one device"]
        parts += [self.remat] if self.remat else []
        parts += [f"{self.minibatches} minibatches"] if self.minibatches else []
        parts += [f"{self.rows} rows"] if self.rows else []
        parts += [override.rpartition(".")[2] for override in self.more]
        return ", ".join(parts)


@dataclasses.dataclass(frozen=True)
class Try:
    """A memory-saving change of a candidate that `--search=memory` may try next.

    Attributes:
      rung: name of the change, e.g. 'remat save_nothing'.
      change: function that takes a candidate and returns it with the change added.
      predicted: predicted bytes per chip with the change; None if there is no prediction.
    """

    rung: str
    change: Callable[[Candidate], Candidate]
    predicted: int | None = None


def setting(path: str, value: str) -> Callable[[Candidate], Candidate]:
    """Returns a function that overrides the config field `path` of a candidate by a string, in place of an earlier override."""

    def change(at: Candidate) -> Candidate:
        others = tuple(override for override in at.more if not override.startswith(f"{path}="))
        return dataclasses.replace(at, more=(*others, f"{path}={value!r}"))

    return change


def quoted(override: str) -> str:
    """Quotes a config override for the shell, with double quotes if they suffice."""
    return shlex.quote(override) if re.search(r'["$`\\!]', override) else f'"{override}"'


def policy_fields(experiment: ResolvedExperiment) -> dict[str, str]:
    """Returns {path: value} of the config fields that set rematerialization policies."""
    return dict(_POLICY_FIELD.findall("\n".join(experiment.lines())))


def batch_field(experiment: ResolvedExperiment) -> tuple[str, int]:
    """Returns the config path and the value of the training input's global batch size.

    Raises:
      UserError: the input's `batch_size` is not a number in the config, or a batch ramp sets it.
    """
    found = _BATCH_FIELD.search("\n".join(experiment.lines()))
    if not found or experiment.task_p.train.batch_ramp:
        raise UserError(
            f"--search=batch: experiment {experiment.label} has no train_datasets[0].batch_size that is a number, or a "
            "batch_ramp instead of it; leave 'batch' out of --search"
        )
    return found[1], int(found[2])


def meshes(axes: Sequence[str], num_devices: int, num_slices: int = 1) -> Iterator[tuple[tuple[str, int], ...]]:
    """Yields all meshes with these axes, as ((axis, size), ...): each way to write `num_devices` as a product of axis sizes.

    Leaves out a mesh if the size of its outermost axis (not counting axes of size 1) isn't a multiple of `num_slices`.
    """
    divisors = [size for size in range(1, num_devices + 1) if num_devices % size == 0]
    for sizes in itertools.product(divisors, repeat=len(axes) - 1):
        last, rest = divmod(num_devices, math.prod(sizes))
        mesh = (*sizes, last)
        outermost = next((size for size in mesh if size > 1), 1)
        if last and not rest and outermost % num_slices == 0:
            yield tuple(zip(axes, mesh, strict=True))


def enumerate_candidates(
    experiment: ResolvedExperiment, searched: Sequence[str], *, mesh: Mapping[str, int], num_slices: int, rows: int
) -> list[Candidate]:
    """Returns the candidates: all combinations of the searched settings.

    Args:
      experiment: the experiment.
      searched: which settings to vary; see `PlanConfig.search`.
      mesh: the job's own mesh, {axis: size}. All candidates have the same axes and the same number of devices.
      num_slices: number of TPU slices, connected by the data-center network.
      rows: the job's own number of rows in the global batch.

    Raises:
      UserError: the experiment's batch size can't be overridden, or its model has no `checkpoint_policy`.
    """
    policies: list[str | None] = [None]
    if "remat" in searched:
        if not policy_fields(experiment):
            raise UserError(
                f"--search=remat: the model of experiment {experiment.label} has no checkpoint_policy; leave 'remat' out of "
                "--search"
            )
        policies = [policy.value for policy in AutodiffCheckpointType]
    batches: list[int | None] = [None]
    if "batch" in searched:
        batch_field(experiment)
        batches = [int(rows * factor) for factor in _BATCH_FACTORS if rows * factor >= 1 and rows * factor % 1 == 0]
    all_meshes = (
        list(meshes(tuple(mesh), math.prod(mesh.values()), num_slices)) if "mesh" in searched else [tuple(mesh.items())]
    )
    found = []
    for batch in batches:
        parts: list[int | None] = [None]
        if "minibatches" in searched:
            whole = batch or rows
            parts = [2**n for n in range(_MOST_MINIBATCHES.bit_length()) if whole % 2**n == 0]
        for shape, policy, number in itertools.product(all_meshes, policies, parts):
            found.append(Candidate(shape, policy, number, batch))
    return found
