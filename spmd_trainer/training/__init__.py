"""The loops: train, eval, decode. Each reads top to bottom; what they share is in `job`.

train.py           the training loop. start_up.py gets it to the first step, step_taker.py takes the steps, periodic.py evaluates
                   and decodes between them, elastic.py goes on after a change of devices, ending.py logs the end
evaluate.py, decode.py, verify.py   the other loops; dataset_batches.py has their batches, decode_records.py what a decode writes

Settings: run_config.py states each once; experiment_config.py and class_overrides.py resolve the experiment, job.py builds it.
start_checks.py finds early what would end the run late, same_settings.py refuses processes that differ, rooms.py knows the
rooms without which a run trains, xla_flags.py passes the experiment's flags to the compiler.

Callbacks of every run (`spmd_trainer.callbacks`; callback_list.py calls them):

summaries.py       writes a step's scalars; summary_writers.py and event_files.py write the files
saving.py          opens, saves and closes the run's checkpoints
early_stopping.py  asks `task.early_stopping_fn`, and keeps the best checkpoint
invalid_steps.py   counts steps with NaN, Inf or a rejected gradient

Checkpoints: checkpoint_sources.py opens those of other programs, adapter_checkpoints.py loads by rules and restores adapters,
checkpoints.py has those that evaluation and decode follow. Preferences: reference_logps.py, reference_files.py. A run's
directory: run_directory.py. Its phases and its status: phases.py, live_status.py. Signals: signals.py.
"""
