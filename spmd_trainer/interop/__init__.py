"""Reads what other trainers wrote.

pax/      checkpoints of Pax (paxml)
flax/     Orbax checkpoints of programs in plain Flax, for warm starts
foreign.py  finds out whose checkpoint a directory holds
"""
