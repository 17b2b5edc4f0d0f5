"""One of the processes of test_two_processes.py: `two_process_worker.py PORT PROCESS_ID NUM_PROCESSES`."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from spmd_trainer.sharding import (
    create_hybrid_mesh,
    get_local_slice_from_fsarray,
    make_fsarray_from_local_slice,
    place_like_target,
    update_model_sharding,
)


def check(condition: bool, what: str) -> None:
    if not condition:
        sys.exit(f"failed: {what}")


def local_slices_round_trip(process: int) -> None:
    """Each process brings its own rows; globally they are one after the other."""
    mine = np.arange(4 * 3).reshape(4, 3) + 100 * process
    x = make_fsarray_from_local_slice(mine, jax.devices())
    check(x.shape == (8, 3), f"global shape {x.shape}")
    check(not x.is_fully_addressable, "rows of the other process are not here")
    np.testing.assert_array_equal(get_local_slice_from_fsarray(x), mine)
    check(int(jax.jit(jnp.sum)(x)) == 2 * 66 + 100 * 12, "sum over both processes")
    try:
        make_fsarray_from_local_slice(mine, [d for d in jax.devices() if d.process_index != process])
    except ValueError as error:
        check("this process" in str(error), str(error))
    else:
        sys.exit("failed: a mesh without local devices was accepted")


def state_moves_onto_the_mesh() -> None:
    """From the host, and from an array that no process holds whole."""
    mesh = create_hybrid_mesh([2, 1], [1, 2], ["data", "mdl"])
    check({d.process_index for d in mesh.devices[:, 0]} == {0}, "mdl is the axis between the processes")
    host = np.arange(7 * 4, dtype=np.float32).reshape(7, 4)
    strategy = [("w", 'shard_dim(0, "data, mdl", allow_uneven=True)')]
    first = update_model_sharding({"w": host}, mesh, strategy)["w"]
    check(first.shape == (8, 4), f"padded shape {first.shape}")
    other = jax.make_mesh((4,), ("all",), axis_types=(AxisType.Auto,))
    target = jax.ShapeDtypeStruct((7, 4), np.float32, sharding=NamedSharding(other, P(None, "all")))
    spread = place_like_target({"w": host}, {"w": target})
    again = update_model_sharding(spread, mesh, strategy)["w"]
    check(again.sharding == NamedSharding(mesh, P(("data", "mdl"), None)), f"sharding {again.sharding}")
    want = np.concatenate([host, np.zeros((1, 4), np.float32)])
    for array in (first, again):
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, want[shard.index])
    few = jax.make_mesh((2,), ("all",), devices=jax.devices()[1:3], axis_types=(AxisType.Auto,))
    try:
        update_model_sharding({"w": again}, few, [])
    except ValueError as error:
        check("own 4 devices" in str(error), str(error))
    else:
        sys.exit("failed: an array of two processes moved to other devices")
    try:
        place_like_target({"w": again}, {"w": np.zeros((8, 4))})
    except ValueError as error:
        check("other processes" in str(error), str(error))
    else:
        sys.exit("failed: an array of two processes came to one host")


def main() -> None:
    port, process, num_processes = (int(arg) for arg in sys.argv[1:4])
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"localhost:{port}", num_processes, process)
    check(len(jax.devices()) == 4, f"{len(jax.devices())} devices")
    local_slices_round_trip(process)
    state_moves_onto_the_mesh()
    sys.stdout.write(f"process {process} is done\n")
    jax.distributed.shutdown()


main()
