"""Greedy generation gives the tokens of transformers' generate(), 64 for each of several uneven prompts, on any mesh.

The tokens are in tests/interop/data/hf; tools/make_hf_goldens.py makes them.
"""

import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from praxis.pax_fiddle import Config
from trained_helpers import make_job

from spmd_trainer import hf
from spmd_trainer.experiments.lm.synthetic_decoder import SyntheticDecoder
from spmd_trainer.hf import folder as hf_folder
from spmd_trainer.inputs import ArrayInput
from spmd_trainer.inputs.huggingface_tokenizer import HuggingFaceTokenizer
from spmd_trainer.models.decoder_spec import DecoderSpec
from spmd_trainer.training.decode import DecodeDataset

GOLDEN = pathlib.Path(__file__).parents[1] / "interop" / "data" / "hf"
WITH_TEXT = "llama_tokenizer"
# One folder of each family that is not generated from on a mesh below.
FAMILIES = ["qwen2", "qwen3", "mistral", "mixtral", "glm4_moe", "gpt_oss", "gemma3", "gpt2", "olmo2", "olmo3_yarn"]
FAMILIES += ["gemma4_own_values", "llama4_two_of_four", "deepseek_v3", "deepseek_v3_direct", "qwen3_5", "qwen3_5_moe"]


class Prompts(ArrayInput):
    """Prompts as token ids, and their tokenizer."""

    tokenizer: Any = None


class Golden(SyntheticDecoder):
    """The model and the prompts of a folder."""

    FOLDER = ""
    FPROP_DTYPE = jnp.float32
    MAX_SEQ_LEN = 8

    @property
    def VOCAB_SIZE(self):  # a class attribute of other experiments
        return self.spec_of_folder().vocab_size

    def spec_of_folder(self):
        return hf_folder.read_model(GOLDEN / self.FOLDER)[2]

    def spec(self):
        fields = vars(self.spec_of_folder()).items()
        return Config(
            DecoderSpec, **{k: Config(type(v), **vars(v)) if hasattr(v, "__dict__") else v for k, v in fields}
        )

    def decode_datasets(self):
        expected = np.load(GOLDEN / self.FOLDER / "expected.npz")
        lengths, width = expected["prompt_lengths"], expected["prompts"].shape[1]
        # The file has the prompts at the right.
        rows = [np.roll(row, length - width) for row, length in zip(expected["prompts"], lengths, strict=True)]
        tokenizer = HuggingFaceTokenizer(GOLDEN / self.FOLDER) if self.FOLDER == WITH_TEXT else None
        arrays = {"ids": np.stack(rows), "prefix_lengths": lengths}
        return [Config(Prompts, name="prompts", arrays=arrays, batch_size=len(rows), tokenizer=tokenizer)]


def generate(folder, directory, mesh=(1, 1, 1), **settings):
    """Returns the continuations [B, 64], -1 after a row's end."""
    expected = np.load(GOLDEN / folder / "expected.npz")
    steps = expected["tokens"].shape[1]

    def customize(config):
        config.task.model.generation.set(**{"max_tokens": steps, "eos_ids": (), **settings})

    job = make_job(
        directory, mesh=mesh, exp=Golden, fields=(f"FOLDER={folder!r}",), customize=customize, mode="decode_once"
    )
    dataset = DecodeDataset(job, job.config.experiment.config.decode_datasets[0], 0)
    state = hf.load(GOLDEN / folder, job).replace(opt_states=[])
    found = dataset.outputs(state, next(dataset._batches()))
    tokens = np.full((len(expected["prompts"]), steps), -1)
    for row, start in enumerate(expected["prompt_lengths"]):
        made = found.decode_lengths[row, 0] - start
        tokens[row, :made] = found.output_ids[row, 0, start : start + made]
    return tokens


@pytest.mark.full
@pytest.mark.parametrize("folder", FAMILIES)
def test_greedy_tokens_are_those_of_transformers(folder, tmp_path):
    expected = np.load(GOLDEN / folder / "expected.npz")
    np.testing.assert_array_equal(generate(folder, tmp_path), expected["tokens"])


@pytest.mark.parametrize(
    ("folder", "mesh"),
    [
        pytest.param(WITH_TEXT, (1, 2, 3), marks=pytest.mark.full),
        ("qwen3_moe_wide", (1, 3, 2)),
        pytest.param("gemma2", (1, 2, 3), marks=pytest.mark.full),
        ("deepseek_v3", (1, 2, 2)),
        ("qwen3_next", (1, 2, 2)),
        ("llama4", (1, 2, 4)),
        ("gemma4", (1, 2, 4)),
    ],
)
@pytest.mark.full
def test_a_mesh_that_divides_nothing_gives_the_same_tokens(folder, mesh, tmp_path):
    expected = np.load(GOLDEN / folder / "expected.npz")
    spec = hf_folder.read_model(GOLDEN / folder)[2]
    assert any(size % mesh[2] for size in (spec.num_heads, spec.num_kv_heads, spec.vocab_size))
    np.testing.assert_array_equal(generate(folder, tmp_path, mesh), expected["tokens"])


@pytest.mark.full
@pytest.mark.parametrize(
    ("settings", "name"),
    [
        (lambda e: {"eos_ids": (int(e["eos_id"]),)}, "tokens_to_eos"),
        (lambda e: {"stop": tuple(map(str, e["stop_strings"]))}, "tokens_to_stop"),
    ],
    ids=["eos", "stop strings"],
)
def test_rows_end_where_those_of_transformers_do(settings, name, tmp_path):
    expected = np.load(GOLDEN / WITH_TEXT / "expected.npz")
    found = generate(WITH_TEXT, tmp_path, (1, 2, 3), **settings(expected))
    np.testing.assert_array_equal(found, expected[name])
    assert (found == -1).any()
