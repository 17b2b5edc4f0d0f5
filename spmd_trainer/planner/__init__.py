"""Analyses compiled and traced programs: collectives, peak memory, step time and the origin of NaNs.

`hlo_text.py` parses the text of a compiled program. From this text, `hlo_collectives.py` finds the collectives and the mesh axes
that each crosses, `hlo_liveness.py` the arrays that are live at each instruction, and `hlo_costs.py` the FLOPs and bytes of each
instruction. `roofline.py` estimates the program's time from these and from the bandwidths and measured rates in `links.py`.
`kernels/chips.py` has the memory and peak FLOP/s of chips. `topologies.py` makes compile-only devices for chips that this machine
lacks. `value_flags.py` evaluates a traced program and flags the values with a NaN or infinity, and `nan_origin.py` finds where a
NaN came from. `coord_check.py` compares the matrix products of a model at several widths.
"""
