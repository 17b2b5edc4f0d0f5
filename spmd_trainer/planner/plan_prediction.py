"""Predicts the step times of candidates from the sharding of their variables, to choose which candidates to compile first.

A step's work is counted in passes. A pass is as much work as one forward pass. A step without rematerialization has three passes.

- In each pass, a device multiplies each weight by the activations of its tokens. This reads or writes the weight's input and
  output activations. Values that a layer saves for the backward pass are written once and read once.
- If a weight is sharded over batch axes, it is gathered over these axes once in the forward pass and once in the backward pass of
  each minibatch, and its gradient is summed over these axes.
- If a weight is sharded over other axes, either its input or its output must be unsharded. In each pass, these activations are
  gathered, or summed and scattered, over these axes. Weights of one layer with the same input share this collective.

The prediction leaves out elementwise operations, the exchange of keys and values when a row's tokens are sharded, and routing
to experts.

`optimistic` corrects predictions by comparing them with the estimates for compiled candidates. Candidates that share a setting
have similar prediction errors: e.g. sharding activations over a large axis moves more bytes than predicted under every policy. So
log(estimate / prediction) is modeled as a Gaussian process: a sum of terms for mesh, policy, number of minibatches and batch
size. Each term changes little between similar settings. `_LENGTH` and `_OWN` are round numbers chosen by hand.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.extend import core
from jax.sharding import PartitionSpec
from praxis import base_layer

from spmd_trainer.planner import jaxpr_costs, links
from spmd_trainer.planner.hlo_collectives import Collective
from spmd_trainer.planner.jaxpr_costs import DotCosts
from spmd_trainer.planner.plan_candidates import Candidate
from spmd_trainer.planner.plan_report import Outcome
from spmd_trainer.sharding.jaxprs import live
from spmd_trainer.sharding.messages import short_hash
from spmd_trainer.sharding.variables import VariableSpec
from spmd_trainer.step import host_states, masks, step_fns
from spmd_trainer.step.compiled_step import StepFn
from spmd_trainer.training.job import Job

_STEPS: tuple[tuple[StepFn, bool], ...] = ((step_fns.train_step, False), (step_fns.eval_step, True))
# Text that differs between equal programs: the rematerialization policy, and memory addresses.
_POLICY = re.compile(r"policy=[^\n]*|0x[0-9a-f]+")
# Bytes of an element of a weight, an activation or a gradient in the computation.
_ELEMENT = 2
# A TPU stores arrays in tiles of (8, 128): heads of 64 dimensions take the memory of 128.
_TPU_LANES = 128
# Weights are gathered in the forward pass and in the backward pass.
_GATHERS = 2
# Before any compilation, the predictions' standard deviation is a factor of 2. This prior counts as one compiled candidate.
_SPREAD, _COUNTS = math.log(2), 1
# Distance of two settings (see `_settings`) at which the covariance has fallen to 1 / e. The farthest meshes of 64 chips are 6
# apart.
_LENGTH = 5.0
# Share of the variance that is a candidate's own: no other candidate explains it.
_OWN = 0.05
# A time this many standard deviations below the expected one is beaten by one candidate in 40.
_DEVIATIONS = 2.0


@dataclasses.dataclass(frozen=True)
class Work:
    """Costs of a train step, summed over all devices, from the step's jaxpr.

    Attributes:
      step: costs of the train step's matrix products.
      forward: costs of the matrix products of the forward pass alone.
      saved_bytes: bytes of the activations that the step's loops save; see `jaxpr_costs.saved_bytes`.
      bytes_in_loops: bytes of the arrays that the bodies of the step's loops compute; see `jaxpr_costs.bytes_in_loops`.
    """

    step: DotCosts
    forward: DotCosts
    saved_bytes: float = 0.0
    bytes_in_loops: float = 0.0

    @property
    def passes(self) -> float:
        """FLOPs of the step divided by FLOPs of the forward pass: 3, or up to 4 with rematerialization."""
        return self.step.flops / self.forward.flops if self.forward.flops else 3.0


@dataclasses.dataclass(frozen=True)
class Prediction:
    """Predicted seconds per step, as a range.

    Attributes:
      shortest: seconds if computation, memory and collectives overlap.
      longest: seconds if nothing overlaps, at measured rates.
    """

    shortest: float
    longest: float

    @property
    def seconds(self) -> float:
        """The middle of the range."""
        return (self.shortest + self.longest) / 2


def state_bytes(job: Job) -> tuple[int, int]:
    """Returns the bytes of the train state on one device, and how many of these are padding. Leaves out state in host memory."""
    mesh = job.partitioner.mesh_shape()
    records = [v for v in job.partitioner.metadata.records() if v.memory_kind != host_states.PINNED_HOST]
    whole = sum(v.bytes_per_device(mesh) for v in records)
    return whole, sum(v.padding_per_device(mesh) for v in records)


def predict(job: Job, machine: links.Machine, work: Work, *, minibatches: int = 1) -> Prediction:
    """Returns the predicted step time of a candidate's job on chips with the rates `machine`.

    `work`: the step's costs, from `traced`. `minibatches`: number of minibatches per step; each gathers the weights again.
    """
    mesh, devices = job.partitioner.mesh_shape(), job.partitioner.mesh.size
    of_rows, of_batch = _batch_axes(job)
    weights = list(_weights(job, of_batch))
    tokens_of_row = _tokens_of_row(job, work, weights)
    rows = minibatches * rows_of_device(job, minibatches)
    tokens = rows * tokens_of_row * _size(mesh, of_rows) / _size(mesh, of_batch)
    # Padding of weights and rows makes a device's products larger than total / devices.
    equal = job.num_rows * tokens_of_row * sum(weight.logical_elements for weight in weights) / devices
    growth = max(1.0, tokens * sum(w.layers * w.elements for w in weights) / equal) if equal else 1.0
    network, measured = _Network(job, machine), machine.measured
    # Saved activations and the state are each written once and read once.
    num_bytes = 2.0 * state_bytes(job)[0] + growth * (work.step.batched_bytes + 2.0 * work.step.stacked_bytes) / devices
    for weight in weights:
        size = weight.layers * weight.elements * _ELEMENT
        num_bytes += work.passes * (
            minibatches * size + weight.layers * tokens * (weight.outer + weight.inner) * _ELEMENT
        )
        rest = tuple(axis for axis in of_batch if axis not in weight.of_batch and mesh[axis] > 1)
        times = minibatches * weight.layers
        network.add("all-gather", weight.of_batch, _GATHERS * minibatches * size, _GATHERS * times, combined=True)
        network.add("reduce-scatter", weight.of_batch, minibatches * size, times, combined=True)
        network.add("all-reduce", rest, minibatches * size / _size(mesh, weight.of_batch), times, combined=True)
    for weight in {weight.reads: weight for weight in weights if weight.others}.values():
        activations = work.passes * weight.layers * tokens * weight.outer * _ELEMENT
        network.add("all-gather", weight.others, activations, work.passes * weight.layers * minibatches)
        num_bytes += activations
    flops = growth * (work.step.flops + work.step.kernel_flops) / devices
    products, memory = flops / machine.chip.peak_flops, num_bytes / machine.memory
    links_seconds = network.inside / measured.links + network.outside + network.latency
    return Prediction(
        shortest=max(products, memory, network.inside, network.outside),
        longest=flops / measured.products + memory / measured.memory + links_seconds,
    )


def lower_bound(job: Job, machine: links.Machine, flops: float) -> float:
    """Returns a lower limit for the seconds per step: the longer of two times. One is the time of the matrix products at the
    chips' peak. The other is the time to read the train state from main memory, and to write it without the frozen variables.

    Args:
      job: the candidate's job.
      machine: rates of the job's chips.
      flops: FLOPs of the step, summed over all devices; see `jaxpr_costs.dot_costs`.
    """
    whole, _ = state_bytes(job)
    products = flops / job.partitioner.mesh.size / machine.chip.peak_flops
    return max(products, (2 * whole - _variable_bytes(job, frozen=True)) / machine.memory)


def rows_of_device(job: Job, minibatches: int, rows: int | None = None) -> int:
    """Returns the number of a minibatch's rows on a device, with padding. `rows`: rows in the global batch; None: the job's."""
    parts = _size(job.partitioner.mesh_shape(), _batch_axes(job)[0])
    return -(-(job.num_rows if rows is None else rows) // (minibatches * parts))


def trained_bytes(job: Job) -> int:
    """Returns the bytes of all trainable variables on one device. The gradients of these variables have the same size."""
    return _variable_bytes(job, frozen=False)


def _variable_bytes(job: Job, *, frozen: bool) -> int:
    mesh = job.partitioner.mesh_shape()
    return sum(v.bytes_per_device(mesh) for v, hparam in _params(job) if masks.is_frozen(hparam) == frozen)


def _params(job: Job) -> list[tuple[VariableSpec, base_layer.WeightHParams]]:
    metadata = job.partitioner.metadata
    trees = (metadata.variables.mdl_vars, metadata.var_weight_hparams)
    return list(zip(*(jax.tree.leaves(tree.get(base_layer.PARAMS, {})) for tree in trees), strict=True))


def _size(mesh: Mapping[str, int], axes: Sequence[str]) -> int:
    return math.prod(mesh[axis] for axis in axes)


def _batch_axes(job: Job) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the mesh axes that shard the batch's rows, and those that shard rows or tokens. By default, both are all axes."""
    mesh = job.partitioner.mesh_shape()
    mapping = job.task.train.inputs_split_mapping
    for field in ("map_2d", "map_1d"):
        split = getattr(mapping, field, None) if mapping is not None else None
        if split:
            dims = [tuple(axis for axis in dim if axis in mesh) for dim in _entries(split, len(split))]
            return dims[0], tuple(axis for dim in dims for axis in dim)
    return tuple(mesh), tuple(mesh)


def _entries(split: PartitionSpec | Sequence[str | Sequence[str] | None], rank: int) -> list[tuple[str, ...]]:
    entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in split]
    return entries + [()] * (rank - len(entries))


@dataclasses.dataclass(frozen=True)
class _Weight:
    """A weight matrix as one layer uses it. Its outer dimension is the width of the layer's input or output.

    Attributes:
      layers: number of layers whose weights are stacked in the variable; 1 if it is not stacked.
      logical_elements: number of elements in all layers, without padding.
      elements: elements of one layer's weight on one device while the weight is used, i.e. after the gather over batch axes.
      outer: size of the dimension that is sharded over batch axes. If none is, the size of the largest dimension that is not
        sharded over other axes.
      of_batch, others: the batch axes and the other mesh axes over which the weight is sharded. Axes of size 1 are left out.
      reads: a key that is equal for those weights of one layer that read the same activations.
    """

    layers: int
    logical_elements: int
    elements: int
    outer: int
    of_batch: tuple[str, ...]
    others: tuple[str, ...]
    reads: tuple[str, int, int]

    @property
    def inner(self) -> int:
        """Size of the dimension that is not `outer`, on one device."""
        return self.elements // self.outer


def _weights(job: Job, of_batch: Sequence[str]) -> Iterator[_Weight]:
    mesh = job.partitioner.mesh_shape()
    for variable, hparam in _params(job):
        stacked = len(hparam.repeat_prefix or ())
        shape = variable.padded_shape[stacked:]
        if len(shape) < 2:
            continue
        entries = _entries(variable.spec, len(variable.logical_shape))[stacked:]
        others = tuple(a for entry in entries for a in entry if a not in of_batch and mesh[a] > 1)
        whole = [dim for dim, entry in enumerate(entries) if any(axis in of_batch for axis in entry)]
        free = [dim for dim, entry in enumerate(entries) if not any(axis in others for axis in entry)]
        outer = whole or sorted(free, key=lambda dim: shape[dim])[-1:]
        width = math.prod(shape[dim] for dim in outer)
        yield _Weight(
            layers=math.prod(variable.logical_shape[:stacked]),
            logical_elements=math.prod(variable.logical_shape),
            elements=math.prod(shape) // _size(mesh, others),
            outer=width,
            of_batch=tuple(a for entry in entries for a in entry if a in of_batch and mesh[a] > 1),
            others=others,
            reads=("/".join(variable.path.split("/")[:-2]), outer[0] if outer else 0, width),
        )


def _tokens_of_row(job: Job, work: Work, weights: Sequence[_Weight]) -> float:
    """Returns the tokens per row. If the batch has no token ids, e.g. for images, derives the number from the weights' FLOPs."""
    shapes = job.inputs_shape_dtype
    if "ids" in shapes:
        return float(np.prod(shapes.ids.shape[1:]))
    elements = sum(weight.logical_elements for weight in weights)
    return (work.forward.flops - work.forward.batched_flops) / (2 * job.num_rows * elements) if elements else 0.0


class _Network:
    """Sums the times of collectives over mesh axes."""

    def __init__(self, job: Job, machine: links.Machine):
        mesh = job.partitioner.mesh
        self._links = links.Links(mesh.devices.flatten().tolist(), machine)
        self._positions = np.arange(mesh.size).reshape(mesh.devices.shape)
        self._names = list(mesh.axis_names)
        self._of_a_byte: dict[tuple[str, tuple[str, ...]], tuple[links.LinkTime, float]] = {}
        self._combined: set[tuple[str, tuple[str, ...], float]] = set()
        self.inside = self.outside = self.latency = 0.0

    def add(self, kind: str, axes: tuple[str, ...], num_bytes: float, times: float, *, combined: bool = False) -> None:
        """Adds the time of some collectives to `inside`, `outside` and `latency`.

        Args:
          kind: kind of the collectives, e.g. 'all-gather'.
          axes: mesh axes that the collectives cross, each larger than 1. If empty, nothing is added.
          num_bytes: bytes per device, as in `Collective`, summed over all executions.
          times: number of executions.
          combined: if True, the latency of collectives with equal `kind`, `axes` and `times` is added only once, because the
            compiler merges them.
        """
        if not axes:
            return
        if (kind, axes) not in self._of_a_byte:
            dims = [self._names.index(axis) for axis in axes]
            others = [dim for dim in range(len(self._names)) if dim not in dims]
            members = math.prod(self._positions.shape[dim] for dim in dims)
            groups = self._positions.transpose(others + dims).reshape(-1, members)
            found = Collective(kind, 1, 1, groups)
            self._of_a_byte[kind, axes] = (self._links.seconds(found), self._links.latency(found))
        time, latency = self._of_a_byte[kind, axes]
        self.inside += num_bytes * time.inside
        self.outside += num_bytes * time.outside
        if not combined or (kind, axes, times) not in self._combined:
            self.latency += times * latency
        if combined:
            self._combined.add((kind, axes, times))


def traced(job: Job) -> tuple[str, Work]:
    """Returns the jaxpr of the job's train step as text, and the step's costs. Equal programs have equal texts."""
    step, forward = (_jaxpr(job, fn, is_eval=is_eval) for fn, is_eval in _STEPS)
    computed = live(step).jaxpr
    lanes = _TPU_LANES if job.partitioner.mesh.devices.flat[0].platform == "tpu" else 1
    work = Work(
        jaxpr_costs.dot_costs(computed),
        jaxpr_costs.dot_costs(live(forward).jaxpr),
        jaxpr_costs.saved_bytes(computed, lanes),
        jaxpr_costs.bytes_in_loops(computed),
    )
    return _POLICY.sub("", str(step)), work


def program(job: Job, text: str) -> str:
    """Returns a hash of the compiler's input: the traced step (`text` from `traced`), and the sharding of its arguments."""
    inputs = jax.tree.leaves_with_path(job.partitioner.layout.inputs_partition_spec(job.inputs_shape_dtype))
    layout = [(v.path, v.padded_shape, v.dtype, v.spec) for v in job.partitioner.metadata.records()]
    return short_hash(f"{text}\n{layout}\n{inputs}")


def _jaxpr(job: Job, fn: StepFn, *, is_eval: bool) -> core.ClosedJaxpr:
    step = job.partitioner.partition(fn, job.inputs_shape_dtype, is_eval=is_eval)
    return step.trace(job.abstract_prng_key).jaxpr


def optimistic(outcomes: Sequence[Outcome]) -> dict[int, float]:
    """Returns, for each candidate that hasn't been compiled, a step time in seconds that it is unlikely to beat.

    These times are predictions, corrected by how wrong the predictions of the compiled candidates were.

    Args:
      outcomes: candidates with a predicted time. Those that have been compiled also have `estimated` seconds.

    Returns:
      {Python `id` of the outcome: seconds} for the candidates that haven't been compiled.
    """
    known = [outcome for outcome in outcomes if outcome.estimated]
    waiting = [outcome for outcome in outcomes if not outcome.estimated]
    if not waiting:
        return {}
    mean, below = _correction(known, waiting)
    return {id(o): o.predicted * math.exp(m - _DEVIATIONS * s) for o, m, s in zip(waiting, mean, below, strict=True)}


def _correction(known: Sequence[Outcome], waiting: Sequence[Outcome]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the mean and the standard deviation of log(estimate / prediction) for each candidate in `waiting`."""
    errors = np.array([math.log((outcome.estimated or 0.0) / outcome.predicted) for outcome in known])
    if not len(errors):
        return np.zeros(len(waiting)), np.full(len(waiting), _SPREAD)
    covariance = _covariance([outcome.candidate for outcome in (*known, *waiting)])
    between = covariance[: len(known), : len(known)] + _OWN * np.eye(len(known))
    across = covariance[len(known) :, : len(known)]
    weights = np.linalg.solve(between, np.ones(len(known)))
    mean = float(weights @ errors / weights.sum())
    rest = np.linalg.solve(between, errors - mean)
    variance = (_COUNTS * _SPREAD**2 + float((errors - mean) @ rest)) / (_COUNTS + len(errors))
    unexplained = 1.0 - np.sum(across * np.linalg.solve(between, across.T).T, axis=1)
    return mean + across @ rest, np.sqrt(variance * np.maximum(unexplained, _OWN))


def _covariance(candidates: Sequence[Candidate]) -> np.ndarray:
    """Returns the correlations between the candidates' prediction errors: float [candidates, candidates]."""
    parts = []
    for points in _settings(candidates):
        if np.ptp(points, axis=0).any():  # a setting that all candidates share explains no difference
            distances = np.linalg.norm(points[:, None] - points[None], axis=-1)
            parts.append(np.exp(-distances / _LENGTH))
    covariance: np.ndarray = np.mean(parts, axis=0) if parts else np.ones((len(candidates), len(candidates)))
    return covariance


def _settings(candidates: Sequence[Candidate]) -> list[np.ndarray]:
    """Returns four arrays of points [candidates, coordinates] for the candidates' meshes, policies, minibatches and rows.

    The coordinates of sizes are base-2 logarithms. Two points have a distance of 1 if one mesh axis is half as large and one is
    twice as large, if the policy is different, or if the number of minibatches or rows is doubled.
    """
    policies = sorted({candidate.remat for candidate in candidates}, key=str)
    return [
        np.log2([[size for _, size in c.mesh] for c in candidates]) / math.sqrt(2),
        np.array([[c.remat == policy for policy in policies] for c in candidates], float) / math.sqrt(2),
        np.log2([[c.minibatches or 1] for c in candidates]),
        np.log2([[c.rows or 1] for c in candidates]),
    ]
