"""Saving doesn't leak in TensorStore: what Orbax asks it for at every save is freed."""

import gc
import tracemalloc

import pytest
import tensorstore
from orbax.checkpoint._src.serialization import tensorstore_utils

from spmd_trainer.checkpointing import tensorstore_leaks

CALLS = 500
MEASUREMENTS = 3


def bytes_lost(call):
    """Returns how many bytes a call of a function leaves behind, on average.

    Other threads of a test process allocate too, now and then; a leak is in every measurement.
    """
    call()
    return min(_measured(call) for _ in range(MEASUREMENTS))


def _measured(call):
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for _ in range(CALLS):
        call()
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return (after - before) / CALLS


def spec_of_an_array(name):
    return tensorstore_utils.build_kvstore_tspec("/checkpoints/10", name=name, use_ocdbt=True)


@pytest.mark.full
def test_specs_and_counters_leave_nothing_behind():
    specs = [spec_of_an_array(name) for name in ("a", "b")]
    tensorstore_leaks.stop()
    assert [spec_of_an_array(name) for name in ("a", "b")] == specs
    assert bytes_lost(lambda: spec_of_an_array("a")) < 20
    assert bytes_lost(tensorstore_utils.get_tensorstore_raw_bytes) < 20


def test_each_spec_keeps_its_own_json():
    tensorstore_leaks.stop()
    for path in ("/a/", "/it's b/"):
        spec = tensorstore.KvStore.Spec({"driver": "file", "path": path})
        assert spec.to_json() == {"driver": "file", "path": path}
        assert "file_io_sync" in str(spec.to_json(include_defaults=True))
    # What a caller does to its copy, others don't see.
    spec.to_json()["path"] = "changed"
    assert spec.to_json()["path"] == path
