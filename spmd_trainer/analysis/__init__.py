"""Reads compiled programs: their collectives, the arrays that are live at the peak of memory, and the chips that run them.

Start with `hlo_collectives.py`, which finds the collectives of a program and the mesh axes that each one crosses.
`hlo_liveness.py` lists the arrays behind the peak, and `chips.py` has memory and peak FLOPs of the chips. No file here needs
praxis or the trainer.
"""
