"""`--mode=verify`: checks, step by step, that an experiment computes the same numbers on its mesh as on one device."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from spmd_trainer import sharding
from spmd_trainer.errors import UserError, terminal
from spmd_trainer.sharding.messages import mesh_text
from spmd_trainer.step import mesh_choice, opt_state_dtypes, pjit, step_fns
from spmd_trainer.step.layout import Layout
from spmd_trainer.step.packing import summary_name
from spmd_trainer.step.partitioner import Partitioner
from spmd_trainer.tasks_lib import SingleTask
from spmd_trainer.train_states import TrainState
from spmd_trainer.training import reference_files, xla_flags
from spmd_trainer.training.job import BatchSettings, Job
from spmd_trainer.training.run_config import VerifyConfig

# Gradient norms may differ by this multiple of the loss tolerance, because summing over all variables adds rounding errors.
_NORM_SLACK = 10
_GRAD_NORM = "learning/raw_grad_norm"


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """The maximum differences allowed between the two runs that are compared.

    Attributes:
      loss: relative tolerance of the loss; gradient norms may differ by 10 times as much.
      variables: tolerance of a variable's deviation, which is its maximum absolute difference / its maximum absolute value.
      floor: lower bound of the divisor in a deviation; 0 in float32. It is needed in bfloat16, where the gradient of a bias may
        be pure noise. Without a floor, the deviation of a variable with small values would be large.
    """

    loss: float = 1e-5
    variables: float = 1e-4
    floor: float = 0.0

    @classmethod
    def for_task(cls, task: SingleTask) -> Tolerance:
        """Returns the tolerance for the dtype that the task computes in."""
        # bfloat16 has 8 significant bits, and the order of summation depends on the mesh.
        return cls() if jnp.dtype(task.fprop_dtype) == jnp.float32 else cls(loss=1e-2, variables=3e-2, floor=1.0)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The state of a run after a given number of steps.

    Attributes:
      step: number of steps taken; 0 for the initial state.
      loss: loss of the last step; None at step 0.
      grad_norm: gradient norm of the last step before clipping; None if the learner writes no summary of it.
      variables: {path: array of the logical shape} for the whole train state.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    variables: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Comparison of two runs after the same number of steps.

    Attributes:
      step: number of steps taken.
      loss: losses of the two runs, e.g. on one device and on the mesh.
      grad_norm: gradient norms of the two runs.
      worst: path and deviation of the variable with the largest deviation.
      departed: paths of all variables outside the tolerance, in the order of the train state.
      passed: True if losses, norms and variables are all within the tolerance.
    """

    step: int
    loss: tuple[float | None, float | None]
    grad_norm: tuple[float | None, float | None]
    worst: tuple[str, float]
    departed: Sequence[str]
    passed: bool


def run_steps(
    partitioner: Partitioner,
    batches: Iterable[Any],
    prng_key: jax.Array,
    initial: TrainState | None = None,
    compiled: Callable[[jax.stages.Lowered], jax.stages.Compiled] | None = None,
) -> Iterator[Snapshot]:
    """Trains on the given batches. Yields a snapshot of the initial state and one after each step.

    Args:
      partitioner: a partitioner set up with the batches' shapes.
      batches: numpy batches, all of one shape.
      initial: the initial state as numpy arrays of logical shapes; None initializes a state from `prng_key`.
      compiled: function that compiles the lowered step; None compiles it as `jax.jit` does.
    """
    metadata = partitioner.metadata
    batches = iter(batches)
    first = next(batches)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), first)
    step = partitioner.partition(step_fns.train_step, shapes, is_eval=False)
    state = partitioner.initialize_train_state(prng_key) if initial is None else place(metadata, initial)
    fn: Callable[..., Any] = step if compiled is None else compiled(step.lower(prng_key))
    yield Snapshot(0, None, None, _logical(metadata, state))
    for count, batch in enumerate(itertools.chain([first], batches), start=1):
        inputs = partitioner.layout.put(batch)
        state, output = fn(state, prng_key, inputs)
        summaries = {summary_name(name): x for name, x in output.summary_tensors.items()}
        norm = summaries.get(_GRAD_NORM)
        variables = _logical(metadata, state)
        yield Snapshot(count, float(output.loss), None if norm is None else float(norm), variables)


def place(metadata: Layout, logical: TrainState) -> TrainState:
    """Pads a state of numpy arrays of logical shapes with zeros, and places it on the mesh."""
    padded = sharding.pad_uneven(logical, metadata.variables, metadata.variables, metadata.mesh)
    return jax.tree.map(jax.device_put, padded, metadata.shardings)


def _logical(metadata: Layout, state: TrainState) -> dict[str, np.ndarray]:
    """Copies a state to the host; returns {path: numpy array of the logical shape}."""
    on_host = jax.tree.map(np.asarray, state)
    arrays = jax.tree.leaves(sharding.slice_uneven(on_host, metadata.variables, metadata.variables))
    return {variable.path: x for variable, x in zip(metadata.records(), arrays, strict=True)}


def compare(reference: Snapshot, other: Snapshot, tolerance: Tolerance) -> Comparison:
    """Compares the snapshots of two runs after the same number of steps."""
    deviations = {path: deviation(x, other.variables[path], tolerance.floor) for path, x in reference.variables.items()}
    worst = max(deviations, key=deviations.__getitem__)
    departed = [path for path, value in deviations.items() if not value <= tolerance.variables]
    loss, norm = (reference.loss, other.loss), (reference.grad_norm, other.grad_norm)
    passed = not departed and _close(*loss, tolerance.loss) and _close(*norm, _NORM_SLACK * tolerance.loss)
    return Comparison(reference.step, loss, norm, (worst, deviations[worst]), departed, passed)


def deviation(x: np.ndarray, y: np.ndarray, floor: float = 0.0) -> float:
    """Returns max|x - y| / max(max|x|, floor), or infinity if an element is finite in only one of the two arrays."""
    if not x.size:
        return 0.0
    x, y = x.astype(np.float64), y.astype(np.float64)
    if not (np.isfinite(x) == np.isfinite(y)).all():
        return float("inf")
    difference = float(np.nanmax(np.abs(x - y), initial=0.0))
    return difference / max(float(np.nanmax(np.abs(x))), floor, np.finfo(np.float64).tiny) if difference else 0.0


def _close(x: float | None, y: float | None, tolerance: float) -> bool:
    if x is None or y is None:
        return x is y
    return bool(np.isclose(y, x, rtol=tolerance, atol=0.0, equal_nan=True))


def single_device_partitioner(task: SingleTask, inputs_shape_dtype: Any) -> pjit.PjitPartitioner:
    """Returns a partitioner on a one-device mesh with the model's axis names, on which nothing is sharded or padded."""
    names = task.model.mesh_axis_names or [mesh_choice.DEFAULT_AXIS]
    mesh = sharding.create_device_mesh([(name, 1) for name in names], devices=jax.local_devices()[:1])
    partitioner = pjit.PjitPartitioner(mesh)
    partitioner.setup(task, inputs_shape_dtype)
    return partitioner


def verify(job: Job) -> None:
    """Trains twice for `verify_steps` steps and prints both runs side by side.

    One run is on one device, the other on the experiment's mesh. With `verify_against`, both are on the mesh, without and with
    these XLA options. Optimizer states are kept in float32, because with fewer bits a difference in the last bit can change the
    direction of rounding, so that two correct runs differ by a whole rounding step.

    Raises:
      UserError: the job has several processes, or the installed XLA doesn't know an option.
      SystemExit: the runs differ by more than the dtype's tolerance; the exit status is 1.
    """
    if jax.process_count() > 1:
        raise UserError("--mode=verify runs in one process only, because it compares whole variables on the host")
    if opt_state_dtypes.changes(job.task.learner):
        job = _with_float32_states(job)
        terminal.write(
            "optimizer states are kept in float32 here, not as opt_state_dtype says: a last bit decides how fewer are rounded\n"
        )
    source = reference_files.attach_zeros(job.build_train_input())
    batches = [job.cut(source.get_next_padded()) for _ in range(job.config.of(VerifyConfig).verify_steps)]
    mesh = mesh_text(job.partitioner.mesh.shape)
    options = job.config.of(VerifyConfig).verify_against
    on_mesh = functools.partial(run_steps, job.partitioner, batches, job.prng_key)
    if options is None:
        one_device = single_device_partitioner(job.task, job.process_inputs_shape_dtype)
        first = run_steps(one_device, batches, job.prng_key)
        _compare_runs(job, first, on_mesh(), ("one device", "mesh"), f"on one device and on {mesh}")
        return
    device = job.partitioner.mesh.devices.flat[0]
    own = xla_flags.flags_for(job.config.experiment.experiment, device)
    _check_options(options, own, device)
    compiled = functools.partial(
        xla_flags.compile_with, experiment=job.config.experiment.label, where="--verify_against"
    )
    shown = " ".join(f"{name}={xla_flags.value_text(value)}" for name, value in options.items())
    without, with_options = (
        on_mesh(compiled=functools.partial(compiled, flags=own)),
        on_mesh(compiled=functools.partial(compiled, flags={**own, **options})),
    )
    _compare_runs(job, without, with_options, ("without", "with"), f"on {mesh} without and with {shown}")


def _with_float32_states(job: Job) -> Job:
    """Returns the job on the same mesh, with a learner that keeps its state in float32."""
    learner = copy.copy(job.task.learner)
    learner.opt_state_dtype, learner.opt_state_dtype_rules = opt_state_dtypes.FLOAT32, ()
    minibatches = job.partitioner.num_minibatches
    batch = BatchSettings(job.partitioner.mesh.size, minibatches, minibatches)
    return dataclasses.replace(job, task=job.task.with_learner(learner)).on_mesh(job.partitioner.mesh, batch)


def _check_options(options: xla_flags.Options, own: Mapping[str, Any], device: jax.Device) -> None:
    """Refuses XLA options that would leave the programs of the two compared runs identical.

    Raises:
      UserError: an option is for a different kind of device, or the experiment's XLA_FLAGS already set all these values.
    """
    for name in options:
        if not xla_flags.is_for(name, device):
            raise UserError(
                f"--verify_against: {name} changes nothing on {device.device_kind} devices; compare it where it is used, or "
                f"give an option of {device.platform} or of all devices"
            )
    if all(name in own and own[name] == value for name, value in options.items()):
        raise UserError(
            f"--verify_against: the experiment's XLA_FLAGS already have {', '.join(options)} with these values; give others"
        )


def _compare_runs(
    job: Job, first: Iterator[Snapshot], second: Iterator[Snapshot], names: tuple[str, str], between: str
) -> None:
    """Prints a table with a line for each step of two runs, and whether the runs agree.

    Args:
      first, second: the snapshots of the two runs, as `run_steps` yields them.
      names: the names of the two runs, for the table's header.
      between: how the two runs differ, for messages, e.g. 'on one device and on data=4'.

    Raises:
      SystemExit: the runs differ by more than the tolerance; the exit status is 1.
    """
    tolerance = Tolerance.for_task(job.task)
    numbers_of = [f"{what}, {name}" for what in ("loss", "grad norm") for name in names]
    terminal.write(_row("step", *numbers_of, "deviation", "of variable"))
    failed: Comparison | None = None
    same_bits = True
    for one, other in zip(first, second, strict=True):
        result = compare(one, other, tolerance)
        same_bits &= all(x.tobytes() == other.variables[path].tobytes() for path, x in one.variables.items())
        numbers = [_number(x) for x in (*result.loss, *result.grad_norm)]
        terminal.write(_row(str(result.step), *numbers, f"{result.worst[1]:.1e}", result.worst[0]))
        failed = failed or (None if result.passed else result)
    if failed is None:
        bits = "; all bits are the same" if same_bits else ""
        terminal.write(f"same numbers {between} (tolerance: {_text(tolerance)}{bits})\n")
        return
    where = failed.departed[0] if failed.departed else "only the loss or the gradient norm"
    terminal.write(
        f"DIFFERENT numbers {between}, starting at step {failed.step} (tolerance: {_text(tolerance)})\n"
        f"first difference: {where}; {len(failed.departed)} variables outside the tolerance at that step\n"
    )
    logging.error("verify failed at step %d", failed.step)
    raise SystemExit(1)


def _row(*cells: str) -> str:
    """Formats one line of the table. `cells`: step, losses, gradient norms, deviation, and path of a variable."""
    step, *numbers, path = cells
    return "  ".join([f"{step:>4}", *(f"{cell:>21}" for cell in numbers), path]) + "\n"


def _number(x: float | None) -> str:
    return "" if x is None else f"{x:.7g}"


def _text(tolerance: Tolerance) -> str:
    return f"loss {tolerance.loss:g}, variables {tolerance.variables:g}"
