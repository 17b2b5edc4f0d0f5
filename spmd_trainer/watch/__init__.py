"""Monitoring of a training run: its progress, hangs, slow processes and wrong numbers, and pages that show the run.

run.py           lists the callbacks of this package. Without the package a run trains, but is not monitored

stuck.py         beats (heartbeats) say at which step and phase each process is; finds the processes that are behind
board.py         exchanges beats: each process writes its own, process 0 reads all and publishes a summary (digest)
stacks.py        Python stacks of this process, also while C code holds its interpreter
link.py          lets the command line and this package share how a process exits, and what each process last did
step_parts.py    measures the time of each part of a training step in this process: input, dispatch, device
device_watch.py  measures now and then how long the devices take for a step, and for a small program without collectives
slow.py          finds which process is slow, and in which part of a step, by comparing the times of all processes
watchdog.py      sends beats, reports a run that makes no progress, and ends such a run (--hang_seconds)
progress.py      logs the progress lines
replica_check.py, repeat_check.py   compare the devices' copies of the state; repeat a step and compare the two results
invalid_batches.py, loss_spikes.py  write the batches of invalid steps for --mode=replay; count loss spikes
profiler.py      profiles some steps
run_times.py     records in run_times.jsonl how much time each part of a run's work takes
pages/           HTML pages: run.html, which a run writes at its end, --mode=page and --mode=data
tracking/        reports a run to trackers, such as Weights & Biases (--track)
"""
