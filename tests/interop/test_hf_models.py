"""Models of every family give transformers' logits and loss. `make interop` does the same for all folders on all meshes."""

from __future__ import annotations

import numpy as np
import pytest
from hf_models import DATA, expected, make_job, mesh_of, read

ONE, SPLIT, CUBE = (1, 1, 1), (1, 4, 2), (2, 2, 2)
# Those of `make test`.
SHORT = ("llama3_rope_tied", "qwen3_moe", "qwen3_5_moe", "gemma2_small_caps", "gpt2")
# Divides neither the heads, nor the key/value heads, nor the vocabulary of the folders it is used for.
UNEVEN = (1, 2, 4)
CASES = [
    ("llama_untied", ONE),
    ("llama3_rope_tied", SPLIT),
    ("llama_biases", CUBE),
    ("llama3_rope", UNEVEN),
    ("llama4", ONE),
    ("llama4", SPLIT),
    ("llama4", UNEVEN),
    ("llama4_two_of_four", CUBE),
    ("qwen2", UNEVEN),
    ("qwen2_window", ONE),
    ("qwen3", SPLIT),
    ("qwen3_yarn", UNEVEN),
    ("qwen3_moe", UNEVEN),
    ("mistral", CUBE),
    ("mixtral_window", SPLIT),
    ("glm4_moe", UNEVEN),
    ("glm4_moe_groups", SPLIT),
    ("glm4_moe_rope", CUBE),
    ("deepseek_v3", UNEVEN),
    ("deepseek_v3", SPLIT),
    ("deepseek_v3_direct", CUBE),
    ("qwen3_next", UNEVEN),
    ("qwen3_next", SPLIT),
    ("qwen3_5", CUBE),
    ("qwen3_5", UNEVEN),
    ("qwen3_5_moe", UNEVEN),
    ("gpt_oss", UNEVEN),
    ("gpt_oss_limit", CUBE),
    ("gpt_oss_mxfp4", SPLIT),
    ("gemma2_small_caps", UNEVEN),
    ("gemma3_linear_rope", SPLIT),
    ("gemma4", UNEVEN),
    ("gemma4", SPLIT),
    ("gemma4_own_values", CUBE),
    ("gpt2", UNEVEN),
    ("olmo2", CUBE),
    ("olmo3", CUBE),
    ("olmo3_yarn", UNEVEN),
]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        pytest.param(
            name, sizes, id=f"{name}-{'x'.join(map(str, sizes))}", marks=() if name in SHORT else pytest.mark.full
        )
        for name, sizes in CASES
    ],
)
def test_logits_and_loss_are_those_of_transformers(name, sizes):
    folder, mesh = DATA / name, mesh_of(*sizes)
    job = make_job(folder, mesh)
    logits, loss = job.logits_and_loss(read(folder, job))
    wanted = expected(folder)
    np.testing.assert_allclose(logits, wanted["logits"], rtol=0, atol=1e-4)
    assert abs(loss - float(wanted["loss"])) < 1e-5
