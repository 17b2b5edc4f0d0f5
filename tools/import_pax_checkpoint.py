"""Converts a checkpoint of Pax (paxml) to one of this trainer. Never changes the Pax directory.

    python tools/import_pax_checkpoint.py PAX/checkpoints runs/imported/checkpoints
    python tools/import_pax_checkpoint.py --step=20 --exp=my_pkg.mine.MyLm PAX/checkpoints runs/imported/checkpoints

Conversion is optional: training, evaluation and decoding read Pax checkpoints directly. The result is a directory for
--restore_checkpoint_dir. It holds the step, the variables and all optimizer states, without padding, but no position
of the training input.

A checkpoint contains the logical shapes of the model's variables, from which those of the optimizer's states usually
follow. Otherwise the tool names the variables and asks for --exp, the experiment with the same model and optimizer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import spmd_trainer  # noqa: F401  (the bridge, before anything imports praxis)
from spmd_trainer import experiment_modules, pax, storage
from spmd_trainer.checkpointing import CheckpointError
from spmd_trainer.errors import UserError, terminal


def convert(args: argparse.Namespace) -> int:
    """Converts the checkpoint named by the arguments. Returns the step.

    Raises:
      UserError: the checkpoint or experiment does not exist, or they don't fit each other.
      CheckpointError: the step can't be written.
    """
    source, target = storage.directory("SOURCE", args.source), storage.directory("TARGET", args.target)
    if args.exp is None:
        return pax.convert(source, target, step=args.step)
    experiment_modules.add(args.exp_module)
    # Importing the programs takes a second.
    from praxis import pax_fiddle

    from spmd_trainer import tasks_lib
    from spmd_trainer.training import experiment_config, verify

    resolved = experiment_config.resolve(args.exp, ())
    task = tasks_lib.build_task(resolved.task_p)
    inputs = pax_fiddle.build(resolved.experiment.get_input_specs_provider_params()).get_input_specs()
    metadata = verify.single_device_partitioner(task, inputs).metadata
    return pax.convert(source, target, step=args.step, variables=metadata.variables, mesh=metadata.mesh)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns 0, or 2 if the command or a checkpoint is invalid."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "source", help="a directory with checkpoint_00000020 and the like, the run's directory above it, or one step"
    )
    parser.add_argument("target", help="a directory of checkpoints to write, e.g. runs/imported/checkpoints")
    parser.add_argument("--step", type=int, help="the step; the newest if it is not given")
    parser.add_argument("--exp", help="an experiment with the same model and optimizer, e.g. my_pkg.mine.MyLm")
    parser.add_argument("--exp_module", action="append", default=[], help="a module that registers it; may be repeated")
    args = parser.parse_args(argv)
    try:
        step = convert(args)
    except (UserError, CheckpointError) as error:
        terminal.write(f"import_pax_checkpoint: {error}\n", sys.stderr)
        return 2
    print(f"{args.target}: step {step} of {args.source}. Use it with --restore_checkpoint_dir={args.target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
