"""Holds the bytes that `--search=memory` predicts for its rungs against those of the programs that it compiles for them.

    python -m benchmarks.ladder_predictions [--topology h100:1x8 ...] [--models Dense ...]

For each model and mesh, all rungs of the ladder are compiled, as if no program fitted: each rematerialisation policy, both
dtypes of the optimizer state, host memory, minibatches, bfloat16 sums of their gradients, three meshes, and fewer rows. If
several numbers of minibatches or rows have a prediction, only the last is compiled. Rungs without a prediction (host memory,
meshes, and the numbers of minibatches and rows from which the others are predicted) aren't judged. The exit status is 1 if a
prediction is more than 5% off. A program takes 10 to 60 s on one core; topologies of TPUs need the `tpu` extra, those of GPUs
`cuda12` or `cuda13`.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence

# Programs are compiled for the topology's chips, so no accelerator is needed here.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from absl import logging

from spmd_trainer.planner import memory_ladder, plan_mode, plan_report, plan_search
from spmd_trainer.planner.plan_candidates import Candidate, Try
from spmd_trainer.planner.plan_report import Outcome
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import make_run_config

BAR = 0.05
TOPOLOGIES = ("h100:1x8", "v5e:2x4")


@dataclasses.dataclass(frozen=True)
class Model:
    """An experiment with the sizes that its ladder is climbed with.

    Attributes:
      experiment: a registered experiment.
      overrides: its class attributes.
      meshes: sizes of replica, data and mdl.
    """

    experiment: str
    overrides: tuple[str, ...]
    meshes: tuple[tuple[int, int, int], ...]


_SIZES = (
    "CHECKPOINT_POLICY='save_everything'",
    "HIDDEN_DIMS=4096",
    "NUM_HEADS=16",
    "VOCAB_SIZE=32000",
    "MAX_SEQ_LEN=2048",
    "FPROP_DTYPE='bfloat16'",
)
_DECODER = (*_SIZES, "MAX_POSITIONS=2048", "NUM_KV_HEADS=8", "HEAD_DIMS=64", "ADAM_EPSILON=1e-8")
MODELS = {
    "Dense": Model(
        "lm.llama.TinyLlama",
        (*_DECODER, "NUM_LAYERS=12", "MODEL_DIMS=1024", "PERCORE_BATCH_SIZE=4"),
        ((1, 8, 1), (1, 2, 4)),
    ),
    "Narrow": Model(
        "lm.gemma.TinyGemma2",
        (*_DECODER, "NUM_LAYERS=6", "MODEL_DIMS=768", "PERCORE_BATCH_SIZE=8"),
        ((1, 4, 2),),
    ),
    "Experts": Model(
        "lm.mistral.TinyMixtral",
        (*_DECODER, "NUM_LAYERS=4", "MODEL_DIMS=1024", "PERCORE_BATCH_SIZE=2"),
        ((1, 4, 2),),
    ),
    "Praxis": Model(
        "lm.cloud.LmCloudSpmdAdamTiny",
        (
            *_SIZES,
            "NUM_LAYERS=8",
            "MODEL_DIMS=1024",
            "DIMS_PER_HEAD=64",
            "PERCORE_BATCH_SIZE=2",
            "USE_FUSED_ATTENTION=True",
        ),
        ((1, 8, 1),),
    ),
}


class EveryProgram(plan_search.Search):
    """A search for which no program fits."""

    @property
    def memory(self) -> int:
        """No bytes, so that nothing fits."""
        return 0

    def compile(self, outcome: Outcome) -> None:
        """See `Search.compile`."""
        super().compile(outcome)
        outcome.seconds = None


class EveryRung(memory_ladder.MemoryLadder):
    """A ladder that tries all that a rung could choose, and prints each program.

    Attributes:
      errors: of the predictions, as shares of the compiled bytes.
    """

    def __init__(self, job: Job):
        super().__init__(job, EveryProgram(job, ()), plan_report.Store(job, ("memory",)))
        self.errors: list[float] = []

    def _first_that_fits(self, tries: Sequence[Try]) -> Iterator[Try]:
        corrections = memory_ladder.Corrections()
        for tried in tries:
            yield corrections.of(tried)
            corrections.add(tried, self.steps[-1].outcome.bytes)

    def _compile(self, rung: str, candidate: Candidate, predicted: int | None = None) -> Outcome:
        outcome = super()._compile(rung, candidate, predicted)
        compiled, share = outcome.bytes, ""
        if compiled and predicted:
            self.errors.append(predicted / compiled - 1)
            share = f"{self.errors[-1]:+.1%}"
        numbers = [f"{number:,}" if number else "" for number in (predicted, compiled)]
        why = "" if compiled else f": {outcome.reason}"
        print(f"  {numbers[0]:>15}  {numbers[1]:>15}  {share:>7}  {rung}{why}", flush=True)
        return outcome


def climb(model: Model, mesh: tuple[int, int, int], topology: str) -> list[float]:
    """Compiles all rungs. Returns the predictions' errors, as shares of the compiled bytes."""
    with tempfile.TemporaryDirectory() as directory:
        config = make_run_config(
            model.experiment,
            directory,
            mode="plan",
            topology=topology,
            mesh=tuple(zip(("replica", "data", "mdl"), mesh, strict=True)),
            overrides=model.overrides,
        )
        ladder = EveryRung(plan_mode.build_job(config))
        ladder.climb(math.inf)
    return ladder.errors


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints all rungs; returns 1 if a prediction misses the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", nargs="+", default=TOPOLOGIES, help="the chips to compile for")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="the models")
    options = parser.parse_args(arguments)
    logging.set_verbosity(logging.WARNING)
    errors: list[float] = []
    for topology in options.topology:
        for name in options.models:
            for mesh in MODELS[name].meshes:
                print(f"{name}, {topology}, mesh {mesh}", flush=True)
                errors += climb(MODELS[name], mesh, topology)
    worst = max(map(abs, errors), default=0.0)
    missed = sum(abs(error) > BAR for error in errors)
    print(f"{len(errors)} predictions, {missed} more than {BAR:.0%} off, the worst {worst:.1%}")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
