"""Monitoring of a training run: its progress, hangs, slow processes and wrong numbers, and pages that show the run.

run.py           lists the callbacks of this package. Without the package a run trains, but is not monitored

stuck.py         beats (heartbeats): a process' step and phase, and since when; which process is behind, given all beats
board.py         exchanges beats: each process writes its own, process 0 reads all and publishes one digest
stacks.py        Python stacks of this process, also while its interpreter is held by C code
link.py          link between the command line and this package: how a process leaves its job, and another process' last beat
step_parts.py    measures the seconds of each part of a training step in this process: input, dispatch, device
device_watch.py  measures now and then the seconds that the devices take for a step, and for a small program without collectives
slow.py          finds which process is slow, and in which part, given the measurements ("windows") of all processes
watchdog.py      sends beats, reports a run that makes no progress, and ends it (--hang_seconds)
progress.py      logs the progress lines
replica_check.py, repeat_check.py   compare devices' copies of the state, and the results of a step that is taken twice
invalid_batches.py, loss_spikes.py  keep the batches of invalid steps for --mode=replay; count loss spikes
profiler.py      profiles some steps
run_times.py     writes where a run's time goes to run_times.jsonl
pages/           the run's page, run.html, written at the end, and --mode=page and --mode=data
tracking/        trackers, such as Weights & Biases (--track)
"""
