"""Llama 1 to 3."""

from __future__ import annotations

from spmd_trainer.hf.families import shared
from spmd_trainer.hf.families.family import Family

FAMILIES = (
    Family(
        "LlamaForCausalLM",
        "llama",
        {**shared.KEYS, "mlp_bias": "mlp_bias"},
        {**shared.DEFAULTS, "mlp_bias": False, "max_position_embeddings": 2048},
        {},
        shared.read_biases,
        shared.write_biases,
        shared.names_like_llama,
        heads_divide_dims=True,
    ),
)
