"""What the tests of resharding share: the contract's pairs of layouts, and what compiled programs and devices hold."""

import contextlib
import gc
import math
import re

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_trainer.sharding import transfer

BITS = {"pred": 8, "s8": 8, "u8": 8, "bf16": 16, "f16": 16, "f32": 32, "s32": 32, "u32": 32, "f64": 64}
COLLECTIVES = ("all-gather", "all-to-all", "all-reduce", "collective-permute", "reduce-scatter", "collective-broadcast")


def layout(sizes, spec, names=("fsdp", "tp"), first=0):
    """A NamedSharding on the devices from the `first` on."""
    devices = np.array(jax.devices()[first : first + math.prod(sizes)])
    return NamedSharding(Mesh(devices.reshape(sizes), names), spec)


def random_array(sharding, shape=(48, 24), dtype=np.float32):
    values = np.random.default_rng(0).normal(size=shape).astype(dtype)
    return values, jax.device_put(values, sharding)


# Contract 3.7: source, target, (split, replica).
FOUND = {
    "8 to 4": (((8, 1), P("fsdp", None)), ((1, 4), P(None, "tp")), (4, 2)),
    "8 to 2": (((8, 1), P("fsdp", None)), ((1, 2), P(None, "tp")), (2, 4)),
    "16 to 4": (((16, 1), P("fsdp", None)), ((1, 4), P(None, "tp")), (4, 4)),
    "6 to 3": (((6, 1), P("fsdp", None)), ((1, 3), P(None, "tp")), (3, 2)),
    "8 to whole": (((8, 1), P("fsdp", None)), ((1, 4), P()), (1, 8)),
    "8 to 4, short spec": (((8, 1), P("fsdp")), ((1, 4), P(None, "tp")), (4, 2)),
}
NOT_FOUND = {
    "8 to 8": (((8, 1), P("fsdp", None)), ((1, 8), P(None, "tp"))),
    "6 to 4": (((6, 1), P("fsdp", None)), ((1, 4), P(None, "tp"))),
}
NOT_NEEDED = {
    "same dimension": (((8, 1), P("fsdp", None)), ((4, 1), P("fsdp", None))),
    "same dimension, short spec": (((8, 1), P("fsdp")), ((4, 1), P("fsdp", None))),
}


def collective_bytes(compiled_text):
    """The bytes that each collective of a compiled program leaves on one device."""
    sizes = []
    for line in compiled_text.splitlines():
        match = re.search(rf"= (.*?) ({'|'.join(COLLECTIVES)})(-start)?\(", line)
        if match:
            shapes = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
            sizes.append(sum(BITS[t] // 8 * math.prod(int(n) for n in dims.split(",") if n) for t, dims in shapes))
    return sizes


def shard_bytes(x, sharding):
    return math.prod(sharding.shard_shape(x.shape)) * x.dtype.itemsize


def held_bytes():
    """{device: bytes} of all live arrays, each buffer once."""
    buffers = {}
    for array in jax.live_arrays():
        for shard in [] if array.is_deleted() else array.addressable_shards:
            if shard.data.nbytes:
                buffers[shard.device, shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
    held = dict.fromkeys(jax.devices(), 0)
    for (device, _), size in buffers.items():
        held[device] += size
    return held


class Watch:
    """The most that any device held at once, beyond what it held before; with what a program needs for itself."""

    def __init__(self):
        gc.collect()
        self.before, self.most, self.in_programs = held_bytes(), 0, 0

    def look(self, in_program=0):
        held = held_bytes()
        most = max(held[device] - self.before[device] for device in held)
        self.most = max(self.most, most)
        self.in_programs = max(self.in_programs, most + in_program if in_program else 0)


@contextlib.contextmanager
def watched(monkeypatch):
    """Looks at what devices hold after every step of a move. Yields a Watch; enter it before the source is made."""
    watch = Watch()
    with monkeypatch.context() as patch:

        def looking(step, program_bytes=lambda _: 0):
            def watched_step(*args, **kwargs):
                watch.look()
                result = step(*args, **kwargs)
                watch.look(program_bytes(result))
                return result

            return watched_step

        compile_program = transfer._compile

        def compile_watched(*args):
            program = compile_program(*args)
            return program and looking(program, lambda _: program.memory_analysis().temp_size_in_bytes)

        patch.setattr(transfer, "_compile", compile_watched)
        patch.setattr(jax, "device_put", looking(jax.device_put))
        assemble = jax.make_array_from_single_device_arrays
        patch.setattr(jax, "make_array_from_single_device_arrays", looking(assemble))
        yield watch
