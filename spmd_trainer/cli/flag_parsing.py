"""Parses the flags. A wrong flag gives one message and exit status 2; `--help` prints a page and exits with status 0."""

from __future__ import annotations

import re
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import NoReturn

from absl import flags

from spmd_trainer.cli import pax_flags
from spmd_trainer.cli.modes import MODES
from spmd_trainer.cli.run_flags import all_settings, mode_settings, run_of_directories
from spmd_trainer.errors import UserError, did_you_mean, terminal
from spmd_trainer.settings import Setting
from spmd_trainer.sharding.messages import suggestion_text
from spmd_trainer.training import rooms

# Pax's flags are kept apart from absl's global FLAGS, because libraries define some of the same names there.
_of_pax = pax_flags.define()

_EXAMPLES = """\
  spmd-trainer --exp=lm.stdlib.StdlibBytes --job_log_dir=runs/mine --fdl.set='task.train.num_train_steps=200'
  spmd-trainer --job_log_dir=runs/mine --mode=decode_once
  spmd-trainer --exp=my_pkg.my_module.MyExperiment --mode=inspect --mesh=data:4,mdl:2
"""
_EXIT_STATUS = """
Exit status: 0 success; 1 internal error, --mode=verify found a difference, or --mode=port a name without a
counterpart; 2 user error, the message says how to fix it; 3 another process of the job was lost; 5 checkpoints are
damaged or none is whole.
Pax's flags (--fdl_config, --multiprocess_gpu, --jax_*, ...) are understood: each does what it means here, or a
message says what to use instead. --helpfull lists all flags, including those of libraries.
"""
_GENERAL_GROUPS = ("What to run", "Information")
_INDENT = " " * 4
_WHERE_SETTINGS_ARE = (
    "; --help=MODE shows the flags, and --fdl.set=PATH=VALUE sets a field of the experiment (--dump shows all)"
)

# {flag that no longer exists: end of its error message, which says what replaces the flag}.
_REPLACED = {"export_use_ema": ": --eval_averages=ema takes its place"}


def parse(argv: Sequence[str]) -> list[str]:
    """Parses the trainer's flags and Pax's, and returns the remaining arguments.

    Raises:
      SystemExit: with status 2 after a message about an unknown flag or a bad value; with status 0 after printing help.
    """
    asked = {argument.lstrip("-") for argument in argv[1:] if argument.startswith("-")}
    try:
        if "helpfull" in asked:
            terminal.write(f"{flags.FLAGS.get_help()}\n\nflags of Pax:\n{_of_pax.get_help()}\n")
            raise SystemExit(0)
        if asked & {"help", "h", "?", "helpshort"} or any(one.startswith("help=") for one in asked):
            topic = next((one.partition("=")[2] for one in asked if one.startswith("help=")), _value("mode", argv))
            terminal.write(help_page(topic or ""))
            raise SystemExit(0)
        return parse_into(flags.FLAGS, _of_pax, argv)
    except UserError as error:
        leave(str(error))


def parse_into(own: flags.FlagValues, of_pax: flags.FlagValues, argv: Sequence[str]) -> list[str]:
    """Parses a command line, and copies the value of each Pax flag to the trainer's flag that means the same.

    Returns:
      The remaining arguments, the program's name first.

    Raises:
      UserError: a flag is unknown, has a bad value, or is a flag of Pax that is not supported.
    """
    together = flags.FlagValues()
    together.set_gnu_getopt(True)  # flags may follow the arguments of --mode=tokenise
    together.append_flag_values(own)
    together.append_flag_values(of_pax)
    try:
        arguments = own.read_flags_from_files(list(argv[1:]), force_gnu=False)
        arguments, of_jax = pax_flags.without_dotted(arguments, together)
        pax_flags.refuse_modes(arguments)
        rest = together([argv[0], *arguments])
        own.mark_as_parsed()
        of_pax.mark_as_parsed()
        of_pax["jax_arguments"].value = of_jax
        pax_flags.translate(of_pax, own)
    except flags.UnrecognizedFlagError as error:
        mode = str(own["mode"].value)
        rooms.check(MODES[mode].module, f"--mode={mode}")  # without the mode's subpackage, the mode's flags are unknown
        fields = [f"--fdl.set={path}=VALUE" for path in _fields_like(error.flagname, argv)]
        near = did_you_mean(error.flagname, list(together), prefix="--", otherwise=_WHERE_SETTINGS_ARE)
        near = _REPLACED.get(error.flagname, near)
        raise UserError(f"unknown flag --{error.flagname}{suggestion_text(fields) or near}") from error
    except flags.Error as error:
        raise UserError(str(error)) from error
    return list(rest)


def _fields_like(flag: str, argv: Sequence[str]) -> list[str]:
    """Returns up to 3 fields or class attributes of the experiment that the user may have meant by an unknown flag.

    Their names equal the flag's name, end with it, or have its letters as initials ('lr' for learning_rate). Without --exp, the
    experiment is that of the run in the given directory. Returns [] if there is no experiment, or it can't be resolved.
    """
    places = {name: value for name in ("job_log_dir", "restore_checkpoint_dir") if (value := _value(name, argv))}
    exp, overrides = _value("exp", argv) or _value("fdl_config", argv), []
    if not (exp or places):
        return []
    try:
        from spmd_trainer.training import experiment_config  # imports JAX, which flags alone don't need

        if not exp:
            _, record = run_of_directories(places)
            exp, overrides = record["experiment"], record["overrides"]
        resolved = experiment_config.resolve(exp, overrides)
    except (Exception, SystemExit):  # the user's own code; a command with right flags says what is wrong with it
        return []
    paths = [line.partition(": ")[0] for line in resolved.lines()]
    paths += [name for name in dir(resolved.experiment) if name.isupper() and not name.startswith("_")]
    wanted = flag.lower().replace("-", "_")
    named = {path: path.rpartition(".")[2].lower() for path in paths}
    same = [path for path, name in named.items() if name == wanted]
    short = [path for path, name in named.items() if "_" in name and wanted == "".join(w[:1] for w in name.split("_"))]
    ending = [path for path, name in named.items() if name.endswith(f"_{wanted}")]
    # Class attributes and what training reads come first.
    return sorted(same or short or ending, key=lambda path: ("." in path, "train" not in path))[:3]


def _value(flag: str, argv: Sequence[str]) -> str | None:
    """Returns a flag's value in an unparsed command line (--exp=NAME or --exp NAME); None if the flag was not given."""
    for here, after in zip(argv, [*argv[1:], ""], strict=True):
        name, equals, value = here.lstrip("-").partition("=")
        if here.startswith("-") and name == flag:
            return value if equals else after
    return None


def take_effect() -> None:
    """Applies Pax's and JAX's flags to the environment and `jax.config`; see `pax_flags.take_effect`."""
    pax_flags.take_effect(_of_pax, [*flags.FLAGS, *_of_pax])


def leave(message: str, status: int = 2) -> NoReturn:
    """Prints the message to stderr and exits with `status`."""
    terminal.write_last(message)
    raise SystemExit(status)


def help_page(topic: str = "") -> str:
    """Returns the text of `--help`, wrapped to the terminal's width (at most 100 columns).

    Args:
      topic: a mode, for its flags; 'all' for the flags of all modes; '' for the list of modes and the general flags.

    Raises:
      UserError: there is no such mode.
    """
    if topic and topic != "all" and topic not in MODES:
        near = did_you_mean(topic, [*MODES, "all"], prefix="--help=")
        raise UserError(f"--help={topic}: there is no such mode{near}")
    width = min(100, shutil.get_terminal_size().columns)
    parts = ["Usage: spmd-trainer --exp=NAME --job_log_dir=DIR [--mode=MODE] [FLAGS]\n"]
    if topic == "all":
        parts += ["\nModes\n", *(_entry(f"--mode={name}", mode.help, width) for name, mode in MODES.items())]
        groups = _groups(all_settings())
    elif topic:
        parts += ["\n", _entry(f"--mode={topic}", MODES[topic].help, width)]
        # What this mode alone has comes first.
        groups = sorted(_groups(mode_settings(topic)), key=lambda group: "--mode=" not in group[0])
    else:
        parts.append("\nModes (--help=MODE shows what one does, and its flags; --help=all shows all)\n")
        parts += [f"  {name:<12}{_first_sentence(mode.help)}\n" for name, mode in MODES.items()]
        groups = [group for group in _groups(all_settings()) if group[0] in _GENERAL_GROUPS]
    for title, members in groups:
        parts.append(f"\n{title}\n")
        for about in members:
            what, default = about.off or about.help, about.default
            if about.kind is bool:
                head = f"--{'no' if default else ''}{about.flag}"
            else:
                default = ",".join(default) if about.kind is tuple else default
                head = f"--{about.flag}={about.value}" + ("" if default in (None, "") else f"  (default: {default})")
            parts.append(_entry(head, what if topic else _first_sentence(what), width))
    parts.append(f"\nExamples\n{_EXAMPLES}")
    return "".join([*parts, _EXIT_STATUS] if topic == "all" else parts)


def _groups(settings: Iterable[Setting]) -> list[tuple[str, list[Setting]]]:
    found: dict[str, list[Setting]] = {}
    for about in settings:
        found.setdefault(about.group, []).append(about)
    return list(found.items())


def _first_sentence(what: str) -> str:
    return re.split(r"(?<!e\.g)\. (?=[A-Z-])", what)[0].rstrip(".")


def _entry(head: str, what: str, width: int) -> str:
    body = textwrap.fill(what, width, initial_indent=_INDENT, subsequent_indent=_INDENT)
    return f"  {head}\n{body}\n"
