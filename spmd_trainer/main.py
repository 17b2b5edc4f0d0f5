"""The entry point of the `spmd-trainer` command. `training/run_config.py` and `cli/run_flags.py` define its flags."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from absl import app, flags

from spmd_trainer.cli import doctor, flag_parsing, log_lines, run_flags
from spmd_trainer.cli.modes import MODES
from spmd_trainer.errors import UserError, installation, terminal, user_code
from spmd_trainer.inputs import tensorflow_bridge
from spmd_trainer.training import garbage, rooms
from spmd_trainer.training.mode_configs import PortConfig


def main(argv: Sequence[str]) -> None:
    """Runs the command that the flags describe.

    Raises:
      SystemExit: with the error's `exit_status` (usually 2) after an error that the user can fix; with 130 after Ctrl-C.
    """
    run_log = log_lines.install()
    try:
        flag_parsing.take_effect()
        if flags.FLAGS.doctor:
            doctor.check_installation()
            return
        run_flags.choose_mode(flags.FLAGS)
        mode = "" if flags.FLAGS.list else flags.FLAGS.mode  # --list prints the same in every mode
        if mode:
            run_flags.refuse_other_modes(flags.FLAGS)
            rooms.check(MODES[mode].module, f"--mode={mode}")
        if mode == "port":
            _port(PortConfig(flags.FLAGS.module))
        if mode and MODES[mode].alone:
            MODES[mode].program()(run_flags.config_without_experiment(flags.FLAGS, argv[1:]))
            return
        # Imports JAX and praxis: only once the flags are parsed, and while garbage collection is off.
        from spmd_trainer.cli import launch

        launch.run(flags.FLAGS, list(argv[1:]), run_log)
    except KeyboardInterrupt:
        log_lines.say_interrupted(MODES[flags.FLAGS.mode].after_interrupt)
        raise SystemExit(log_lines.STATUS_INTERRUPTED) from None
    except UserError as error:
        flag_parsing.leave(str(error), error.exit_status)
    except ImportError as error:
        if error.name in installation.UNRESOLVABLE:
            flag_parsing.leave(f"{error}\nspmd-trainer --doctor checks the whole installation.")
        own = (error.name or "").partition("spmd_trainer.")[2]
        if own and (absent := rooms.missing(own)):
            flag_parsing.leave(absent)
        hidden = user_code.hidden_package(error)
        if hidden is None:
            raise
        flag_parsing.leave(f"{error}: {hidden} hides an installed package of that name; rename it, or run elsewhere")
    finally:
        run_log.close()  # before the interpreter shuts down, while an object store can still be written to
        terminal.flush()


def _port(config: PortConfig) -> NoReturn:
    """Prints the changes that code written for paxml needs. Exits with status 0 if renaming imports is enough, else 1."""
    from spmd_trainer.pax import port

    raise SystemExit(0 if port.print_reports(config.module) else 1)


def run() -> None:
    """Entry point of the `spmd-trainer` command."""
    garbage.pause()
    tensorflow_bridge.keep_quiet()
    # Makes packages in the working directory importable, as `python -m` does.
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    app.run(main, flags_parser=flag_parsing.parse)


if __name__ == "__main__":
    run()
