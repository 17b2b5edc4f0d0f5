"""Plans a train step: compiles it ahead of time and reports bytes per chip, collectives and FLOPs.

With `--topology`, planning works on a machine without accelerators. It then needs a package extra that installs the compiler for
the chips: `tpu` or `plan-gpu`. Bytes and collectives are read from the compiled program, not computed by a formula.
"""

from __future__ import annotations

import dataclasses
import html
import re
import time
from collections.abc import Mapping
from typing import Any

import jax

from spmd_trainer.errors import UserError, first_line
from spmd_trainer.kernels.chips import BY_TOPOLOGY, GIB, chip, model_flops
from spmd_trainer.planner import hlo_collectives, hlo_liveness, plan_memory, roofline
from spmd_trainer.sharding.messages import bytes_text, count_text, mesh_text
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import ChipsConfig

# Share of a GPU's memory that JAX takes by default: https://docs.jax.dev/en/latest/gpu_memory_allocation.html.
_GPU_SHARE = 0.75
# Largest share that the plan advises: CUDA, cuDNN and NCCL need the remaining memory.
_MOST_OF_GPU = 0.95
_CLIMB = "--mode=plan --search=memory finds what makes it fit"
# The TPU compiler's message about a program that doesn't fit, with the bytes of all its arrays or of its temporaries.
_REFUSED = re.compile(
    r"Used (?P<all>[\d.]+)(?P<unit>[BKMGT]) of [\d.]+[BKMGT] hbm"
    r"|memory required for HLO temporaries \((?P<temporaries>[\d.]+)(?P<unit_of_temporaries>[BKMGT])\)"
)


@dataclasses.dataclass(frozen=True)
class ChipBytes:
    """Bytes that a compiled step needs on one chip.

    Attributes:
      arguments: bytes of train state and batch.
      temporaries: bytes of activations, gradients and gathered variables at their peak.
      outputs: bytes of the new state and the scalars, except outputs that reuse the buffers of donated arguments.
      peak: maximum number of bytes that are live at the same time, arguments included. `total` also includes the gaps between
        buffers, which the compiler closes if memory is tight. None without a topology: not reported for host devices.
    """

    arguments: int
    temporaries: int
    outputs: int
    peak: int | None

    @property
    def total(self) -> int:
        """All bytes that the compiler allocates on one chip."""
        return self.arguments + self.temporaries + self.outputs


def chip_bytes(compiled: Any, topology: str | None) -> ChipBytes:
    """Returns the bytes per chip that the compiler reports for a compiled step. `peak` is None if `topology` is None."""
    memory = compiled.memory_analysis()
    return ChipBytes(
        arguments=memory.argument_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        # The compiler's peak includes the arguments in host memory.
        peak=memory.peak_memory_in_bytes - memory.host_argument_size_in_bytes if topology else None,
    )


@dataclasses.dataclass(frozen=True)
class Plan(ChipBytes):
    """Resources that a compiled train step needs on one chip. Memory sizes are in bytes.

    Attributes:
      chips: number of chips.
      kind: `jax.Device.device_kind` of the chips.
      mesh: mesh axis sizes by name.
      padding: bytes of the state that are padding.
      memory: memory of one chip, or None if unknown.
      num_params: number of elements of the model's variables, trainable and frozen.
      model_flops: 6 * parameters * tokens of the global batch / chips (Kaplan et al. 2020). Leaves out attention, and experts
        that a token doesn't choose. None for models whose batch has no tokens.
      compiler_flops: the compiler's estimate of FLOPs per chip, with each loop body counted once; None if there is no estimate.
      collectives: one record per kind and set of mesh axes: 'kind', 'axes', 'count' (executions per step), 'bytes' (per step).
      estimate: estimated step time; None if the chip's bandwidths are unknown.
      attention: one line of text for each attention kernel chosen, with the reasons for not choosing other kernels.
      xla_flags: the XLA flags that the experiment sets; see `training.xla_flags`.
      least_chips: number of chips that the train state alone would fill if sharded evenly; None if the memory is unknown.
      memory_over_time: live bytes over the program's schedule, and the largest arrays at the peak (shrink these if the step
        doesn't fit). `hlo_liveness` says how accurate it is. None if the instructions are not in execution order.
      seconds: seconds that compiling and analyzing the step took.
    """

    chips: int
    kind: str
    mesh: dict[str, int]
    padding: int
    memory: int | None
    num_params: int
    model_flops: float | None
    compiler_flops: float | None
    collectives: list[dict[str, Any]]
    estimate: roofline.Estimate | None
    attention: list[str]
    xla_flags: dict[str, Any]
    least_chips: int | None
    memory_over_time: plan_memory.MemoryOverTime | None = dataclasses.field(repr=False)
    seconds: float

    @property
    def fits(self) -> bool | None:
        """True if `total` is at most the part of a chip's memory that JAX can use; None if the memory is unknown."""
        return None if self.memory is None else self.total <= usable_memory(self.kind, self.memory)

    def __str__(self) -> str:
        return plan_text(self)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(plan_text(self))}</pre>"


def usable_memory(kind: str, memory: int) -> int:
    """Returns the bytes of a chip's memory that JAX can use (95% on GPUs)."""
    known = chip(kind)
    return memory if known is None or known.gpu is None else int(_MOST_OF_GPU * memory)


def refused_bytes(message: str, arguments: int) -> int | None:
    """Returns the bytes per chip that a step needs, read from the TPU compiler's error message; None if it doesn't say.

    Args:
      message: the error message for a step that doesn't fit.
      arguments: bytes of the step's arguments. They are added if the number in the message leaves them out.
    """
    found = _REFUSED.search(message)
    if found is None:
        return None
    number = float(found["all"] or found["temporaries"]) * 1024 ** (
        "BKMGT".index(found["unit"] or found["unit_of_temporaries"])
    )
    return int(number) + (0 if found["all"] else arguments)


def plan(job: Job) -> Plan:
    """Compiles the job's train step for its mesh and returns the plan.

    Args:
      job: a job whose partitioner has the mesh to plan for. `config.topology` names the topology of its devices.

    Raises:
      UserError: the step doesn't fit (the message has the compiler's table of live buffers), or can't be compiled.
    """
    from spmd_trainer.training import start_up

    topology = job.config.of(ChipsConfig).topology
    started = time.monotonic()
    try:
        step = start_up.compile_train_step(job)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            least = _least_chips(job) or 0
            said = [line for line in str(error).splitlines() if line.strip()][:30]
            lines = [
                "the train step doesn't fit: " + "\n".join(said),
                *([_least_text(least)] if least > 1 else []),
                _CLIMB,
            ]
            raise UserError("\n".join(lines)) from error
        chips_text = topology or "these devices"
        raise UserError(f"the compiler can't compile the train step for {chips_text}: {first_line(error)}") from error
    compiled = step.fn
    text = compiled.as_text()
    metadata, mesh = job.partitioner.metadata, job.partitioner.mesh_shape()
    chips, trained, frozen = job.partitioner.mesh.size, metadata.num_params(), metadata.num_frozen_params()
    shapes = job.inputs_shape_dtype
    tokens = shapes.ids.size if "ids" in shapes else None
    computing, computing_frozen = metadata.num_params(per_token=True), metadata.num_frozen_params(per_token=True)
    flops = model_flops(computing, tokens or 0, num_frozen=computing_frozen)
    cost = compiled.cost_analysis() or {}
    return Plan(
        **vars(chip_bytes(compiled, topology)),
        chips=chips,
        kind=job.partitioner.mesh.devices.flat[0].device_kind,
        mesh=dict(mesh),
        padding=sum(variable.padding_per_device(mesh) for variable in metadata.records()),
        memory=_memory(topology),
        num_params=trained + frozen,
        model_flops=flops / chips if tokens else None,
        compiler_flops=cost.get("flops"),
        collectives=_collectives(text, mesh),
        estimate=roofline.estimate(text, job.partitioner.mesh.devices.flatten().tolist(), mesh),
        attention=list(step.attention),
        xla_flags=dict(step.xla_flags),
        least_chips=_least_chips(job),
        memory_over_time=plan_memory.memory_over_time(hlo_liveness.schedule(text)),
        seconds=time.monotonic() - started,
    )


def _memory(topology: str | None) -> int | None:
    return BY_TOPOLOGY[topology.partition(":")[0]].memory_bytes if topology else None


def _least_chips(job: Job) -> int | None:
    """Returns the number of chips that the train state alone would fill if sharded evenly; None without a topology."""
    memory = _memory(job.config.of(ChipsConfig).topology)
    if memory is None:
        return None
    state = sum(variable.logical_bytes() for variable in job.partitioner.metadata.records())
    return -(-state // usable_memory(job.partitioner.mesh.devices.flat[0].device_kind, memory))


def _least_text(least: int) -> str:
    return (
        f"the state alone fills the memory of {count_text(least, 'chip')} of this kind: the step needs more than that"
    )


def _collectives(text: str, mesh: Mapping[str, int]) -> list[dict[str, Any]]:
    rows: dict[tuple[str, tuple[str, ...]], dict[str, Any]] = {}
    for found in hlo_collectives.find_collectives(text):
        kind, axes = found.kind, found.axes(mesh)
        row = rows.setdefault((kind, axes), {"kind": kind, "axes": list(axes), "count": 0, "bytes": 0})
        row["count"] += found.times
        row["bytes"] += found.times * found.num_bytes
    return sorted(rows.values(), key=lambda row: -row["bytes"])


def plan_text(result: Plan) -> str:
    mesh = mesh_text(result.mesh)
    lines = [
        f"train step on {result.chips} chips ({result.kind}), mesh {mesh}; compiled in {result.seconds:.0f} s",
        f"  {result.num_params:,} parameters",
        *(f"  {line}" for line in result.attention),
        *(f"  XLA flag {name}={value}" for name, value in result.xla_flags.items()),
        "bytes per chip",
        f"  state and batch   {bytes_text(result.arguments):>10}   including {bytes_text(result.padding)} of padding",
        f"  temporaries       {bytes_text(result.temporaries):>10}",
        f"  other outputs     {bytes_text(result.outputs):>10}",
        f"  total             {bytes_text(result.total):>10}   {_fits(result)}",
    ]
    if result.peak is not None:
        lines.append(
            f"  live at the peak  {bytes_text(result.peak):>10}   the rest of the total is gaps between buffers"
        )
    if setting := memory_setting(result.kind, result.total, result.memory):
        lines.append(f"  {setting}")
    if result.model_flops:
        lines.append(f"FLOPs per chip and step: {result.model_flops:.3e} (6 * parameters * tokens; without attention)")
    if result.estimate:
        lines.append(roofline.estimate_text(result.estimate))
    lines.append("collectives per step and chip")
    for row in result.collectives:
        axes = ", ".join(row["axes"]) or "one device"
        lines.append(f"  {row['count']:6} {row['kind']:18} {bytes_text(row['bytes']):>10}   over {axes}")
    lines.append("largest arrays live at the peak" + (": look here first" if result.fits is False else ""))
    for found in result.memory_over_time.largest if result.memory_over_time else ():
        array = found.array if found.count == 1 else f"{found.count} x {found.array}"
        lines.append(f"  {bytes_text(found.num_bytes):>10}   {array:28} {found.operation or 'the compiler'}")
    if result.fits is False:
        lines.append(_advice(result))
    return "\n".join(lines) + "\n"


def memory_setting(kind: str, total: int, memory: int | None) -> str:
    """Returns advice to set the environment variable that lets JAX use more of a GPU's memory; '' if that isn't needed,
    or isn't enough for the step to fit.

    Args:
      kind: the chip's `jax.Device.device_kind`.
      total: bytes that the step needs on one chip.
      memory: bytes of memory of one chip; None if unknown.
    """
    known = chip(kind)
    if known is None or known.gpu is None or not memory or not _GPU_SHARE * memory < total <= _MOST_OF_GPU * memory:
        return ""
    return f"set XLA_PYTHON_CLIENT_MEM_FRACTION={_MOST_OF_GPU}: JAX takes only {_GPU_SHARE:.0%} of a GPU's memory by default"


def _fits(result: Plan) -> str:
    if result.memory is None:
        return "on host devices; the numbers differ on an accelerator"
    share = result.total / result.memory
    limit = "" if usable_memory(result.kind, result.memory) == result.memory else f"; JAX can take {_MOST_OF_GPU:.0%}"
    return f"{'fits' if result.fits else 'DOES NOT FIT'} in {result.memory / GIB:.0f} GiB ({share:.0%}{limit})"


def _advice(result: Plan) -> str:
    if result.arguments > result.temporaries:
        return "most of it is state: split variables over more devices (a larger model or data axis, or fsdp rules)"
    return "most of it is temporaries: use a smaller batch per chip, rematerialisation (checkpoint_policy) or repeated layers"


def misfit(result: Plan, topology: str | None) -> str | None:
    """Returns the error message for a step that doesn't fit its chips; None if it fits or the memory is unknown."""
    if result.fits is not False:
        return None
    least = result.least_chips or 0
    # That the state needs one chip explains nothing.
    why = _least_text(least) if least > 1 else _advice(result)
    return (
        f"the train step doesn't fit {topology}: it needs {bytes_text(result.total)} per chip, "
        f"{_fits(result).partition('in ')[2]}; {why}. {_CLIMB}"
    )
