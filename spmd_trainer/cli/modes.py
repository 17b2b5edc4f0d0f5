"""The modes of the command line, each with its help text and the program that it runs."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from spmd_trainer.cli import log_lines

if TYPE_CHECKING:
    from spmd_trainer.training.job import Job
    from spmd_trainer.training.run_config import RunConfig


@dataclasses.dataclass(frozen=True)
class Mode:
    """One mode of the command line (`--mode`).

    Attributes:
      help: description for `--help`. The list of modes shows only its first sentence.
      path: 'MODULE:FUNCTION' of the program, below `spmd_trainer`. The function takes a `Job`. The module is imported only when
        the mode runs.
      has_run: True if the mode reads or writes a run's directory.
      alone: True if the function takes no `Job`, but the mode's settings, built from flags and the command's arguments.
      after_interrupt: clause for the message after Ctrl-C that says what the user can do.
      builder: name of the function in MODULE that builds the job from a `RunConfig`; '' for `Job.build`.
    """

    help: str
    path: str
    has_run: bool = True
    alone: bool = False
    after_interrupt: str = log_lines.CONTINUES
    builder: str = ""

    def program(self) -> Callable[[Any], object]:
        program: Callable[[Any], object] = self._import(self.path.partition(":")[2])
        return program

    @property
    def module(self) -> str:
        return self.path.partition(":")[0]

    def build_job(self, config: RunConfig) -> Job:
        """Builds the mode's job. Raises the errors of `Job.build`."""
        from spmd_trainer.training import job  # imports JAX, which --help doesn't need

        build: Callable[[RunConfig], Job] = self._import(self.builder) if self.builder else job.Job.build
        return build(config)

    def _import(self, name: str) -> Any:
        return getattr(importlib.import_module(f"spmd_trainer.{self.module}"), name)


MODES = {
    "train": Mode(
        "Train the experiment. A run with checkpoints in JOB_LOG_DIR goes on from the newest one. Ctrl-C and SIGTERM save a "
        "checkpoint before exiting.",
        "training.train:train",
    ),
    "sweep": Mode(
        "Train the experiment several times with other values. --sweep says which; the trials run one after the other, and "
        "JOB_LOG_DIR/sweep.html compares their results. The same command goes on where it ended.",
        "sweeps.run:run",
        has_run=False,
        builder="prepare",
        after_interrupt="the running trial has saved its state; the same command goes on",
    ),
    "eval": Mode(
        "Evaluate the newest checkpoint and each later one until training ends.",
        "training.evaluate:evaluate_checkpoints",
    ),
    "decode": Mode(
        "Decode with the newest checkpoint and each later one until training ends.",
        "training.decode:decode_checkpoints",
    ),
    "decode_once": Mode(
        "Decode with one checkpoint: the newest, or --restore_checkpoint_step.", "training.decode:decode_once"
    ),
    "infer": Mode("Like decode_once, with the random seed of task.infer.", "training.decode:decode_once"),
    "inspect": Mode(
        "Print how every variable is sharded on the mesh, and why. Nothing is allocated.",
        "planner.inspect_sharding:inspect_job",
        has_run=False,
    ),
    "plan": Mode(
        "Search for the fastest mesh on chips that need not be here. It searches the meshes (and, with --search, "
        "rematerialisation, minibatches and batch) for --topology, compiles the most promising ones, and prints their estimated "
        "step, their bytes per chip and the flags of the best. With --search=memory, it finds what makes the experiment fit.",
        "planner.plan_mode:search",
        has_run=False,
        builder="build_job",
    ),
    "data": Mode(
        "Print the first rows of each dataset. Shown are their text, with the labels that count in the loss in colour (in "
        "brackets if the output is not a terminal), how long their segments are, and how much is padding.",
        "watch.pages.show_data:show_data",
        has_run=False,
        builder="build_job",
    ),
    "verify": Mode(
        "Compare a few training steps on one device and on the mesh. Losses, gradient norms and variables are compared.",
        "training.verify:verify",
        has_run=False,
    ),
    "coord_check": Mode(
        "Check muP: print how the layers' changes depend on the width. It trains the model of task.mup for a few steps at "
        "several --widths. Exit status 1: the changes of some products depend on it.",
        "planner.coord_check:check",
        has_run=False,
    ),
    "replay": Mode(
        "Take a step of a run again, and print where its first NaN came from. It starts from the newest checkpoint before "
        "--step, and shows layer by layer where the first NaN or infinity was made.",
        "planner.replay:replay",
    ),
    "export": Mode(
        "Write one checkpoint as a Hugging Face folder. It is the newest, or --restore_checkpoint_step; the folder is "
        "--export_dir.",
        "hf.export_mode:export",
    ),
    "lm_eval": Mode(
        "Evaluate one checkpoint on tasks of EleutherAI's lm-eval harness. It is the newest, or --restore_checkpoint_step.",
        "lm_eval.mode:evaluate",
    ),
    "chat": Mode(
        "Talk to one checkpoint. It is the newest, or --restore_checkpoint_step, and answers --prompt, a pipe, or what is typed.",
        "lm_eval.chat:chat",
    ),
    "page": Mode(
        "Write run.html: curves, times, samples and settings of a run. The run is that in --job_log_dir. More directories may "
        "follow as arguments; their runs are compared. Needs no --exp. Training writes it too, at its end.",
        "watch.pages.page_mode:show",
        has_run=False,
        alone=True,
    ),
    "port": Mode(
        "Print what an experiment file written for paxml needs here. The file is --module; its renamed imports are shown as "
        "a diff. Runs nothing of the file. Exit status 1: it uses something that has no counterpart.",
        "pax.port:print_reports",
        has_run=False,
    ),
    "tokenise": Mode(
        "Tokenise files of text or conversations into a store of tokens. The files follow as arguments, the store is "
        "--output, and inputs read it. Needs no --exp.",
        "inputs.corpus.prepare:tokenise",
        has_run=False,
        alone=True,
        after_interrupt="the same command goes on: finished parts are kept",
    ),
    "tokenizer": Mode(
        "Train a tokenizer on files. They follow as arguments; --output is a folder with a tokenizer.json, or a SentencePiece "
        ".model. Needs no --exp.",
        "inputs.tokenizer_training:train_tokenizer",
        has_run=False,
        alone=True,
        after_interrupt="nothing was written",
    ),
}
