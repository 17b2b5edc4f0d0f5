"""Sweeps: many runs of one experiment, its trials, each with other values, and the page that compares them (`--mode=sweep`).

settings.py   the flags; `--trial=N` makes the settings of one trial, which trains as any other run
space.py      what is varied: lists of values, and ranges
methods.py    which values a trial gets: all of a grid, random ones, or what Optuna proposes
pax_search.py the same from an experiment's `search()` and its PyGlove values, as in Pax
trials.py     `Sweep`, the directory of a sweep and how its trials stand
callback.py   what a trial does besides training: writes its result, stops when it is pruned
run.py        `--mode=sweep`: runs the trials one after the other, each in a process of its own
scaling_law.py  what a family of sizes says of larger ones
page.py       `sweep.html`; its parts are sweep_page.html, sweep_page.css and sweep_page.js
"""
