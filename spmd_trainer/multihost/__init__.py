"""One channel between the processes of a job, on JAX's coordination service: who is there, what they agree on, who is lost.

    multihost.joined()                          (number of processes, id of this one)
    multihost.agree('the seed', seed)           the same value everywhere, or an error that names the processes
    multihost.broadcast(value)                  process 0's value
    multihost.gather('the parts', mine)         everybody's values
    multihost.barrier('the file is written')
    multihost.join.meet(...)                    before any device is touched; the command line calls it
    multihost.loss.Peers(...)                   who is lost, and why

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
