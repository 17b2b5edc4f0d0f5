"""Communication between a job's processes over JAX's coordination service: connects them, exchanges values, notices crashes.

    multihost.joined()                          returns (number of processes, id of this process)
    multihost.agree('the seed', seed)           returns the value, or raises an error if processes have different values
    multihost.broadcast(value)                  returns process 0's value
    multihost.gather('the parts', mine)         returns the values of all processes
    multihost.barrier('the file is written')    waits for all processes
    multihost.join.meet(...)                    connects the processes, before any device is used; the command line calls it
    multihost.loss.Peers(...)                   makes a process exit if one of the others died, failed or stopped

A Python program that has called `jax.distributed.initialize` itself can use all but the last two.
"""

from spmd_trainer.multihost.exchange import (
    TIMEOUT_SECONDS,
    Cancelled,
    DisagreementError,
    agree,
    barrier,
    broadcast,
    gather,
    waits_at,
)
from spmd_trainer.multihost.service import client, joined

__all__ = [
    "TIMEOUT_SECONDS",
    "Cancelled",
    "DisagreementError",
    "agree",
    "barrier",
    "broadcast",
    "client",
    "gather",
    "joined",
    "waits_at",
]
