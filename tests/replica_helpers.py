"""A device that holds another bit than it should."""

import jax
import numpy as np


def flipped(x, device_index):
    """The same array, with one bit flipped in what one device holds."""
    device = x.sharding.mesh.devices.flat[device_index]
    shards = []
    for shard in x.addressable_shards:
        data = np.array(shard.data)
        if shard.device == device:
            data.reshape(-1).view(np.uint8)[0] ^= 1
        shards.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, shards)
