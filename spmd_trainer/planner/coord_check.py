"""`--mode=coord_check`: checks that training changes activations by the same amount at every model width, as muP promises.

The check trains for a few steps at several multiples of muP's base widths, on one batch and one device. A "product" is a matrix
product or convolution of the forward pass. For each product and width, the check measures how much training has changed the
product's result (mean absolute difference). With muP, the change hardly depends on the width: the slope of log(change) over
log(width) is near 0. This is the coordinate check of Yang et al. 2022 (arXiv:2203.03466, appendix D.1), but it compares changes
instead of values, because the values may shrink with width at initialization, as logits do.
"""

from __future__ import annotations

import dataclasses
import html
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from praxis import pax_fiddle, schedules

from spmd_trainer import tasks_lib
from spmd_trainer.errors import UserError, terminal
from spmd_trainer.planner.nan_origin import layer_of
from spmd_trainer.planner.value_flags import LITERAL, Frame, run_with_flags
from spmd_trainer.sharding import page
from spmd_trainer.sharding.messages import table_lines
from spmd_trainer.step import masks, mup, step_fns
from spmd_trainer.step.partitioner import Partitioner
from spmd_trainer.storage import files
from spmd_trainer.tasks_lib import SingleTask
from spmd_trainer.train_states import PyTree, TrainState
from spmd_trainer.training import experiment_config, reference_files, verify
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import CoordCheckConfig
from spmd_trainer.training.run_directory import report_directory
from spmd_trainer.watch.pages import fact, shared

FILE = "coord_check.html"
# Slopes that count as flat. The standard parametrization has slopes of 0.5 or more; one in which wide models hardly change their
# features has -0.5. Between narrow widths, products that begin as sums of random terms (logits, queries with keys) shrink too.
FLAT = (-0.4, 0.25)
_PRODUCTS = ("dot_general", "grouped_dot", "conv_general_dilated")
# Number of initializations over which each change is averaged, because a single initialization gives a noisy result.
_STARTS = 5
# Number of elements that are compared in the result of each product.
_SAMPLE = 4096
_SIZE = (640, 360)


@dataclasses.dataclass(frozen=True)
class Curve:
    """How much training changes the result of one product (matrix product or convolution), at several model widths.

    Attributes:
      name: path of the product's weight, or its layer if it has no weight. Repeated names get a number, e.g. ' (2)'.
      changes: {multiple of the base widths: mean absolute change of the result between the initial and the final train state}.
    """

    name: str
    changes: Mapping[int, float]

    @property
    def slope(self) -> float:
        """Slope of log(change) over log(width)."""
        x, y = np.log(list(self.changes)), np.log(np.maximum(list(self.changes.values()), np.finfo(np.float32).tiny))
        return float(np.polyfit(x, y, 1)[0])

    @property
    def texts(self) -> list[str]:
        """The slope and the changes, formatted as cells of a table."""
        return [f"{self.slope:+.2f}", *(f"{change:.3g}" for change in self.changes.values())]

    @property
    def is_flat(self) -> bool:
        """True if the change has about the same size at each width, i.e. the slope lies in the range `FLAT`."""
        return FLAT[0] <= self.slope <= FLAT[1]


def check(job: Job) -> None:
    """Prints a `Curve` for each matrix product of the model, and whether the curve is flat: equally large changes at all widths.

    Writes an HTML page if a job directory was given.

    Raises:
      UserError: the job has several processes, `task.mup` is not set, a base width is not an integer, or the model's program
        has other matrix products at one width than at another.
      SystemExit: a curve is not flat. The exit status is 1.
    """
    if jax.process_count() > 1:
        raise UserError("--mode=coord_check runs in one process only, because it compares narrow models on one device")
    config = job.config.of(CoordCheckConfig)
    found = curves(job, config.multiples, config.coord_steps, without=config.without_mup)
    multiples = [f"width x {multiple}" for multiple in config.multiples]
    rows = [
        ("", "slope", *multiples, "change of the products of"),
        *(("" if curve.is_flat else "NOT FLAT", *curve.texts, curve.name) for curve in found),
    ]
    terminal.write("\n".join([*table_lines(rows, right=range(1, len(rows[0]) - 1)), ""]))
    steep = [curve for curve in found if not curve.is_flat]
    said = f"{len(steep)} of {len(found)} curves are not flat" if steep else f"all {len(found)} curves are flat"
    parametrisation = "without muP" if config.without_mup else "with muP"
    said = f"{said} {parametrisation}, after {config.coord_steps} steps (slopes from {FLAT[0]:g} to {FLAT[1]:g})"
    terminal.write(f"{said}\n")
    if config.writes_reports:
        path = report_directory(config.job_log_dir) / FILE
        files.write_atomically(path, coord_page(config.experiment.name, said, found).split("\n"))
        logging.info("wrote %s", path)
    if steep:
        raise SystemExit(1)


def curves(job: Job, multiples: Sequence[int], steps: int, *, without: bool = False) -> list[Curve]:
    """Trains at each multiple of the base widths. Returns a curve for each matrix product or convolution, in execution order.

    All steps train on the input's first batch. The learning rate is constant: the learner's rate without its schedule. The model
    computes in float32, because bfloat16 would round small changes away.

    Args:
      job: the job. The width of its own model doesn't matter.
      multiples: multiples of the base widths, ascending.
      steps: train steps at each width.
      without: if True, trains without muP.
    """
    source = reference_files.attach_zeros(job.build_train_input())
    batch = job.cut(source.get_next_padded())
    changes = {}
    for multiple in multiples:
        task = _task(job, multiple, without=without)
        partitioner = verify.single_device_partitioner(task, job.process_inputs_shape_dtype)
        changes[multiple] = _changes(partitioner, batch, steps, job.prng_key)
        logging.info("trained at %d times the base", multiple)
    names = next(iter(changes.values()))
    if any(found.keys() != names.keys() for found in changes.values()):
        raise UserError(
            "--mode=coord_check: the model's program has other products at other widths, so they can't be compared"
        )
    return [Curve(name, {multiple: found[name] for multiple, found in changes.items()}) for name in names]


def _task(job: Job, multiple: int, *, without: bool) -> SingleTask:
    experiment = job.config.experiment
    mup_p = experiment.task_p.mup
    if mup_p is None:
        raise UserError(
            "--mode=coord_check needs task.mup, whose base is the narrowest width, e.g. Config(st.Mup, base={'MODEL_DIMS': 64})"
        )
    wider = [f"{name}={_times(name, value, multiple)!r}" for name, value in mup_p.base.items()]
    task_p = experiment_config.resolve(experiment.name, [*experiment.overrides, *wider]).task_p
    if without:
        task_p.mup = None
    task_p.model.fprop_dtype = jnp.float32
    if getattr(task_p.train.learner.optimizer, "lr_schedule", None) is not None:
        task_p.train.learner.optimizer.lr_schedule = pax_fiddle.Config(schedules.Constant, value=1.0)
    return tasks_lib.build_task(task_p)


def _times(name: str, value: Any, multiple: int) -> Any:
    if isinstance(value, list | tuple):
        return [_times(name, one, multiple) for one in value]
    if not isinstance(value, int) or isinstance(value, bool):
        raise UserError(
            f"--mode=coord_check multiplies the widths of task.mup.base, and {name} is {value!r}; give a number"
        )
    return value * multiple


def _changes(partitioner: Partitioner, batch: PyTree, steps: int, key: jax.Array) -> dict[str, float]:
    """Trains at one width from several initializations. Returns {`Curve.name`: mean absolute change of the product's result}."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), batch)
    probed = partitioner.partition(step_fns.eval_step, shapes, is_eval=True).trace(jax.eval_shape(lambda: key))
    frames: list[Frame] = []

    def probe(*args: Any) -> PyTree:
        _, samples, frame = run_with_flags(probed.jaxpr, args, measure=_sample)
        frames.append(frame)
        return samples

    # Its compilation takes longer than its runs.
    on_cpu = partitioner.mesh.devices.flat[0].platform == "cpu"
    compiled = jax.jit(probe, compiler_options={"xla_backend_optimization_level": 0} if on_cpu else None)
    step, start = partitioner.partition(step_fns.train_step, shapes, is_eval=False), partitioner.init_fn()
    rows = partitioner.layout.put(batch)

    def products(state: TrainState) -> PyTree:
        with jax.set_mesh(partitioner.mesh):
            return compiled(*jax.tree.leaves((state.to_eval_state(), key, rows)))

    moved = []
    for number in range(_STARTS):
        state = start(jax.random.fold_in(key, number))
        before = products(state)
        for _ in range(steps):
            state, _ = step(state, key, rows)
        moved.append(jax.tree.map(lambda x, y: np.abs(x - y), products(state), before))
    scales, found, counts = mup.scales_of(partitioner.layout.var_weight_hparams), dict[str, float](), Counter[str]()
    paths = dict(enumerate(path for path, _ in masks.with_paths(state.to_eval_state())))
    mean = jax.tree.map(lambda *starts: np.mean(starts, axis=0), *moved)
    for variable, layer, change in _by_product(frames[-1], mean, paths.get):
        path = (variable or "").removeprefix("mdl_vars/")
        name = path or layer
        counts[name] += 1
        # A factor folded into a matrix belongs to the model, and may be meant to shrink the product.
        folded = scales[path].folded if path in scales and scales[path].kind == "hidden" else 1.0
        found[f"{name} ({counts[name]})" if counts[name] > 1 else name] = float(np.mean(change)) / folded
    return found


def _sample(x: jax.Array, primitive: str) -> jax.Array | None:
    """Returns 4,096 random elements of a product's result `x`, as float32; None for primitives that aren't products."""
    if primitive not in _PRODUCTS:
        return None
    return jnp.ravel(x)[np.random.default_rng(0).integers(x.size, size=_SAMPLE)].astype(jnp.float32)


def _by_product(
    frame: Frame, samples: Any, argument: Callable[[int], str | None]
) -> Iterator[tuple[str | None, str, np.ndarray]]:
    """Yields (path of the product's weight or None, layer, sample of the result) for each product in a program.

    Args:
      frame: record of the program, or of a loop body in it.
      samples: the samples of results that `run_with_flags` returned for `frame`.
      argument: given the position of an argument of `frame`, returns the path of that variable, or None if it isn't a variable.
    """

    def variable(number: int) -> str | None:
        if number in frame.arguments:
            return argument(frame.arguments.index(number))
        if number not in frame.producers:
            return None
        sources = [one for one in frame.operations[frame.producers[number][0]].inputs if one != LITERAL]
        return variable(sources[0]) if len(sources) == 1 else None

    makers = {maker: number for number, (maker, _) in frame.producers.items()}
    for index, operation in enumerate(frame.operations):
        found = [variable(number) for number in operation.inputs]
        if operation.body is not None:
            yield from _by_product(operation.body, samples["bodies"][str(index)], found.__getitem__)
        elif operation.primitive in _PRODUCTS:
            layer = layer_of(operation.scope) or operation.where.rpartition("/")[2]
            yield next(filter(None, found), None), layer, samples["own"][..., frame.flagged[makers[index]], :]


def coord_page(experiment: str, verdict: str, found: Sequence[Curve]) -> str:
    """Returns the HTML page of a coordinate check, with a plot of all curves and a table with one row per curve."""
    steep = [curve for curve in found if not curve.is_flat]
    steepest = max(found, key=lambda curve: abs(curve.slope))
    rows = "".join(
        f'<tr class="{"" if curve.is_flat else "bad"}"><th scope="row">{html.escape(curve.name)}</th>'
        + "".join(f"<td class=num>{text}</td>" for text in curve.texts)
        + "</tr>"
        for curve in found
    )
    heads = "".join(
        f'<th scope="col" class=num>{text}</th>' for text in ("slope", *(f"x {m}" for m in found[0].changes))
    )
    body = (
        f'<p class="kicker">Coordinate check</p><h1>{html.escape(experiment)}</h1><p class="note">{html.escape(verdict)}</p>'
        f'<div class="facts">{fact("Steepest slope", f"{steepest.slope:+.2f}", steepest.name, "bad" if steep else "good")}</div>'
        '<div class="card"><h2>Change of the products of each layer, by width</h2>'
        f'{_plot(found)}</div><div class="card"><table>'
        f'<thead><tr><th scope="col">Products of</th>{heads}</tr></thead><tbody>{rows}</tbody></table></div>\n'
    )
    return page.document(f"{experiment}: coordinate check", body, styles=(shared("page.css"),))


def _plot(found: Sequence[Curve]) -> str:
    width, height = _SIZE
    multiples = list(found[0].changes)
    sizes = [size for curve in found for size in curve.changes.values() if size > 0] or [1.0]
    low, high = math.floor(math.log10(min(sizes))), math.ceil(math.log10(max(sizes)) + 1e-9)

    def x(multiple: float) -> float:
        return 60 + (width - 80) * math.log(multiple / multiples[0]) / math.log(multiples[-1] / multiples[0])

    def y(size: float) -> float:
        return 20 + (height - 60) * (high - max(math.log10(size), low) if size > 0 else high - low) / (high - low)

    marks = [f'<text x="{x(m):.0f}" y="{height - 20}" text-anchor="middle">x {m}</text>' for m in multiples]
    for power in range(low, high + 1):
        at = y(10.0**power)
        marks.append(f'<line x1="60" x2="{width - 20}" y1="{at:.0f}" y2="{at:.0f}" stroke="var(--line)"/>')
        marks.append(f'<text x="52" y="{at + 4:.0f}" text-anchor="end">1e{power}</text>')
    for curve in found:
        points = " ".join(f"{x(multiple):.1f},{y(size):.1f}" for multiple, size in curve.changes.items())
        colour = "accent" if curve.is_flat else "bad"
        marks.append(
            f'<polyline points="{points}" fill="none" stroke="var(--{colour})"><title>{html.escape(curve.name)}: slope '
            f"{curve.slope:+.2f}</title></polyline>"
        )
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="Changes by width">{"".join(marks)}</svg>'
