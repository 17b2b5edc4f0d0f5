"""Takes every Nth training step twice from the same state, and compares the bits of the two results (--check_repeat_every=N).

A sound device computes the same bits from the same program and inputs. So a difference means that a device, a link or the memory
is broken, or that the program is not deterministic.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from absl import logging
from jax.sharding import NamedSharding

from spmd_trainer.callbacks import Run, StepFn
from spmd_trainer.sharding.messages import named_text
from spmd_trainer.sharding.variables import named_leaves
from spmd_trainer.step.packing import Packed
from spmd_trainer.train_states import PyTree, TrainState
from spmd_trainer.watch.replica_check import DeviceChecksum, ReplicaError, device_checksums, device_text, rows_text

_Checksums = Mapping[str, Mapping[jax.Device, DeviceChecksum]]


class RepeatError(ReplicaError):
    """The same step from the same state gave different bits. The message names the devices and the variables."""


class RepeatCheck:
    """Wraps the train step so that each step whose number is a multiple of `every` is taken twice.

    The same compiled program runs both times: first on a copy of the state, then as usual. So training continues as it would
    without the check. At such a step, the devices need memory for a second copy of the state.
    """

    def __init__(self, every: int):
        self._every = every

    def around(self, fn: StepFn, run: Run) -> StepFn:
        """Returns a function that the training loop calls instead of the compiled train step `fn`. All processes call it.

        If the step after `run.step` is to be checked, the function takes it twice, and raises RepeatError on all processes if the
        bits differ. For other steps, the function only calls `fn`.
        """
        if not self._every:
            return fn

        def take(state: TrainState, prng_key: jax.Array, batch: PyTree) -> tuple[TrainState, Packed]:
            step = run.step + 1
            if step % self._every:
                return fn(state, prng_key, batch)
            run.begin(f"training step {step}, for the first of two times", "other")
            first = _sums(fn(jax.tree.map(jnp.copy, state), prng_key, batch))
            run.begin(f"training step {step}, for the second time", "step")
            result = fn(state, prng_key, batch)
            _compare(first, _sums(result), step)
            return result

        return take


def _sums(result: tuple[TrainState, Packed]) -> _Checksums:
    """Returns the checksums of a step's results; waits for the devices."""
    state, (scalars, _) = result
    arrays = {"the step's scalars": scalars} | {
        path: x for path, x in named_leaves(state) if isinstance(x.sharding, NamedSharding)
    }
    with jax.transfer_guard_device_to_host("allow"):
        return device_checksums(arrays)


def _compare(first: _Checksums, second: _Checksums, step: int) -> None:
    differing = {
        path: [device for device, value in by_device.items() if second[path][device] != value]
        for path, by_device in first.items()
    }
    differing = {path: devices for path, devices in differing.items() if devices}
    if not differing:
        return
    if not jax.process_index():
        logging.error("step %d was taken twice, and gave other values of %d variables", step, len(differing))
    rows = []
    for path, devices in differing.items():
        of_all = len(devices) == len(first[path]) > 1
        named = f"all {len(devices)} devices" if of_all else named_text(list(map(device_text, devices)), "device")
        rows.append(f"{path}: on {named}")
    raise RepeatError(
        f"step {step}, taken twice from the same state and batch, gave other bits:{rows_text(rows)}\n"
        f"{_advice(differing, first)}. The state is not saved; the run continues from its last checkpoint"
    )


def _advice(differing: Mapping[str, list[jax.Device]], first: _Checksums) -> str:
    """Returns advice for the user: remove the faulty device, or find out which device is faulty.

    Collectives spread wrong values to sound devices. So a device is certainly faulty only if it is the only one that differs.
    """
    (all_devices, *_) = (list(of) for of in first.values())
    named = [device for device in all_devices if any(device in devices for devices in differing.values())]
    if len(named) == 1 < len(all_devices):
        return f"Device {device_text(named[0])} computed or stored wrong numbers: start again without"
    uneven = (
        "It is no device if the program itself is not deterministic, e.g. a host callback, or on GPUs a step without "
        "xla_gpu_deterministic_ops (the experiment's XLA_FLAGS)"
    )
    if len(all_devices) == 1:
        return f"There is one device: it computed or stored wrong numbers. {uneven}"
    if len(named) < len(all_devices):
        return (
            f"One of the devices {', '.join(map(device_text, named))} computed or stored wrong numbers, and collectives of the "
            f"step have brought the difference to the others: start again without them, or on parts of them. {uneven}"
        )
    return (
        "The collectives of the step have brought the difference to all devices, so none can be named: start again on parts of "
        f"the devices to find the one. {uneven}"
    )
