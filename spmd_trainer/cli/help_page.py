"""The text of `--help`: the modes, the flags grouped by purpose, and three examples."""

from __future__ import annotations

import shutil
import textwrap

from spmd_trainer.cli.modes import MODES
from spmd_trainer.cli.run_flags import all_settings
from spmd_trainer.settings import Setting

_EXAMPLES = """\
  spmd-trainer --exp=lm.stdlib.StdlibBytes --job_log_dir=runs/mine --fdl.set='task.train.num_train_steps=200'
  spmd-trainer --exp=lm.stdlib.StdlibBytes --job_log_dir=runs/mine --mode=decode_once
  spmd-trainer --exp=my_pkg.my_module.MyExperiment --mode=inspect --mesh=data:4,mdl:2
"""
_INDENT = " " * 4


def text() -> str:
    """Returns the page, wrapped to the terminal's width (at most 100 columns)."""
    width = min(100, shutil.get_terminal_size().columns)
    parts = ["Usage: spmd-trainer --exp=NAME --job_log_dir=DIR [--mode=MODE] [FLAGS]\n\nModes\n"]
    parts += [_entry(f"--mode={name}", mode.help, width) for name, mode in MODES.items()]
    groups: dict[str, list[Setting]] = {}
    for about in all_settings():
        groups.setdefault(about.group, []).append(about)
    for group, members in groups.items():
        parts.append(f"\n{group}\n")
        parts += [_entry(_head(about), about.off or about.help, width) for about in members]
    parts.append(f"\nExamples\n{_EXAMPLES}")
    parts.append(
        "\nExit status: 0 success; 1 internal error, --mode=verify found a difference, or --mode=port a name without a\n"
        "counterpart; 2 user error, the message says how to fix it; 3 another process of the job was lost; 5 checkpoints are\n"
        "damaged or none is whole.\n"
        "Pax's flags (--fdl_config, --multiprocess_gpu, --jax_*, ...) are understood: each does what it means here, or a\n"
        "message says what to use instead. --helpfull lists all flags, including those of libraries.\n"
    )
    return "".join(parts)


def _head(about: Setting) -> str:
    if about.kind is bool:
        return f"--{'no' if about.default else ''}{about.flag}"
    default = ",".join(about.default) if about.kind is tuple else about.default
    return f"--{about.flag}={about.value}" + ("" if default in (None, "") else f"  (default: {default})")


def _entry(head: str, what: str, width: int) -> str:
    body = textwrap.fill(what, width, initial_indent=_INDENT, subsequent_indent=_INDENT)
    return f"  {head}\n{body}\n"
