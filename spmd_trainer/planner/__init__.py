"""Reads compiled programs: collectives, the arrays that are live at peak memory, and how long they take.

`hlo_text.py` parses a program's text. `hlo_collectives.py` finds its collectives and the mesh axes that each crosses,
`hlo_liveness.py` the arrays that are live at each instruction, `hlo_costs.py` the FLOPs and bytes of each instruction. With the
bandwidths and measured rates in `links.py`, `roofline.py` estimates how long the program takes.
`chips.py` has the memory and peak FLOP/s of chips, `topologies.py` makes devices of chips that are not here. `value_flags.py`
evaluates a traced program with a flag on each value, and `nan_origin.py` finds where a NaN came from. `coord_check.py` compares
the products of a model at several widths.
"""
