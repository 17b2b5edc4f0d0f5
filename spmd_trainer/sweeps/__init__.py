"""Sweeps (`--mode=sweep`): many runs of one experiment, called trials, each with different values, and a page that compares them.

settings.py   the flags; with `--trial=N` they become those of one trial, which trains as any other run
space.py      what is varied: lists of values, and ranges
methods.py    which values a trial gets: all of a grid, random ones, or those that Optuna proposes
pax_search.py the same for an experiment's `search()` and its PyGlove values, as in Pax
trials.py     `Sweep`, the directory of a sweep and the status of its trials
callback.py   what a trial does besides training: writes its result, stops when it is pruned
run.py        `--mode=sweep`: runs the trials one after the other, each in a separate process
scaling_law.py  extrapolates the losses of a family of model sizes to larger sizes
page.py       `sweep.html`; its parts are sweep_page.html, sweep_page.css and sweep_page.js
"""
