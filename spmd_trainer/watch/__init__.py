"""What the processes of a run tell each other about their progress, and what is concluded.

beats.py         where a process is: step, phase, since when
stuck.py         who is behind, given the beats of all processes
board.py         how beats travel: each process writes its own, process 0 reads all and publishes one conclusion
stacks.py        Python stacks of this process, also while its interpreter is held by C code
bounded.py       work that must not keep a hanging process alive
link.py          what the command line lends to this room: how a process of a job leaves, and what was last heard of another one
step_parts.py    what this process's parts of each training step take: input, dispatch, device
device_watch.py  how long the devices take for a step, and for a small program of their own, looked at now and then
slow.py          which process is slow, and in which part, given the windows of all

`watch/watchdog.py` beats and reports; the training loop feeds `step_parts.py`.
"""
