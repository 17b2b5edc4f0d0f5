"""GPUs that are not here: what the compiler is told of them, and what happens without the compiler."""

import pytest
from compilers import HAS_CUDA, NEEDS_CUDA

from spmd_trainer.errors import UserError
from spmd_trainer.kernels.chips import BY_TOPOLOGY
from spmd_trainer.planner import topologies
from spmd_trainer.planner.topologies import topology_devices


def test_the_compiler_is_told_of_an_h100():
    text = topologies.target_config(BY_TOPOLOGY["h100"].gpu)
    for fact in (
        "core_count: 132",
        "cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }",
        "device_memory_size: 84942979072",
        "memory_bandwidth: 3352320000000",
        "shared_memory_per_core: 233472",
        "shared_memory_per_block_optin: 232448",
        'device_description_str: "NVIDIA H100 80GB HBM3"',
    ):
        assert fact in text
    assert text.count("{") == text.count("}")
    assert "feature_extension" not in topologies.target_config(BY_TOPOLOGY["a100"].gpu)


@pytest.mark.parametrize(
    ("topology", "meant"),
    [("h10:1x8", "did you mean h100"), ("H200:1x8", "did you mean h200"), ("v5:2x2", "did you mean v5")],
)
def test_the_nearest_chip_is_named(topology, meant):
    with pytest.raises(UserError, match=meant):
        topology_devices(topology)


@pytest.mark.parametrize("topology", ["h100", "h100:8", "h100:1x2x8", "h100:0x8", "h100:1x8x"])
def test_a_shape_that_is_not_hosts_x_gpus_is_refused(topology):
    with pytest.raises(UserError, match=r"h100:32x8 for 32 hosts with 8 GPUs each.*known chips: .*v5e.*gb200"):
        topology_devices(topology)


@pytest.mark.parametrize(
    ("topology", "form"), [("h100:2x16", "at most 8.*h100:4x8"), ("gb200:9x8", "at most 4.*gb200:18x4")]
)
def test_more_gpus_than_a_host_has_are_refused(topology, form):
    with pytest.raises(UserError, match=form):
        topology_devices(topology)


@pytest.mark.skipif(HAS_CUDA, reason="the compiler for GPUs is installed")
def test_without_the_compiler_the_extra_is_named():
    with pytest.raises(UserError, match="install it with `uv sync --extra plan-gpu`"):
        topology_devices("h100:1x8")


@NEEDS_CUDA
@pytest.mark.parametrize(
    ("topology", "slices", "count", "capability"),
    [("a100:1x8", 1, 8, "8.0"), ("h100:4x8", 2, 64, "9.0"), ("gb200:18x4", 1, 72, "10.0")],
)
def test_the_compiler_s_devices(topology, slices, count, capability):
    devices = topology_devices(topology, slices)
    assert len(devices) == count
    assert devices[0].device_kind == BY_TOPOLOGY[topology.partition(":")[0]].gpu.name
    assert devices[0].compute_capability == capability
    hosts = slices * int(topology.partition(":")[2].partition("x")[0])
    assert {device.process_index for device in devices} == set(range(hosts))
