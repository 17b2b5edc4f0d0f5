"""Weights in MXFP4 become the numbers that they stand for; blocks and scales that don't fit are refused."""

import shutil

import ml_dtypes
import numpy as np
import pytest
from facts import raises_naming
from hf_models import DATA
from safetensors.numpy import load_file, save_file

from spmd_trainer import hf
from spmd_trainer.hf import mxfp4

FOLDER = DATA / "gpt_oss_mxfp4"
NAME = "model.layers.1.mlp.experts.down_proj"


def numbers(blocks, scales):
    """By the dtypes of ml_dtypes, in float32."""
    nibbles = np.stack([blocks & 15, blocks >> 4], axis=-1).astype(np.uint8)
    factors = scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    with np.errstate(over="ignore"):  # 6 times the largest factor
        values = nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * factors[..., None, None]
    return values.reshape(*scales.shape[:-1], -1)


def test_every_byte_with_every_scale():
    scales = np.repeat(np.arange(255, dtype=np.uint8), 16).reshape(255, 16)
    blocks = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(16, 16), (255, 16, 16))
    found = mxfp4.dequantised(blocks, scales)
    wanted = numbers(blocks, scales).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(found.view(np.uint16), wanted.view(np.uint16))


def test_a_tensor_of_a_folder():
    folder, stored = hf.open_folder(FOLDER), load_file(FOLDER / "model.safetensors")
    tensor = folder.tensors[NAME]
    assert (tensor.shape, tensor.dtype, folder.dtype()) == ((3, 32, 32), ml_dtypes.bfloat16, ml_dtypes.bfloat16)
    found = tensor.read_rows(1, 3)
    wanted = numbers(stored[f"{NAME}_blocks"], stored[f"{NAME}_scales"])[1:].transpose(0, 2, 1)
    np.testing.assert_array_equal(found.astype(np.float32), wanted)


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({f"{NAME}_scales": None}, (f"{NAME}_blocks", f"no {NAME}_scales")),
        ({f"{NAME}_scales": np.zeros((3, 32, 2), np.uint8)}, (f"{NAME}_scales", "(3, 32, 2)", "(3, 32, 1, 16)")),
        ({f"{NAME}_blocks": np.zeros((3, 32, 1, 16), np.int8)}, (f"{NAME}_blocks", "int8")),
    ],
    ids=["no scales", "shape", "dtype"],
)
def test_what_does_not_fit_is_named(change, facts, tmp_path):
    folder = shutil.copytree(FOLDER, tmp_path / "gpt_oss")
    tensors = load_file(folder / "model.safetensors") | change
    save_file({name: x for name, x in tensors.items() if x is not None}, folder / "model.safetensors")
    with raises_naming(hf.HfDamagedError, *facts):
        hf.open_folder(folder)
