"""The text of `--help`: the modes, the flags grouped by purpose, and three examples."""

from __future__ import annotations

import shutil
import textwrap

from absl import flags

from spmd_trainer.cli.modes import MODES

# Every flag that main.py defines, with a placeholder for its value; tests/test_main.py checks that none is missing.
GROUPS = {
    "What to run": (
        "exp=NAME",
        "job_log_dir=DIR",
        "mode=MODE",
        "mesh=AXIS:SIZE,...",
        "fdl.set=PATH=VALUE",
        "exp_module=MODULE",
    ),
    "Information": ("list", "dump", "doctor"),
    "Checkpoints": (
        "restore_checkpoint_dir=DIR",
        "restore_checkpoint_step=N",
        "enable_checkpoint_saving",
        "exit_after_ondemand_checkpoint",
    ),
    "Export": ("export_dir=DIR", "export_dtype=DTYPE", "export_use_ema", "export_adapter"),
    "Judging with lm-eval": (
        "tasks=NAME,...",
        "include_path=DIR",
        "num_fewshot=N",
        "limit=N",
        "apply_chat_template=true",
        "system_instruction=TEXT",
        "fewshot_as_multiturn",
        "gen_kwargs=KEY=VALUE,...",
        "log_samples",
        "confirm_run_unsafe_code",
        "model_args=KEY=VALUE,...",
    ),
    "During training": (
        "eval_on_test",
        "decode_during_train",
        "num_minibatches=N",
        "stop_on_invalid_step",
        "check_replicas_every=N",
        "check_repeat_every=N",
        "watchdog_seconds=SECONDS",
        "hang_seconds=SECONDS",
        "track=NAME,...",
        "jax_profiler_port=PORT",
        "jax_cache_dir=DIR",
    ),
    "The page of a run": ("page_file=FILE", "follow", "port=PORT"),
    "Several processes": (
        "distributed=auto",
        "coordinator_address=HOST:PORT",
        "num_processes=N",
        "process_id=N",
        "heartbeat_seconds=SECONDS",
    ),
    "Checking and planning": (
        "verify_steps=N",
        "verify_against='XLA_OPTION=VALUE ...'",
        "step=N",
        "plan",
        "topology=CHIP:SHAPE",
        "num_slices=N",
        "search=mesh,remat,...",
        "budget=20m",
        "module=FILE",
    ),
}
# The help of --noNAME, for flags that are on by default.
_SWITCHED_OFF = {
    "enable_checkpoint_saving": "Don't save checkpoints.",
    "exit_after_ondemand_checkpoint": "Continue training after saving the checkpoint that SIGTERM requests.",
    "eval_on_test": "Don't evaluate during training.",
}
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
    for group, spellings in GROUPS.items():
        parts.append(f"\n{group}\n")
        parts += [_entry(_head(spelling), _help(spelling.partition("=")[0]), width) for spelling in spellings]
    parts.append(f"\nExamples\n{_EXAMPLES}")
    parts.append(
        "\nExit status: 0 success; 1 internal error, --mode=verify found a difference, or --mode=port a name without a\n"
        "counterpart; 2 user error, the message says how to fix it; 3 another process of the job was lost; 5 checkpoints are\n"
        "damaged or none is whole.\n"
        "Pax's flags (--fdl_config, --multiprocess_gpu, --jax_*, ...) are understood: each does what it means here, or a\n"
        "message says what to use instead. --helpfull lists all flags, including those of libraries.\n"
    )
    return "".join(parts)


def _head(spelling: str) -> str:
    flag = flags.FLAGS[spelling.partition("=")[0]]
    if flag.boolean:
        return f"--no{spelling}" if flag.default else f"--{spelling}"
    return f"--{spelling}" if flag.default in (None, []) else f"--{spelling}  (default: {flag.default})"


def _help(name: str) -> str:
    """Returns the flag's help without the text that absl adds for repeated flags and for choices."""
    text = " ".join((flags.FLAGS[name].help or "").split()).partition("; repeat this option")[0].replace(".;", ".")
    text = text.removeprefix("<").partition(">: ")[2] if text.startswith("<") else text
    return _SWITCHED_OFF[name] if flags.FLAGS[name].boolean and flags.FLAGS[name].default else text


def _entry(head: str, what: str, width: int) -> str:
    body = textwrap.fill(what, width, initial_indent=_INDENT, subsequent_indent=_INDENT)
    return f"  {head}\n{body}\n"
