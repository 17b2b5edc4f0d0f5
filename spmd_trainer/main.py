"""The `spmd-trainer` command: its flags and its entry point. `cli/help_page.py` groups the flags for `--help`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from absl import app, flags

from spmd_trainer.cli import doctor, flag_parsing, interruption, log_lines
from spmd_trainer.cli.modes import MODES
from spmd_trainer.errors import UserError, installation, user_code
from spmd_trainer.inputs import tensorflow_bridge
from spmd_trainer.training import garbage

flags.DEFINE_string("exp", None, "Name of a registered experiment, e.g. lm.stdlib.StdlibBytes; --list shows all.")
flags.DEFINE_string("job_log_dir", None, "Directory of the run: checkpoints, summaries, decoded outputs, config.txt.")
flags.DEFINE_enum("mode", "train", list(MODES), "What to do; see the modes above.")
flags.DEFINE_multi_string(
    "exp_module",
    [],
    "Also import this module or package of experiments, so that --list and short names find them. May be repeated.",
)
flags.DEFINE_multi_string(
    "fdl.set",
    [],
    "Override one field of the experiment's config, e.g. --fdl.set='task.train.num_train_steps=200', or a class attribute, "
    "e.g. --fdl.set=NUM_LAYERS=3. The value is a Python literal. Paths start with task, train_datasets[i], eval_datasets[i] or "
    "decode_datasets[i]; --dump prints all paths. --fdl.PATH=VALUE means the same. May be repeated.",
)
flags.DEFINE_string("restore_checkpoint_dir", None, "Read checkpoints from DIR instead of JOB_LOG_DIR/checkpoints.")
flags.DEFINE_integer("restore_checkpoint_step", None, "Restore this step instead of the newest one.", lower_bound=0)
flags.DEFINE_bool("eval_on_test", True, "Evaluate during training, every task.train.eval_interval_steps.")
flags.DEFINE_bool("decode_during_train", False, "Decode during training, every task.train.decode_interval_steps.")
flags.DEFINE_bool(
    "exit_after_ondemand_checkpoint",
    True,
    "Exit after saving the checkpoint that SIGTERM or SIGHUP requests. Ctrl-C always exits.",
)
flags.DEFINE_bool("enable_checkpoint_saving", True, "Save checkpoints during training.")
flags.DEFINE_integer("jax_profiler_port", None, "Serve JAX's profiler on this port.", lower_bound=1)
flags.DEFINE_string(
    "jax_cache_dir",
    None,
    "Directory of JAX's persistent compilation cache; an empty value disables the cache. Default: JAX_COMPILATION_CACHE_DIR "
    "if set, otherwise spmd-trainer/jax in the user's cache directory. --topology disables the cache.",
)
flags.DEFINE_string("mesh", None, "Use this mesh instead of the experiment's, e.g. data:4,mdl:2. One size may be -1.")
flags.DEFINE_string("module", None, "File, folder or module written for paxml, for --mode=port.")
flags.DEFINE_string(
    "page_file",
    None,
    "With --mode=page: write this file instead of run.html in --job_log_dir, or compare.html for several runs.",
)
flags.DEFINE_bool(
    "follow", False, "With --mode=page: serve the page on this machine, up to date while the run goes on, until Ctrl-C."
)
flags.DEFINE_integer("port", 0, "With --follow: the port; 0 takes a free one.", lower_bound=0, upper_bound=65535)
flags.DEFINE_string("export_dir", None, "With --mode=export: the folder to write. It must be new or empty.")
flags.DEFINE_enum(
    "export_dtype",
    None,
    ["float32", "bfloat16", "float16"],
    "With --mode=export: the dtype to write; by default, that of the variables.",
)
flags.DEFINE_bool("export_use_ema", False, "With --mode=export: write the moving averages of the variables.")
flags.DEFINE_bool(
    "export_adapter",
    False,
    "With --mode=export: write the adapters alone, in PEFT's format, instead of a merged model.",
)
flags.DEFINE_multi_string(
    "tasks", [], "With --mode=lm_eval: tasks, groups or tags of lm-eval, patterns, or YAML files: a,b. May be repeated."
)
flags.DEFINE_string("include_path", None, "With --mode=lm_eval: a directory with tasks of your own, as YAML files.")
flags.DEFINE_integer("num_fewshot", None, "With --mode=lm_eval: number of examples in the context.", lower_bound=0)
flags.DEFINE_float(
    "limit", None, "With --mode=lm_eval: use only the first N examples of each task; below 1, a fraction."
)
flags.DEFINE_string(
    "apply_chat_template",
    None,
    "With --mode=lm_eval: true writes prompts with the tokenizer's chat template; or the name of one of its templates.",
)
flags.DEFINE_string("system_instruction", None, "With --mode=lm_eval: text of the system message.")
flags.DEFINE_bool(
    "fewshot_as_multiturn",
    None,
    "With --mode=lm_eval: write few-shot examples as turns of a conversation. Default: as --apply_chat_template.",
)
flags.DEFINE_string(
    "gen_kwargs", None, "With --mode=lm_eval: change how tasks generate text, e.g. max_gen_toks=64,temperature=0.7."
)
flags.DEFINE_bool("log_samples", False, "With --mode=lm_eval: also write every example with its answers.")
flags.DEFINE_bool("confirm_run_unsafe_code", False, "With --mode=lm_eval: allow tasks that run code from the model.")
flags.DEFINE_string(
    "model_args",
    None,
    "With --mode=lm_eval: how the model is used, e.g. max_length=4096,batch_size=64; also tokenizer, add_bos_token and "
    "prefix_token_id.",
)
flags.DEFINE_string(
    "verify_against",
    None,
    "XLA options, e.g. 'xla_cpu_enable_fast_math=true'. --mode=verify then compares the experiment on its mesh with and without "
    "them, instead of with one device.",
)
flags.DEFINE_integer("verify_steps", 5, "Number of training steps that --mode=verify compares.", lower_bound=1)
flags.DEFINE_integer("step", None, "With --mode=replay: the step to take again.", lower_bound=1)
flags.DEFINE_string(
    "topology",
    None,
    "With --mode=inspect: also compile the train step for these chips, and print the plan: memory, time, collectives, FLOPs. "
    "With --mode=plan: the chips to search for. They need not be here. E.g. v5e:16x16 for a TPU slice, h100:32x8 for 32 hosts "
    "with 8 GPUs each.",
)
flags.DEFINE_integer(
    "num_slices", 1, "Number of slices of --topology; for GPUs it multiplies the hosts.", lower_bound=1
)
flags.DEFINE_list("search", ["mesh"], "With --mode=plan: what to search, of mesh, remat, minibatches and batch.")
flags.DEFINE_string("budget", "20m", "With --mode=plan: how long to compile candidates, e.g. 90s, 20m or 1h.")
flags.DEFINE_integer(
    "num_minibatches",
    None,
    "Parts that training divides its batch into, one after the other, instead of the partitioner's num_minibatches.",
    lower_bound=1,
)
flags.DEFINE_bool(
    "plan",
    False,
    "With --mode=inspect: also compile the train step for the available devices and print the plan.",
)
flags.DEFINE_enum(
    "distributed",
    None,
    ["auto"],
    "auto: Slurm, Open MPI, Kubernetes or Cloud TPU started the processes of this job, and JAX detects the coordinator's "
    "address, the number of processes and the id of this process.",
)
flags.DEFINE_string(
    "coordinator_address",
    None,
    "Address where process 0 listens, e.g. 10.0.0.1:8476. For a job of several processes without --distributed=auto.",
)
flags.DEFINE_integer(
    "num_processes", None, "Number of processes in the job. Required with --coordinator_address.", lower_bound=1
)
flags.DEFINE_integer(
    "process_id",
    None,
    "Id of this process, from 0 to num_processes - 1. Required with --coordinator_address.",
    lower_bound=0,
)
flags.DEFINE_integer(
    "heartbeat_seconds",
    30,
    "If a process sends no heartbeat for this many seconds, the others treat it as lost and exit.",
    lower_bound=2,
)
flags.DEFINE_float(
    "watchdog_seconds",
    600.0,
    "When no process makes progress for this many seconds, log who is behind, in which phase, with stacks; 0 reports none.",
    lower_bound=0.0,
)
flags.DEFINE_float(
    "hang_seconds",
    0.0,
    "When no process makes progress for this many seconds, end the run with status 4, so that a supervisor starts it again. "
    "Longer than the longest compilation, restore and save. 0 never ends it.",
    lower_bound=0.0,
)
flags.DEFINE_bool(
    "stop_on_invalid_step",
    False,
    "Stop the run at a step whose loss or gradient norm is NaN or Inf, or whose gradient norm reaches "
    "skip_step_gradient_norm_value, instead of skipping the step.",
)
flags.DEFINE_multi_string(
    "track",
    [],
    "Also tell these trackers of a training run, e.g. --track=wandb,mlflow; there are wandb, mlflow, trackio and tensorboard. "
    "May be repeated.",
)
flags.DEFINE_integer(
    "check_replicas_every",
    0,
    "Every N training steps, and before such a step is saved, compare the bits of all values that several devices hold; a "
    "difference ends the run with status 6, and names the device and the variable. 0 compares nothing.",
    lower_bound=0,
)
flags.DEFINE_integer(
    "check_repeat_every",
    0,
    "Every N training steps, take the step twice from the same state and batch, and compare the bits; a difference ends the run "
    "with status 6. Such a step takes twice the time, and memory for one more state. 0 repeats nothing.",
    lower_bound=0,
)
flags.DEFINE_bool("list", False, "Print the registered experiments, one per line, and exit.")
flags.DEFINE_bool("dump", False, "Print the resolved config, one 'path: value' per line, and exit.")
flags.DEFINE_bool(
    "doctor", False, "Check the installed versions and the devices; print the command that fixes each problem found."
)


def main(argv: Sequence[str]) -> None:
    """Runs the command that the flags describe.

    Raises:
      SystemExit: with the error's status (2 unless it says otherwise) for an error that the user can fix, 130 after Ctrl-C.
    """
    run_log = log_lines.install()
    try:
        flag_parsing.take_effect()
        if flags.FLAGS.doctor:
            doctor.check_installation()
            return
        if flags.FLAGS.mode == "port":
            _port(flags.FLAGS.module)
        if flags.FLAGS.mode == "page":
            _page(argv[1:])
            return
        for name in ("page_file", "follow", "port"):
            if flags.FLAGS[name].present:
                raise UserError(f"--{name} goes with --mode=page")
        if flags.FLAGS.module:
            raise UserError("--module goes with --mode=port; --exp_module=MODULE adds experiments of your own")
        # Imports JAX and praxis: only once the flags are parsed, and while garbage collection is off.
        from spmd_trainer.cli import launch

        launch.run(flags.FLAGS, list(argv[1:]), run_log)
    except KeyboardInterrupt:
        interruption.say()
        raise SystemExit(interruption.STATUS_INTERRUPTED) from None
    except UserError as error:
        flag_parsing.leave(str(error), error.exit_status)
    except ImportError as error:
        if error.name in installation.UNRESOLVABLE:
            flag_parsing.leave(f"{error}\nspmd-trainer --doctor checks the whole installation.")
        hidden = user_code.hidden_package(error)
        if hidden is None:
            raise
        flag_parsing.leave(f"{error}: {hidden} hides an installed package of that name; rename it, or run elsewhere")
    finally:
        run_log.close()  # before the interpreter shuts down, while an object store can still be written to
        _let_go_of_closed_terminal()


def _let_go_of_closed_terminal() -> None:
    """Drops output that can't be written because the terminal is gone: Python would exit with status 120 for it."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def _port(module: str | None) -> NoReturn:
    """Prints what a file written for paxml needs; exits with status 0 if renaming its imports is enough, otherwise 1."""
    if not module:
        raise UserError("--mode=port needs --module=FILE: a file, folder or module written for paxml")
    from spmd_trainer.pax import port

    raise SystemExit(0 if port.print_reports(module) else 1)


def _page(more_directories: Sequence[str]) -> None:
    """Writes or serves the page of the runs in --job_log_dir and in the directories that are given as arguments."""
    from spmd_trainer.watch.pages import page_mode

    first = [flags.FLAGS.job_log_dir] if flags.FLAGS.job_log_dir else []
    if flags.FLAGS.page_file and flags.FLAGS.follow:
        raise UserError("--follow writes no file: leave --page_file out")
    if flags.FLAGS["port"].present and not flags.FLAGS.follow:
        raise UserError("--port goes with --follow")
    page_mode.show(
        page_mode.PageRequest([*first, *more_directories], flags.FLAGS.page_file, flags.FLAGS.follow, flags.FLAGS.port)
    )


def run() -> None:
    """Entry point of the `spmd-trainer` command."""
    garbage.rest()
    tensorflow_bridge.keep_quiet()
    # Makes packages in the working directory importable, as `python -m` does.
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    app.run(main, flags_parser=flag_parsing.parse)


if __name__ == "__main__":
    run()
