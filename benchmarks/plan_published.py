"""Compares the plan's estimate of a step's time with published training runs, rebuilt as experiments of this trainer.

    python -m benchmarks.plan_published [NAME ...] [--programs DIR] [--json FILE]

For each run it compiles the train step for the run's chips and prints the published step beside the estimated range
(`spmd_trainer.planner.roofline`) and the range's middle. Runs on TPUs need the `tpu` extra, those on GPUs `cuda12` or
`cuda13`; a run whose compiler or attention kernel is not installed is left out, and named. No constant of the estimate is fitted
to these results.

What the published programs do otherwise than the ones compiled here is in `Run.differs`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

# Programs are compiled for the topology's chips, so no accelerator is needed here.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from praxis.layers import AutodiffCheckpointType

from spmd_trainer.errors import MissingCompilerError
from spmd_trainer.experiments.lm import gpt2, llama
from spmd_trainer.kernels import kernels
from spmd_trainer.planner import links, roofline

BAR = 0.25
_MESH_AXES = ("replica", "data", "mdl")


@dataclasses.dataclass(frozen=True)
class Run:
    """A published run.

    Attributes:
      base: the experiment whose model it trains.
      topology: as in --topology.
      mesh: sizes of replica, data and mdl.
      rows: global batch.
      tokens: tokens of a row.
      remat: what the forward pass saves.
      seconds: the published step; computed from tokens or FLOPs per second where a comment at the run says so.
      source: where it was published.
      settings: class attributes of the experiment that differ from `base`.
      differs: what the published program does otherwise.
      network: bytes per second of a chip's network, if it is not the usual one of `links.MACHINES`.
    """

    base: type[Any]
    topology: str
    mesh: tuple[int, int, int]
    rows: int
    tokens: int
    remat: AutodiffCheckpointType
    seconds: float
    source: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    differs: str = ""
    network: float | None = None

    def experiment(self) -> type[Any]:
        """Returns the experiment's class."""
        fields = {
            "ICI_MESH_SHAPE": self.mesh,
            "CHECKPOINT_POLICY": self.remat,
            "MAX_SEQ_LEN": self.tokens,
            "PERCORE_BATCH_SIZE": self.rows / (self.mesh[0] * self.mesh[1] * self.mesh[2]),
            **self.settings,
        }
        return type("Published", (self.base,), {"__module__": __name__, **fields})


def _sizes(layers: int, width: int, hidden: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, Any]:
    return {
        "NUM_LAYERS": layers,
        "MODEL_DIMS": width,
        "HIDDEN_DIMS": hidden,
        "NUM_HEADS": heads,
        "NUM_KV_HEADS": kv_heads,
        "HEAD_DIMS": 128,
        "VOCAB_SIZE": vocabulary,
    }


def _step_of(flops_per_second: float, params: float, layers: int, width: int, rows: int, tokens: int) -> float:
    """Returns the step's seconds from FLOP/s per chip as MaxText counted them until July 2025: attention in full.

    Args:
      flops_per_second: of a chip.
      params: of the model.
      layers: number of layers.
      width: heads times their width.
      rows: of a chip.
      tokens: of a row.
    """
    return (6 * params + 12 * layers * width * tokens) * rows * tokens / flops_per_second


_SCALE_32 = _sizes(32, 8192, 28_672, 64, 64, 32_000)  # MaxText's global_parameter_scale=32
_PARAMS_32 = 31.7e9
RUNS = {
    "v5e 32B": Run(
        llama.Llama2_7B,
        "v5e:16x16",
        (1, 256, 1),
        4 * 256,
        2048,
        AutodiffCheckpointType.SAVE_NOTHING,
        # 132 TFLOP/s
        _step_of(132e12, _PARAMS_32, 32, 64 * 128, 4, 2048),
        "https://github.com/AI-Hypercomputer/maxtext, src/maxtext/configs/tpu/v5e: README.md and 32b.sh",
        _SCALE_32,
    ),
    "v6e Llama 2 70B": Run(
        llama.Llama2_70B,
        "v6e:16x16",
        (1, 256, 1),
        4 * 256,
        4096,
        AutodiffCheckpointType.SAVE_NOTHING,
        17.373,
        "https://github.com/AI-Hypercomputer/tpu-recipes (October 2024), training/trillium/Llama2-70B-MaxText; MaxText e7292a3, "
        "benchmarks/maxtext_trillium_model_configs.py: llama2_70b_4096",
    ),
    "v6e GPT-3 175B": Run(
        gpt2.Gpt2Small,
        "v6e:16x16",
        (1, 256, 1),
        3 * 256,
        2048,
        AutodiffCheckpointType.SAVE_NOTHING,
        17.182,
        "https://github.com/AI-Hypercomputer/tpu-recipes, training/trillium/GPT3-175B-MaxText/bf16",
        {**_sizes(96, 12_288, 49_152, 96, 96, 50_304), "MAX_POSITIONS": 2048},
    ),
    "v5p Llama 2 70B": Run(
        llama.Llama2_70B,
        "v5p:8x8x8",
        (1, 512, 1),
        4 * 512,
        4096,
        AutodiffCheckpointType.SAVE_QKV_OUT_PROJ_SEPARATE,
        # 692 tokens per second and chip
        4 * 4096 / 692,
        "https://github.com/AI-Hypercomputer/maxtext, docs/reference/models/tiering.md and, at 92e59fd, "
        "benchmarks/maxtext_v5p_model_configs.py: llama2_70b_v5p_128",
        differs="also saves the output of the feed-forward layers, which the backward pass does not read",
    ),
    "v5p 32B": Run(
        llama.Llama2_7B,
        "v5p:4x4x4",
        (1, 16, 4),
        6 * 64,
        2048,
        AutodiffCheckpointType.SAVE_DOT_ONLY,
        # 328 TFLOP/s
        _step_of(328e12, _PARAMS_32, 32, 64 * 128, 6, 2048),
        "https://github.com/AI-Hypercomputer/maxtext, src/maxtext/configs/tpu/v5p: README.md and 32b.sh",
        _SCALE_32,
    ),
    "H100 Llama 2 7B": Run(
        llama.Llama2_7B,
        "h100:16x8",
        (16, 8, 1),
        4 * 128,
        4096,
        AutodiffCheckpointType.SAVE_DOT_ONLY,
        1.500,
        "https://github.com/AI-Hypercomputer/gpu-recipes (before 9b1c797), training/a3mega/llama-2-7b/maxtext-pretraining-gke, "
        "src/frameworks/a3mega/maxtext-configs/llama-2-7b-128gpus-a3mega-bf16.yaml",
        differs="saves the attention's output, and does not scan over the layers",
        # A host of the A3 Mega machines has 8 NICs of 200 Gbit/s (https://cloud.google.com/compute/docs/gpus).
        network=25e9,
    ),
    "H200 Llama 3.1 70B": Run(
        llama.Llama3_1_70B,
        "h200:32x8",
        (2, 128, 1),
        2 * 256,
        8192,
        AutodiffCheckpointType.SAVE_DOT_FOR_MLPERF_200B,
        15.516,
        "https://github.com/AI-Hypercomputer/gpu-recipes, training/a3ultra/llama3-1-70b/maxtext-pretraining-gke, "
        "src/frameworks/a3ultra/maxtext-configs/llama3-1-70b-256gpus-a3u-bf16.yaml",
    ),
}


@dataclasses.dataclass(frozen=True)
class Result:
    """The estimate of one run beside its published step.

    Attributes:
      published: seconds.
      estimate: see `roofline.Estimate`.
      compiled_in: seconds; 0 if the program's text was kept.
    """

    published: float
    estimate: roofline.Estimate
    compiled_in: float

    @property
    def inside(self) -> bool:
        """True if the published step lies in the range."""
        return self.estimate.shortest <= self.published <= self.estimate.longest

    @property
    def middle_error(self) -> float:
        """How far the range's middle is from the published step, as a fraction of it."""
        return self.estimate.middle / self.published - 1


def estimate(name: str, run: Run, programs: pathlib.Path | None) -> Result:
    """Compiles the run's step, or reads the text of the compiled one that an earlier call kept, and estimates its time."""
    from spmd_trainer.training import start_up
    from spmd_trainer.training.job import Job
    from spmd_trainer.training.run_config import make_run_config

    started = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        config = make_run_config(run.experiment(), directory, mode="inspect", topology=run.topology)
        job = Job.build(config)
    kept = programs / f"{name.replace(' ', '_')}.hlo" if programs else None
    if kept and kept.exists():
        text = kept.read_text()
    else:
        with kernels.recording() as recorded:
            text = start_up.compile_train_step(job).fn.as_text()
        if not {choice.kernel for choice in recorded.values()} <= {"splash", "cudnn"}:
            raise MissingCompilerError("; ".join(kernels.choice_lines(recorded)))
        if kept:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(text)
    devices = job.partitioner.mesh.devices.flatten().tolist()
    machine = links.machine(devices[0].device_kind)
    assert machine is not None
    if run.network is not None:
        machine = dataclasses.replace(machine, network=run.network)
    found = roofline.estimate(text, devices, job.partitioner.mesh_shape(), machine=machine)
    assert found is not None
    return Result(run.seconds, found, time.monotonic() - started)


def row(name: str, result: Result) -> str:
    """Returns one line of the table."""
    found = result.estimate
    dominant = found.collectives[0] if found.collectives else None
    collective = f"{dominant.kind} {dominant.seconds:.2f} s ({dominant.links})" if dominant else "none"
    return (
        f"{name:20}{result.published:9.3f} {found.shortest:8.2f} to {found.longest:6.2f}  {'yes' if result.inside else 'NO':4}"
        f"{found.middle:8.2f} {result.middle_error:+7.0%}   {found.matrix_seconds:7.2f} {found.memory_seconds:7.2f} "
        f"{found.inside_seconds + found.outside_seconds:7.2f}   {collective}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; returns 1 without results, or if fewer than 5 of 6 steps are in a range whose middle is within 25%."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *RUNS], metavar="NAME", help=f"runs: {', '.join(RUNS)}")
    parser.add_argument("--programs", type=pathlib.Path, help="keep the compiled programs' text in this folder")
    parser.add_argument("--json", type=pathlib.Path, help="also write the results to this file")
    options = parser.parse_args(arguments)
    results: dict[str, Result] = {}
    print(
        f"{'run':20}{'published':>9} {'estimated range':>18}  {'in':4}{'middle':>8} {'error':>7}   {'matrix':>7} {'memory':>7} "
        f"{'links':>7}   longest collective (all in seconds)"
    )
    for name in options.names or RUNS:
        try:
            results[name] = estimate(name, RUNS[name], options.programs)
        except MissingCompilerError as error:
            print(f"{name:20} left out: {error}", flush=True)
            continue
        print(row(name, results[name]), flush=True)
    for name in results:
        if RUNS[name].differs:
            print(f"{name}: the published program {RUNS[name].differs}")
    inside = sum(result.inside for result in results.values())
    close = sum(abs(result.middle_error) <= BAR for result in results.values())
    print(f"{inside} of {len(results)} steps are in the range; the middle is within {BAR:.0%} for {close}")
    if options.json:
        records = {
            name: {"published": r.published, **r.estimate.record(), "source": RUNS[name].source}
            for name, r in results.items()
        }
        options.json.write_text(json.dumps(records, indent=1) + "\n")
    good = sum(result.inside and abs(result.middle_error) <= BAR for result in results.values())
    return int(not results or good * 6 < len(results) * 5)


if __name__ == "__main__":
    sys.exit(main())
