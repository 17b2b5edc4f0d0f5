"""What Python, its packages and its user need around the trainer; importing it brings in the standard library alone.

Start with `user_code.py`, which tells the user's own code from libraries in tracebacks and logs. `installation.py` knows the
packages that no resolver can install, `garbage.py` lets the garbage collector rest while a run starts, and
`quiet_tensorflow.py` keeps TensorFlow from writing notices to the terminal.
"""
