"""Weights in FP8 become the numbers that they stand for; values and factors that don't fit are refused."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest
from facts import raises_naming
from hf_models import DATA
from safetensors.numpy import load_file, save_file

from spmd_trainer import hf

FOLDER = DATA / "deepseek_v3"
NAME = "model.layers.1.self_attn.q_b_proj.weight"
ROWS, COLUMNS = 7, 4


def in_fp8(tmp_path, change=lambda tensors: None, dtype=np.float32):
    """A copy of the folder with the layers' matrices in FP8, and its tensors. No block divides the matrices.

    dtype: of the factors.
    """
    folder, random = shutil.copytree(FOLDER, tmp_path / "deepseek"), np.random.default_rng(0)
    tensors = load_file(folder / "model.safetensors")
    for name, x in list(tensors.items()):
        if x.ndim == 2 and ".layers." in name and "mlp.gate.weight" not in name:
            tensors[name] = x.astype(ml_dtypes.float8_e4m3fn)
            shape = (-(-x.shape[0] // ROWS), -(-x.shape[1] // COLUMNS))
            tensors[f"{name}_scale_inv"] = random.uniform(0.5, 2.0, shape).astype(dtype)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [ROWS, COLUMNS]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder, tensors


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e8m0fnu])
def test_each_value_is_multiplied_by_the_factor_of_its_block(tmp_path, dtype):
    path, stored = in_fp8(tmp_path, dtype=dtype)
    folder = hf.open_folder(path)
    tensor, values, factors = folder.tensors[NAME], stored[NAME], stored[f"{NAME}_scale_inv"]
    assert (tensor.shape, tensor.dtype, folder.dtype()) == (values.shape, ml_dtypes.bfloat16, ml_dtypes.bfloat16)
    wanted = np.array(
        [
            [float(x) * float(factors[i // ROWS, j // COLUMNS]) for j, x in enumerate(row)]
            for i, row in enumerate(values)
        ]
    ).astype(ml_dtypes.bfloat16)
    for first, last in ((0, len(values)), (5, 9), (ROWS, ROWS), (len(values) - 1, len(values))):
        np.testing.assert_array_equal(tensor.read_rows(first, last), wanted[first:last])
    assert not [name for name in folder.tensors if name.endswith("_scale_inv")]


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        (lambda tensors: tensors.pop(f"{NAME}_scale_inv"), (f"{NAME} in FP8", f"no {NAME}_scale_inv")),
        (lambda tensors: tensors.pop(NAME), (f"{NAME}_scale_inv", f"no {NAME}")),
        (
            lambda tensors: tensors.update({f"{NAME}_scale_inv": np.ones((5, 2), np.float32)}),
            (f"{NAME}_scale_inv", "(5, 2)", "(5, 3)"),
        ),
    ],
    ids=["no factors", "no values", "shape"],
)
def test_what_does_not_fit_is_named(change, facts, tmp_path):
    path, _ = in_fp8(tmp_path, change)
    with raises_naming(hf.HfDamagedError, *facts):
        hf.open_folder(path)
