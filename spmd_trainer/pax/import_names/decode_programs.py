"""Pax's `decode_programs`: the decode program of one dataset."""

from spmd_trainer.base_experiment import SingleTaskDecodeProgram
from spmd_trainer.errors.absent_names import getter

__all__ = ["SingleTaskDecodeProgram"]

ABSENT = {"DecodeProgramOutput": "decodes are written to decode_out/DATASET/step_N.jsonl"}
__getattr__ = getter(__name__, ABSENT)
