"""Reads and writes adapters (LoRA, DoRA) in the format of PEFT: adapter_config.json and adapter_model.safetensors.

adapter_config.py  adapter_config.json: read, checked against `task.lora`, and written
tensor_names.py    which tensors hold which adapters
source.py          a folder, or a directory of folders for several adapters, as a checkpoint of adapters
export_folder.py   writes folders
"""

from spmd_trainer.hf.peft.adapter_config import base_of
from spmd_trainer.hf.peft.export_folder import export
from spmd_trainer.hf.peft.source import PeftSource, is_folder, open_source

__all__ = ["PeftSource", "base_of", "export", "is_folder", "open_source"]
