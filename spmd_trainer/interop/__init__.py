"""Reads what others wrote, and writes what they read.

pax/        checkpoints of Pax (paxml)
flax/       Orbax checkpoints of programs in plain Flax, for warm starts
hf/         Hugging Face folders, in and out
peft/       adapters in the format of PEFT, in and out
shards.py   which part of a variable each shard holds
foreign.py  finds out whose checkpoint a directory holds
"""
