"""Estimates the time of a compiled train step as a range: at best, its parts overlap fully; at worst, not at all.

Three parts take time on a chip: computation (matrix products, and operations of the vector units), main memory and collectives.
At best, every part runs at the rate of the data sheet, all collectives and asynchronous copies run while the chip computes, and
each instruction takes as long as the slowest of its matrix products, vector operations and memory accesses. At worst, nothing
overlaps: the times of all parts are added up, with the latency of each collective. Matrix products, main memory, and ICI or
NVLink then run at rates measured in benchmarks (`links.py`). The vector units, and the network between slices or NVLink domains,
run at the rates of the data sheet in both cases, because no measurement of them was found.

Two hardware limits apply in both cases. Attention heads that don't fill a TPU's matrix units leave these partly idle. On GPUs,
float32 products take twice as long as bfloat16 products (TF32).

The estimate leaves out the host, the time to launch kernels, the lower rate of small or narrow products, vector units that don't
reach their peak, and contention between collectives. If the program doesn't state a loop's number of iterations, one is assumed.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from spmd_trainer.planner import hlo_collectives, hlo_costs, links

# Maximum number of collectives that a plan's text lists.
_SHOWN = 4


@dataclasses.dataclass(frozen=True)
class CollectiveTime:
    """Total time of all collectives of one kind over the same mesh axes.

    Attributes:
      kind: 'all-gather', ...
      axes: the mesh axes that the collectives cross.
      seconds: total time in one step.
      links: the links used, e.g. 'ICI' or 'NVLink, network'.
    """

    kind: str
    axes: tuple[str, ...]
    seconds: float
    links: str


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Estimated time of one step on one chip. "Measured" rates are those in `links.py`.

    Attributes:
      matrix_flops: FLOPs of the matrix products, including rematerialization and attention.
      memory_bytes: bytes read and written in main memory.
      matrix_seconds: time of the matrix products at the chip's peak.
      achieved_matrix_seconds: time of the matrix products at a measured rate.
      vector_seconds: time of element-wise operations and reductions at the rate of the data sheet.
      memory_seconds: time of `memory_bytes` at the memory's peak bandwidth.
      achieved_memory_seconds: time of `memory_bytes` at a measured bandwidth.
      computing_seconds: sum over all instructions except asynchronous copies; each takes as long as the slowest of its matrix
        products, vector operations and memory accesses.
      inside_seconds, outside_seconds: time of the collectives on the links inside slices (or NVLink domains) and between them.
      achieved_inside_seconds: time of the collectives inside slices (or NVLink domains) at a measured bandwidth.
      latency_seconds: total latency of the collectives. The other times don't include it.
      permute_seconds: part of `inside_seconds` spent on permutations (collective-permute). A permutation uses its links in one
        direction, so two permutations in opposite directions can run at the same time.
      collectives: the collectives by kind and mesh axes, longest first.
    """

    matrix_flops: float
    memory_bytes: int
    matrix_seconds: float
    achieved_matrix_seconds: float
    vector_seconds: float
    memory_seconds: float
    achieved_memory_seconds: float
    computing_seconds: float
    inside_seconds: float
    outside_seconds: float
    achieved_inside_seconds: float
    latency_seconds: float
    permute_seconds: float
    collectives: Sequence[CollectiveTime]

    @property
    def shortest(self) -> float:
        """Step time in seconds if everything that can overlap does."""
        inside = self.inside_seconds - self.permute_seconds / 2
        return max(self.computing_seconds, self.memory_seconds, inside, self.outside_seconds)

    @property
    def achieved_links_seconds(self) -> float:
        """Seconds of all collectives at measured rates, including their latency."""
        return self.achieved_inside_seconds + self.outside_seconds + self.latency_seconds

    @property
    def longest(self) -> float:
        """Step time in seconds if nothing overlaps, at measured rates."""
        computing = self.achieved_matrix_seconds + self.vector_seconds + self.achieved_memory_seconds
        return computing + self.achieved_links_seconds

    @property
    def middle(self) -> float:
        return (self.shortest + self.longest) / 2

    def record(self) -> dict[str, Any]:
        derived = {name: getattr(self, name) for name in ("shortest", "longest", "middle")}
        return dataclasses.asdict(self) | derived


def estimate(
    hlo: str, devices: Sequence[jax.Device], mesh_shape: Mapping[str, int], *, machine: links.Machine | None = None
) -> Estimate | None:
    """Returns the estimated time of a compiled step; None if the chip is unknown.

    Args:
      hlo: the step's text, `jax.stages.Compiled.as_text()`.
      devices: the mesh's devices in row-major order.
      mesh_shape: {mesh axis: size}.
      machine: the chip's rates; None for those in `links.MACHINES`.
    """
    machine = machine or links.machine(devices[0].device_kind)
    if machine is None:
        return None
    flops, num_bytes, vector, computing = 0.0, 0, 0.0, 0.0
    at_peak, achieved = 0.0, 0.0
    for cost in hlo_costs.instruction_costs(hlo):
        flops += cost.times * cost.flops
        num_bytes += cost.times * cost.num_bytes
        of_peak, of_achieved = _matrix_seconds(cost, machine)
        at_peak += cost.times * of_peak
        achieved += cost.times * of_achieved
        operations = cost.vector_ops / machine.vector_ops
        vector += cost.times * operations
        if not cost.overlaps:
            computing += cost.times * max(of_peak, operations, cost.num_bytes / machine.memory)
    rows, latency = _collectives(hlo, links.Links(devices, machine), mesh_shape)
    inside = sum(time.inside for time in rows.values())
    return Estimate(
        matrix_flops=flops,
        memory_bytes=num_bytes,
        matrix_seconds=at_peak,
        achieved_matrix_seconds=achieved,
        vector_seconds=vector,
        memory_seconds=num_bytes / machine.memory,
        achieved_memory_seconds=num_bytes / machine.memory / machine.measured.memory,
        computing_seconds=computing,
        inside_seconds=inside,
        outside_seconds=sum(time.outside for time in rows.values()),
        achieved_inside_seconds=inside / machine.measured.links,
        latency_seconds=latency,
        permute_seconds=sum(time.inside for (kind, _), time in rows.items() if kind == "collective-permute"),
        collectives=sorted(
            (_collective_time(*key, time, machine) for key, time in rows.items()), key=lambda row: -row.seconds
        ),
    )


def _matrix_seconds(cost: hlo_costs.InstructionCost, machine: links.Machine) -> tuple[float, float]:
    # Matrix units take float32 operands as bfloat16 on TPUs, and as TF32 on GPUs.
    work = cost.flops + (cost.float32_flops if machine.chip.gpu else 0.0)
    rate, found = machine.measured.products, cost.attention
    if found is not None and machine.matrix_side:
        work *= -(-found.width // machine.matrix_side) * machine.matrix_side / found.width
    if found is not None and machine.measured.attention:
        rate = machine.measured.attention[found.is_backward]
    return work / machine.chip.peak_flops, work / rate


def _collectives(
    hlo: str, network: links.Links, mesh_shape: Mapping[str, int]
) -> tuple[dict[tuple[str, tuple[str, ...]], links.LinkTime], float]:
    """Returns {(kind, mesh axes): seconds per step} of the collectives, and the total latency of all collectives in seconds."""
    rows: dict[tuple[str, tuple[str, ...]], links.LinkTime] = collections.defaultdict(lambda: links.LinkTime(0.0, 0.0))
    latency = 0.0
    for found in hlo_collectives.find_collectives(hlo):
        time, key = network.seconds(found), (found.kind, found.axes(mesh_shape))
        before = rows[key]
        rows[key] = links.LinkTime(
            before.inside + found.times * time.inside, before.outside + found.times * time.outside
        )
        latency += found.times * network.latency(found)
    return rows, latency


def _collective_time(kind: str, axes: tuple[str, ...], time: links.LinkTime, machine: links.Machine) -> CollectiveTime:
    used = [(machine.inside, time.inside), (machine.outside, time.outside)]
    names = ", ".join(name for name, seconds in used if seconds)
    return CollectiveTime(kind, axes, time.inside + time.outside, names)


def estimate_text(found: Estimate) -> str:
    links_seconds = found.inside_seconds + found.outside_seconds
    lines = [
        f"estimated step {found.shortest:.4g} s (all overlaps) to {found.longest:.4g} s (nothing does)",
        f"  products {found.matrix_seconds:.4g} to {found.achieved_matrix_seconds:.4g} s ({found.matrix_flops:.3e} FLOPs per "
        f"chip), element-wise {found.vector_seconds:.4g} s, "
        f"memory {found.memory_seconds:.4g} to {found.achieved_memory_seconds:.4g} s, "
        f"links {links_seconds:.4g} to {found.achieved_links_seconds:.4g} s",
    ]
    lines += [
        f"  {row.seconds:8.4g} s of {row.kind} over {', '.join(row.axes) or 'one device'} ({row.links})"
        for row in found.collectives[:_SHOWN]
        if row.seconds
    ]
    return "\n".join(lines)
