"""Which tensor of a Hugging Face folder holds which part of a variable, by name alone: no folder, no array."""

import numpy as np
import pytest

from spmd_trainer.hf import tensor_names
from spmd_trainer.hf.families import FAMILIES
from spmd_trainer.models.decoder_spec import DecoderSpec, MoeSpec

SIZES = {
    "vocab_size": 8, "model_dims": 4, "hidden_dims": 6, "num_layers": 4, "num_heads": 2, "num_kv_heads": 1, "head_dims": 2,
}  # fmt: skip
MODEL = "mdl_vars/params/lm/"
LAYER = f"{MODEL}layers/sub/layer_"


def pieces(architecture, path, **fields):
    """Returns the tensors that hold a variable."""
    variables = tensor_names.variables_of(DecoderSpec(**{**SIZES, **fields}), FAMILIES[architecture])
    return variables[path].pieces


@pytest.mark.parametrize(
    ("architecture", "parts"),
    [
        ("MixtralForCausalLM", {"gate": "{}.w1", "up": "{}.w3", "down": "{}.w2"}),
        ("Qwen3MoeForCausalLM", {"gate": "{}.gate_proj", "up": "{}.up_proj", "down": "{}.down_proj"}),
    ],
)
def test_names_of_the_experts(architecture, parts):
    inside = "block_sparse_moe" if architecture == "MixtralForCausalLM" else "mlp"
    moe = MoeSpec(num_experts=2, num_experts_per_token=1, hidden_dims=6)
    for ours, theirs in parts.items():
        found = pieces(architecture, f"{LAYER}0/moe/{ours}/w", num_layers=1, moe=moe)
        assert [(piece.name, piece.leading) for piece in found] == [
            (f"model.layers.0.{inside}.{theirs.format(f'experts.{expert}')}.weight", (0, expert)) for expert in range(2)
        ]


def test_the_parts_of_a_fused_projection():
    for part, ours in enumerate(("query", "key", "value")):
        for kind in "wb":
            path = f"{LAYER}0/attention/{ours}/{kind}"
            (piece,) = pieces(
                "GPT2LMHeadModel", path, num_layers=1, num_kv_heads=2, positions="learned", max_positions=3
            )
            assert piece.name == f"transformer.h.0.attn.c_attn.{'weight' if kind == 'w' else 'bias'}"
            assert piece.part == part
            stored = np.arange(3 * 4 * (4 if kind == "w" else 1)).reshape((4, 12) if kind == "w" else (12,))
            rows = stored[slice(*piece.rows(0, 4 if kind == "w" else 2))]
            of_part = stored[..., 4 * part : 4 * part + 4]
            np.testing.assert_array_equal(piece.of_rows(rows), of_part.reshape(*of_part.shape[:-1], 2, 2))


def test_gate_and_up_take_turns_in_gpt_oss():
    moe = MoeSpec(num_experts=2, num_experts_per_token=1, hidden_dims=6, biases=True, swiglu_limit=7.0)
    for part, ours in enumerate(("gate", "up")):
        (piece,) = pieces("GptOssForCausalLM", f"{LAYER}0/moe/{ours}/w", num_layers=1, moe=moe)
        assert (piece.name, piece.shape) == ("model.layers.0.mlp.experts.gate_up_proj", (2, 4, 12))
        assert (piece.part, piece.leading) == (part, (0,))
        stored = np.arange(2 * 4 * 12).reshape(2, 4, 12)
        np.testing.assert_array_equal(piece.of_rows(stored), stored[..., part::2])


def test_layers_of_a_pattern_take_turns():
    fields = {"num_layers": 7, "layer_pattern": ("local", "local", "global"), "window": 2}
    path = "attention/query/w"
    numbers = {
        place: [piece.name.split(".")[2] for piece in pieces("Gemma3ForCausalLM", f"{place}/{path}", **fields)]
        for place in (f"{LAYER}0", f"{LAYER}1", f"{LAYER}2", f"{MODEL}last_layers_0")
    }
    assert list(numbers.values()) == [["0", "3"], ["1", "4"], ["2", "5"], ["6"]]


def test_layers_without_experts_come_first():
    moe = MoeSpec(
        num_experts=2, num_experts_per_token=1, hidden_dims=6, dense_layers=2, shared_dims=3, choice_bias=True
    )
    variables = tensor_names.variables_of(DecoderSpec(**SIZES, moe=moe), FAMILIES["Glm4MoeForCausalLM"])
    names = {path: [piece.name for piece in variable.pieces] for path, variable in variables.items()}
    assert names[f"{MODEL}first_layers_1/mlp/up/w"] == ["model.layers.1.mlp.up_proj.weight"]
    assert names[f"{LAYER}0/moe/shared/up/w"] == [f"model.layers.{n}.mlp.shared_experts.up_proj.weight" for n in (2, 3)]
    biases = LAYER.replace("params", "non_trainable") + "0/moe/router/choice_bias"
    assert names[biases] == [f"model.layers.{n}.mlp.gate.e_score_correction_bias" for n in (2, 3)]
    assert not any("first" in path and "moe" in path for path in names)


def test_shapes_are_those_of_the_tensors():
    (query,) = pieces("LlamaForCausalLM", f"{LAYER}0/attention/query/w", num_layers=1)
    assert (query.name, query.shape) == ("model.layers.0.self_attn.q_proj.weight", (4, 4))
    (logits,) = pieces("LlamaForCausalLM", f"{MODEL}logits/w")
    assert (logits.name, logits.shape) == ("lm_head.weight", (8, 4))
