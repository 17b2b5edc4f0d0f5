"""Kept train steps: a restart loads the compiled step and the layout of its state, instead of tracing and compiling them again.

Three questions decide whether a kept step is the one that tracing would give: `settings` (the same config, devices and
options?), `reads` (the same code, files and environment variables?), and whether all processes of the job say yes. Whatever
differs is logged, and the step is traced anew.
"""
