"""The training, evaluation and decode loops. Each can be read from top to bottom; `job.py` has the code that they share.

train.py           the training loop. start_up.py prepares the first step, step_taker.py takes the steps, periodic.py evaluates
                   and decodes between steps, elastic.py continues after a change of devices, ending.py logs the end
evaluate.py, decode.py, verify.py   the other loops; dataset_batches.py reads their batches, decode_records.py writes decodes

Settings: run_config.py declares each once; experiment_config.py and class_overrides.py resolve the experiment, job.py builds it.
start_checks.py checks at the start of a run what the run needs only later, same_settings.py refuses a job whose processes have
different settings, rooms.py finds the optional subpackages, xla_flags.py passes the experiment's XLA flags to the compiler.

Callbacks of every run (`spmd_trainer.callbacks`; callback_list.py calls them):

summaries.py       writes a step's scalars; summary_writers.py and event_files.py write the files
saving.py          opens, saves and closes the run's checkpoints
early_stopping.py  stops training when `task.early_stopping_fn` says so, and keeps the best checkpoint
invalid_steps.py   counts steps with NaN, Inf or a rejected gradient

Checkpoints:

checkpoint_sources.py   opens checkpoints that other programs wrote
adapter_checkpoints.py  loads variables according to `init_from_checkpoint_rules`, and restores runs with adapters
checkpoints.py          restores checkpoints for evaluation and decode

Other files:

reference_logps.py      computes the reference model's log-probabilities for training on preferences
reference_files.py      stores these log-probabilities in the run's directory
run_directory.py        reads and writes the record of a run in its directory
phases.py               logs the progress of a run's long phases, such as compiling
live_status.py          stores the current status of a run; a display, such as a progress line, reads it
signals.py              turns Ctrl-C, SIGTERM and SIGHUP into requests to the training loop
"""
