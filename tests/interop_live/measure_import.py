"""Measures reading a Hugging Face folder, in a process of its own.

python measure_import.py make DIR               writes a random Llama of 2.1 GiB
python measure_import.py import DIR DEVICES     reads it onto host devices; prints: peak memory above that of JAX alone, size
                                                of the state, size of the largest tensor (MiB); speed, and that of reading the
                                                bytes into memory (GiB/s), the best of three in turn
"""

from __future__ import annotations

import gc
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable

import numpy as np

MIB = 2**20
ROUNDS = 3


def make(directory: pathlib.Path) -> None:
    """Writes the folder."""
    from spmd_trainer.hf import config_json, safetensors_file, tensor_names
    from spmd_trainer.models.decoder_spec import DecoderSpec

    spec = DecoderSpec(
        vocab_size=32_000,
        model_dims=2048,
        hidden_dims=5632,
        num_layers=10,
        num_heads=32,
        num_kv_heads=4,
        head_dims=64,
        max_positions=2048,
    )
    config = config_json.config_of(spec)
    variables = tensor_names.variables_of(spec, config_json.family_of(config, ""))
    described = [
        safetensors_file.Described(piece.name, np.dtype(np.float32), piece.shape)
        for variable in variables.values()
        for piece in variable.pieces
    ]
    order = safetensors_file.in_file_order(described)
    values = np.random.default_rng(0).standard_normal(max(tensor.nbytes // 4 for tensor in order), dtype=np.float32)
    directory.mkdir()
    with (directory / "model.safetensors").open("wb") as file:
        safetensors_file.write(file, order, (values[: tensor.nbytes // 4].reshape(tensor.shape) for tensor in order))
    (directory / "config.json").write_text(json.dumps(config))


def measure(directory: pathlib.Path, num_devices: int) -> None:
    """Reads the folder and prints the numbers."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={num_devices}"
    import jax
    from jax.sharding import PartitionSpec

    from spmd_trainer.hf import folder as hf_folder
    from spmd_trainer.hf import placing
    from spmd_trainer.sharding.variables import make_variable_spec

    sizes = {"data": max(1, num_devices // 2), "mdl": min(2, num_devices)}
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes))
    folder = hf_folder.open_folder(directory)
    specs = {}
    for path, variable in folder.variables.items():
        rank = len(variable.shape)
        spec = PartitionSpec(*[None] * (rank - 2), "data", "mdl") if rank > 1 else PartitionSpec()
        specs[path] = make_variable_spec(path, variable.shape, np.float32, spec, sizes, "")
    before = _memory("VmRSS")

    def read() -> None:
        jax.block_until_ready(placing.read_onto_mesh(specs, folder.variables, folder.tensors, mesh))

    first = _seconds(read)
    peak = _memory("VmHWM") - before
    file = directory / "model.safetensors"
    raw = _seconds(lambda: _read_bytes(file))
    for _ in range(ROUNDS - 1):
        first, raw = min(first, _seconds(read)), min(raw, _seconds(lambda: _read_bytes(file)))
    state = sum(spec.logical_bytes() for spec in specs.values()) / MIB
    largest = max(int(np.prod(tensor.shape)) * tensor.dtype.itemsize for tensor in folder.tensors.values()) / MIB
    size = file.stat().st_size / 2**30
    sys.stdout.write(f"{peak} {state} {largest} {size / first} {size / raw}\n")


def _read_bytes(path: pathlib.Path) -> None:
    """Reads a file into memory, as fast as one thread can."""
    buffer = memoryview(np.empty(path.stat().st_size, np.uint8))  # type: ignore[arg-type]
    done = 0
    with path.open("rb", buffering=0) as file:
        while done < len(buffer):
            done += file.readinto(buffer[done : done + 64 * MIB])


def _seconds(fn: Callable[[], None]) -> float:
    gc.collect()
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start


def _memory(name: str) -> float:
    """Returns a line of /proc/self/status in MiB."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(pathlib.Path(sys.argv[2]))
    else:
        measure(pathlib.Path(sys.argv[2]), int(sys.argv[3]))
