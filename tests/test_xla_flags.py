"""The XLA flags of the test runs: `make test` compiles cheaply, `make nightly` as users do."""

import importlib.metadata
import os

import pytest
from facts import raises_naming
from xla_flags import xla_flags

DEVICES = "--xla_force_host_platform_device_count=8"
PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=120"
NO_LLVM_OPTIMISATION, OLD_EMITTERS = "--xla_backend_optimization_level=0", "--xla_cpu_use_fusion_emitters=false"


@pytest.mark.parametrize(
    ("level", "jaxlib", "expected"),
    [
        ("normal", "0.10.2", [DEVICES, PATIENCE]),
        ("normal", "0.12.0.1", [DEVICES]),
        ("cheap", "0.10.2", [DEVICES, PATIENCE, NO_LLVM_OPTIMISATION, OLD_EMITTERS]),
        ("cheap", "0.12.0.1", [DEVICES, NO_LLVM_OPTIMISATION]),
    ],
)
def test_flags_of_a_level(level, jaxlib, expected):
    assert xla_flags("", level, jaxlib).split() == expected


def test_other_flags_stay_and_the_number_of_devices_is_replaced():
    flags = xla_flags("--xla_force_host_platform_device_count=3 --xla_dump_to=/tmp/x", "normal", "0.10.2")
    assert flags.split() == ["--xla_dump_to=/tmp/x", DEVICES, PATIENCE]


def test_flags_that_a_parent_process_has_set_are_not_repeated():
    flags = xla_flags("", "cheap", "0.10.2")
    assert xla_flags(flags, "cheap", "0.10.2") == flags


def test_an_unknown_level_is_refused():
    with raises_naming(ValueError, "SPMD_TEST_XLA_OPTIMISATION='full'", "cheap", "normal"):
        xla_flags("", "full", "0.10.2")


def test_this_run_has_the_flags_of_its_level():
    level = os.environ.get("SPMD_TEST_XLA_OPTIMISATION", "cheap")
    assert os.environ["XLA_FLAGS"] == xla_flags(os.environ["XLA_FLAGS"], level, importlib.metadata.version("jaxlib"))
