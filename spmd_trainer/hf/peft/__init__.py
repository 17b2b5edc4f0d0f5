"""Reads and writes adapters (LoRA, DoRA) in the format of PEFT: adapter_config.json and adapter_model.safetensors.

adapter_config.py  reads, checks and makes adapter_config.json
tensor_names.py    maps adapter variables to PEFT tensors
source.py          presents a PEFT folder, or a directory with one PEFT folder per adapter, as a checkpoint
export_folder.py   writes PEFT folders
"""

from spmd_trainer.hf.peft.adapter_config import base_of
from spmd_trainer.hf.peft.export_folder import export
from spmd_trainer.hf.peft.source import PeftSource, is_folder, open_source

__all__ = ["PeftSource", "base_of", "export", "is_folder", "open_source"]
