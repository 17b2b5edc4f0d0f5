"""What transformers and PEFT do with folders, in the environment with torch. Imports nothing of this project.

python torch_side.py logits FOLDER IDS.npy LOGITS.npy
python torch_side.py train FOLDER BATCHES.npy LOSSES.npy     AdamW on batches [steps, rows, length]
python torch_side.py mxfp4 BLOCKS.npy SCALES.npy VALUES.npy  the values of blocks, as float32
python torch_side.py whole FOLDER IDS.npy LOGITS.npy         makes the model for text and images that FOLDER is named after

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


def whole(folder: str, ids: np.ndarray) -> np.ndarray:
    """Saves a tiny model of the class that the folder is named after. Returns its logits for text, [rows, length, vocab]."""
    model_class = getattr(transformers, pathlib.Path(folder).name)
    text = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 4}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
    text |= {"sliding_window": 4, "query_pre_attn_scalar": 8} if "Gemma3" in folder else {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5
    }  # fmt: skip
    if "Moe" in folder:
        text |= {
            "moe_intermediate_size": 6,
            "shared_expert_intermediate_size": 7,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        }
    heads = "num_attention_heads" if "Gemma3" in folder else "num_heads"
    config = model_class.config_class(
        text_config=text, vision_config={"hidden_size": 16, "intermediate_size": 16, heads: 2, "image_size": 28}
    )
    model = model_class._from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    model.tie_weights()
    model.save_pretrained(folder)
    with torch.no_grad():
        found: np.ndarray = model.eval()(torch.tensor(ids, dtype=torch.long)).logits.numpy()
    return found


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    command, folder, source, target = sys.argv[1:]
    commands = {"logits": logits, "train": train, "mxfp4": mxfp4, "whole": whole}
    np.save(target, commands[command](folder, np.load(source)))
