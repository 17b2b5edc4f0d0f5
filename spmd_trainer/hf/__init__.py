"""Reads and writes Hugging Face model folders: config.json, *.safetensors, generation_config.json, tokenizer.

config_json.py       config.json as a `DecoderSpec`, and back
families/            the architectures: their settings, and the names of their tensors
setting_types.py     the names and types of the settings
text_part.py         the text model in the folder of a model for text and images
tensor_names.py      which tensors hold which variables, and in which order of dimensions
safetensors_file.py  the format of the files
quantised.py         tensors in FP8, and in MXFP4 (mxfp4.py), read as bfloat16
folder.py            opens a folder and checks its tensors
placing.py           reads tensors onto a mesh
source.py            HfSource: a folder as a source of `checkpointing.restore` and `init_from_checkpoint_rules`
export_folder.py     writes a folder
export_mode.py       --mode=export: writes a checkpoint as a folder
writing.py           how files and folders are written
experiment.py        `experiment_from_folder` and `load`
errors.py            the errors
peft/                folders of adapters in PEFT's format
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
