"""How what a run costs grows: with devices (host devices), layers, batch, and variables; trainer against floor.

    python -m benchmarks.growth [--rounds 3] [--curves devices,layers,batch,variables] [--plots DIR] [--json FILE]

Devices, layers and batch: `speed_lm.SpeedLm` and `floor_lm.Floor` in one process for each point, which take turns: seconds
to compile the step, seconds of a step, host work of a step. Variables: a model of that many small ones; seconds until the
trainer knows where each of them lives, and seconds to trace and lower its step, the latter against a hand-written step on
a dict of as many. A plot (PNG) of each curve, log-log, with the slopes: 0 doesn't grow, 1 grows in proportion.

Host devices share the machine's cores: from their curve nothing can be read about how hardware scales, only what the
trainer adds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import pathlib
import subprocess
import sys
import time
from typing import Any

from benchmarks import growth_variables, reporting

SIZES = {
    "devices": (1, 2, 4, 8, 16, 32, 64),
    "layers": (1, 2, 4, 8, 16),
    "batch": (8, 16, 32, 64, 128),
    "variables": (10, 32, 100, 316, 1000, 3162, 10000),
}
ROWS_ON_DEVICES = 64
STEPS = 4
TIMEOUT_SECONDS = 400
TITLES = {
    "compile": "compile the step",
    "step": "one step",
    "step_cpu": "one step, CPU of all threads",
    "host": "host work of a step",
    "setup": "decide where variables live",
    "trace": "trace and lower the step",
}


def measure(curve: str, size: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """One point of a curve, in this process: {quantity: {'trainer': seconds, 'floor': seconds}}."""
    if curve == "variables":
        return growth_variables.measure(size, rounds)
    # The host devices' count stands in the environment, so before JAX.
    import jax
    import numpy as np
    from jax.sharding import AxisType, Mesh

    from benchmarks import floor_lm, steady_step

    data, mdl, layers, rows = 4, 2, floor_lm.SPEED.layers, floor_lm.SPEED.batch
    if curve == "devices":
        mdl, rows = min(2, size), ROWS_ON_DEVICES
        data = size // mdl
    elif curve == "layers":
        layers = size
    else:
        rows = size
    mesh = Mesh(np.array(jax.devices()).reshape(1, data, mdl), tuple(floor_lm.MESH), axis_types=(AxisType.Auto,) * 3)
    floor = floor_lm.Floor(dataclasses.replace(floor_lm.SPEED, layers=layers, batch=rows), mesh)
    overrides = (
        f"task.model.lm_tpl.stacked_transformer_tpl.num_layers={layers}",
        f"train_datasets[0].batch_size={rows}",
    )
    axes = (("replica", 1), ("data", data), ("mdl", mdl))
    compile_seconds = steady_step.seconds_to_compile(overrides, axes)
    turns = steady_step.take_turns(floor, rounds, STEPS, overrides=overrides, mesh=axes, warm_up=STEPS).turns
    return {
        "compile": {"trainer": [compile_seconds], "floor": [floor.compile_seconds]},
        "step": {"trainer": turns.trainer.wall, "floor": turns.floor.wall},
        "step_cpu": {"trainer": turns.trainer.cpu, "floor": turns.floor.cpu},
        "host": {"trainer": turns.host},
    }


def in_fresh_process(curve: str, size: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """`measure` in a process of its own, with the host devices that it needs."""
    devices = size if curve == "devices" else 8
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
    }
    command = [sys.executable, "-m", "benchmarks.growth", f"--measure={curve}:{size}", f"--rounds={rounds}"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    if done.returncode:
        raise SystemExit(f"{curve}={size} failed:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def plot(curve: str, points: dict[int, dict[str, dict[str, list[float]]]], path: pathlib.Path) -> None:
    """One panel for each quantity, log-log: trainer and floor, quartiles as bars, slopes in the legend."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    quantities = list(next(iter(points.values())))
    figure, axes = pyplot.subplots(1, len(quantities), figsize=(4.2 * len(quantities), 4.0), squeeze=False)
    sizes = list(points)
    for axis, quantity in zip(axes[0], quantities, strict=True):
        for name, style in (("trainer", "o-"), ("floor", "s--")):
            if name in points[sizes[0]][quantity]:
                found = [reporting.quartiles(points[size][quantity][name]) for size in sizes]
                _draw(axis, sizes, found, name, style)
        axis.set(xscale="log", yscale="log", title=TITLES[quantity], xlabel=curve, ylabel="seconds")
        axis.set_xticks(sizes, [f"{size:,}" for size in sizes], minor=False, rotation=45 if sizes[-1] > 999 else 0)
        axis.xaxis.set_minor_locator(ticker.NullLocator())
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5), numticks=12))
        axis.yaxis.set_major_formatter(ticker.FuncFormatter(lambda seconds, _: f"{seconds:g}"))
        axis.yaxis.set_minor_locator(ticker.NullLocator())
        axis.grid(visible=True, alpha=0.3)
        axis.legend(fontsize=9)
    figure.suptitle(f"growth with {curve}")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw(axis: Any, sizes: list[int], found: list[dict[str, float]], name: str, style: str) -> None:
    medians = [point["median"] for point in found]
    below = [point["median"] - point["low"] for point in found]
    above = [point["high"] - point["median"] for point in found]
    label = f"{name}, slope {reporting.growth_exponent(sizes, medians):.2f}"
    axis.errorbar(sizes, medians, (below, above), fmt=style, label=label, markersize=5, capsize=2)


def report_curve(report: reporting.Report, curve: str, points: dict[int, Any]) -> None:
    """Prints the ratio at each point, and the slopes."""
    sizes = list(points)
    for quantity in next(iter(points.values())):
        for name in points[sizes[0]][quantity]:
            medians = [reporting.quartiles(points[size][quantity][name])["median"] for size in sizes]
            report.figure(f"{curve}: {quantity}, slope of {name}", reporting.growth_exponent(sizes, medians))
        for size in sizes:
            sides = points[size][quantity]
            if "floor" in sides:
                report.ratio(f"{curve}={size}: {quantity}, trainer / floor", sides["trainer"], sides["floor"])
    report.note(f"{curve}, seconds", {str(size): point for size, point in points.items()})


def main() -> int:
    """Measures, prints and plots."""
    parser = reporting.parser(__doc__, rounds=3)
    parser.add_argument("--curves", default=",".join(SIZES))
    parser.add_argument("--plots", type=pathlib.Path, default=pathlib.Path("benchmarks/results"))
    parser.add_argument("--max", type=int, default=max(map(max, SIZES.values())), help="leaves out what is larger")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        curve, size = args.measure.split(":")
        print(json.dumps(measure(curve, int(size), args.rounds)))
        return 0
    # Many short turns, few of each: a slope over two decades stands where a single ratio would not.
    report = reporting.Report("growth", args.json, limit_spread=math.inf)
    for curve in args.curves.split(","):
        points = {}
        started = time.perf_counter()
        for size in filter(lambda size: size <= args.max, SIZES[curve]):
            points[size] = in_fresh_process(curve, size, args.rounds)
        report_curve(report, curve, points)
        plot(curve, points, args.plots / f"growth_{curve}.png")
        print(f"{args.plots / f'growth_{curve}.png'} after {time.perf_counter() - started:.0f} s", flush=True)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
