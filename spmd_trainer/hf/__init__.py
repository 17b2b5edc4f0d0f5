"""Reads and writes Hugging Face model folders: config.json, *.safetensors, generation_config.json, tokenizer.

config_json.py       converts config.json to a `DecoderSpec`, and back
families/            the supported architectures: their config.json settings and their tensor names
setting_types.py     checks the names and types of the settings in config.json
text_part.py         finds the text model in the folder of a multimodal model
tensor_names.py      maps variables to tensors, including the order of the dimensions
safetensors_file.py  reads and writes safetensors files
quantised.py         reads FP8 and MXFP4 (mxfp4.py) tensors as bfloat16
folder.py            opens a folder and checks its tensors
placing.py           reads tensors onto a mesh
source.py            HfSource: a folder as a checkpoint for `checkpointing.restore` and `init_from_checkpoint_rules`
export_folder.py     writes a model folder
export_mode.py       --mode=export: writes a checkpoint as a model folder
writing.py           writes safetensors files, and renames a finished folder
experiment.py        `experiment_from_folder` and `load`
errors.py            the exceptions of this package
peft/                reads and writes folders of adapters in PEFT's format
"""

from spmd_trainer.hf.errors import HfDamagedError, HfError, HfMismatchError, HfNotFoundError
from spmd_trainer.hf.experiment import experiment_from_folder, load, require_model, warn_of_differences
from spmd_trainer.hf.export_folder import DTYPES, export
from spmd_trainer.hf.folder import HfFolder, is_folder, open_folder
from spmd_trainer.hf.source import HfSource, find_agreed, open_source
from spmd_trainer.hf.writing import check_directory

__all__ = [
    "DTYPES",
    "HfDamagedError",
    "HfError",
    "HfFolder",
    "HfMismatchError",
    "HfNotFoundError",
    "HfSource",
    "check_directory",
    "experiment_from_folder",
    "export",
    "find_agreed",
    "is_folder",
    "load",
    "open_folder",
    "open_source",
    "require_model",
    "warn_of_differences",
]
