"""Analyzes compiled and traced programs: collectives, peak memory, step time and the origin of NaNs.

`hlo_text.py` parses the text of a compiled program. Three modules use the parsed text: `hlo_collectives.py` finds the collectives
and the mesh axes that each one crosses, `hlo_liveness.py` finds the arrays that are live at each instruction, and `hlo_costs.py`
counts each instruction's FLOPs and bytes. `roofline.py` estimates the step time from these and from the rates in `links.py`.
`kernels/chips.py` lists the memory and peak FLOP/s of chips. `topologies.py` makes compile-only devices for chips that this
machine lacks. `value_flags.py` evaluates a traced program and flags the values that have a NaN or infinity. `nan_origin.py` finds
where a NaN came from. `coord_check.py` checks that training changes activations equally at several model widths.
"""
