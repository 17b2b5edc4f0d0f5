"""What transformers and PEFT do with folders, in the environment with torch. Imports nothing of this project.

python torch_side.py logits FOLDER IDS.npy LOGITS.npy
python torch_side.py train FOLDER BATCHES.npy LOSSES.npy     AdamW on batches [steps, rows, length]
python torch_side.py mxfp4 BLOCKS.npy SCALES.npy VALUES.npy  the values of blocks, as float32

FOLDER is a model, or adapters whose adapter_config.json names their base; then the adapters alone are trained.
"""

from __future__ import annotations

import pathlib
import sys

import numpy as np
import peft
import torch
import transformers
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

# Those of `SETTINGS` in test_live_models.py.
LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY = 1e-3, (0.9, 0.95), 1e-6, 0.1


def load(folder: str) -> torch.nn.Module:
    """Opens a folder as a user does."""
    if (pathlib.Path(folder) / "adapter_config.json").exists():
        return peft.AutoPeftModelForCausalLM.from_pretrained(
            folder, is_trainable=True, attn_implementation="eager", dtype=torch.float32
        )
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )


def logits(folder: str, ids: np.ndarray) -> np.ndarray:
    """Returns [rows, length, vocab]."""
    with torch.no_grad():
        found: np.ndarray = load(folder).eval()(torch.tensor(ids, dtype=torch.long)).logits.numpy()
    return found


def train(folder: str, batches: np.ndarray) -> np.ndarray:
    """Returns the loss of each step."""
    model = load(folder).eval()  # no dropout
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY)
    losses = []
    for batch in torch.tensor(batches, dtype=torch.long):
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return np.array(losses)


def mxfp4(blocks: str, scales: np.ndarray) -> np.ndarray:
    """Returns [experts, inputs, outputs]."""
    stored = torch.tensor(np.load(blocks)), torch.tensor(scales)
    found: np.ndarray = convert_moe_packed_tensors(*stored, dtype=torch.bfloat16).float().numpy()
    return found


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    command, folder, source, target = sys.argv[1:]
    np.save(target, {"logits": logits, "train": train, "mxfp4": mxfp4}[command](folder, np.load(source)))
