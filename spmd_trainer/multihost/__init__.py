"""Communication between the processes of a job over JAX's coordination service: joining, exchange of values, loss of a process.

    multihost.joined()                          (number of processes, id of this one)
    multihost.agree('the seed', seed)           the value if all processes have the same, or an error that names them
    multihost.broadcast(value)                  process 0's value
    multihost.gather('the parts', mine)         the values of all processes
    multihost.barrier('the file is written')
    multihost.join.meet(...)                    before any device is touched; the command line calls it
    multihost.loss.Peers(...)                   which processes are lost, and why

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
