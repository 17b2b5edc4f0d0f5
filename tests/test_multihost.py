"""What real processes tell each other: values, disagreements, deadlines. No device is touched."""

from __future__ import annotations

import pytest
from facts import assert_names
from process_helpers import lines, run_processes

from spmd_trainer import multihost
from spmd_trainer.errors import UserError

EXCHANGES = """
from spmd_trainer import multihost
from spmd_trainer.multihost import DisagreementError

def tell(call):
    try:
        print(call(), flush=True)
    except DisagreementError as error:
        print(f"DisagreementError: {error}", flush=True)

tell(lambda: multihost.broadcast({"from": index, "text": "x" * 5000})["from"])
tell(lambda: multihost.gather("position", [index, "\\u00fc"]))
tell(lambda: multihost.agree("the mesh", {"data": 4, "mdl": 2}))
tell(lambda: multihost.agree("the random seed", 1 if index == 1 else 0))
tell(lambda: multihost.agree("the steps", list(range(1000 * (index == 2)))))
for i in range(300):
    assert multihost.broadcast(i if index == 0 else None) == i
left = multihost.client().key_value_dir_get("spmd_trainer/multihost/broadcast/")
multihost.barrier("all have looked", timeout=60)
tell(lambda: len(left) <= 2 * count)  # of 300 calls
from jax._src import xla_bridge
tell(xla_bridge.backends_are_initialized)
"""

DEADLINE = """
from spmd_trainer import multihost
if index != 1:
    try:
        multihost.barrier("the first step", timeout=1)
    except multihost.DisagreementError as error:
        print(error, flush=True)
import os
client = multihost.client()
client.key_value_set(f"done/{index}", "1")
if index == 0:
    for other in range(count):
        client.blocking_key_value_get(f"done/{other}", 60_000)
    # The service ends with this process: the others must have heard that their calls were done.
    import time
    time.sleep(3)
os._exit(0)
"""


def test_processes_exchange_values_and_tell_where_they_differ():
    seeds = "processes 0, 2 have 0; process 1 has 1"
    steps = f"processes 0, 1 have []; process 2 has {str(list(range(1000)))[:200]}..."
    common = [
        "0",
        "[[0, 'ü'], [1, 'ü'], [2, 'ü']]",
        "{'data': 4, 'mdl': 2}",
        f"DisagreementError: the processes disagree about the random seed: {seeds}",
        f"DisagreementError: the processes disagree about the steps: {steps}",
        "True",
        "False",
    ]
    assert lines(run_processes(EXCHANGES, count=3)) == [common] * 3


@pytest.mark.full
def test_a_process_that_does_not_come_is_named_when_the_time_is_over():
    results = lines(run_processes(DEADLINE, count=3))
    assert results[1] == []
    for index in (0, 2):
        assert_names(results[index][0], "process 1", "'the first step'", "call 1", "1 s", "processes 0, 2", "log")


def test_one_process_agrees_with_itself():
    assert multihost.broadcast(object) is object
    assert multihost.gather("x", 3) == [3]
    assert multihost.agree("x", {"a": 1}) == {"a": 1}
    multihost.barrier("x", timeout=0)


def test_a_disagreement_is_an_error_of_the_user():
    with pytest.raises(UserError):
        raise multihost.DisagreementError("x")
