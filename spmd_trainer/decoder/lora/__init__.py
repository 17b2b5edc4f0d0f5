"""Fine-tuning by low-rank adapters (LoRA, DoRA) for the weights of any model.

    task_p.lora = Config(lora.Lora, targets=["attention/(query|value)/w"], rank=8, alpha=16.0)

The model's code has no adapters. `LoraModel` traces it, finds the matrix products with the targets (the weights to adapt),
and adds two small matrix products with the adapters to each. Read `model.py` first; `interpreter.py` evaluates the program.
"""

from spmd_trainer.decoder.lora.model import LoraModel, traced_on
from spmd_trainer.decoder.lora.settings import Lora
from spmd_trainer.decoder.lora.variables import base_only
from spmd_trainer.step.product_results import MatrixDims
from spmd_trainer.train_states import is_adapter

__all__ = [
    "Lora",
    "LoraModel",
    "MatrixDims",
    "base_only",
    "is_adapter",
    "traced_on",
]
