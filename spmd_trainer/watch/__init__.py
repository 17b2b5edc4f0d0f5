"""What watches a training run: its progress, hangs, slow processes, wrong numbers; and the pages that show it.

run.py           lists the callbacks of this room. Without the room a run trains, and nobody watches it

stuck.py         beats: where a process is, its step, phase, since when; who is behind, given the beats of all processes
board.py         how beats travel: each process writes its own, process 0 reads all and publishes one conclusion
stacks.py        Python stacks of this process, also while its interpreter is held by C code
link.py          what the command line lends to this room: how a process of a job leaves, and what was last heard of another one
step_parts.py    what this process's parts of each training step take: input, dispatch, device
device_watch.py  how long the devices take for a step, and for a small program of their own, looked at now and then
slow.py          which process is slow, and in which part, given the windows of all
watchdog.py      beats, reports a run that makes no progress, and ends it (--hang_seconds)
progress.py      logs the progress lines
replica_check.py, repeat_check.py   compare devices' copies of the state, and a step that is taken twice
invalid_batches.py, loss_spikes.py  keep the batches of invalid steps for --mode=replay; count losses far above those before
profiler.py      profiles some steps
run_times.py     keeps where the time goes in run_times.jsonl
pages/           the run's page, run.html, written at the end, and --mode=page and --mode=data
tracking/        trackers, such as Weights & Biases (--track)
"""
