"""Sweeps (`--mode=sweep`): many runs of one experiment, called trials, each with different values, and a page that compares them.

settings.py   the command-line flags; `--trial=N` turns them into the training settings of one trial
space.py      the settings that a sweep varies: lists of values, and ranges
methods.py    chooses each trial's values: all points of a grid, random values, or values that Optuna proposes
pax_search.py the same for an experiment with Pax's `search()`, whose search space consists of PyGlove values
trials.py     `Sweep`, the directory of a sweep and the status of its trials
callback.py   what a trial does in addition to training: writes its result, stops when it is pruned
run.py        `--mode=sweep`: runs the trials one after the other, each in a separate process
scaling_law.py  extrapolates the losses of a family of model sizes to larger sizes
page.py       writes the page, `sweep.html`, from sweep_page.html, sweep_page.css and sweep_page.js
"""
