"""Times of collectives on small slices and clusters, computed by hand."""

import itertools
import types

import numpy as np
import pytest

from spmd_trainer.kernels.chips import CHIPS
from spmd_trainer.planner import links
from spmd_trainer.planner.hlo_collectives import Collective

MB = 1_000_000
V5E = links.machine("TPU v5 lite")
V5P = links.machine("TPU v5")
H100 = links.machine("NVIDIA H100 80GB HBM3")


def torus(machine, *shape, slices=1):
    """Links of slices whose devices are in the order of their coordinates."""
    return links.Links(
        [
            types.SimpleNamespace(coords=coords, slice_index=number)
            for number in range(slices)
            for coords in itertools.product(*map(range, shape))
        ],
        machine,
    )


def cluster(hosts, gpus, machine=H100, slices=1):
    return links.Links(
        [
            types.SimpleNamespace(process_index=h, slice_index=h // (hosts // slices))
            for h in range(hosts)
            for _ in range(gpus)
        ],
        machine,
    )


def seconds(found, kind, groups, num_bytes=MB):
    time = found.seconds(Collective(kind, 1, num_bytes, np.array(groups)))
    return time.inside, time.outside


def rows(*shape):
    return np.arange(np.prod(shape)).reshape(shape)


def test_a_whole_ring_uses_both_of_its_directions():
    slice_ = torus(V5E, 16, 16)
    along_y = rows(16, 16)
    assert seconds(slice_, "all-gather", along_y) == (pytest.approx(MB * 15 / 16 / 100e9), 0)
    assert seconds(slice_, "reduce-scatter", along_y.T) == (pytest.approx(MB * 15 / 16 / 100e9), 0)
    assert seconds(slice_, "all-reduce", along_y) == (pytest.approx(2 * MB * 15 / 16 / 100e9), 0)


def test_a_slice_without_wrap_around_links_is_a_line():
    # v5e and v6e only wrap around at 16 chips.
    assert seconds(torus(V5E, 4, 4), "all-gather", rows(4, 4)) == (pytest.approx(MB * 3 / 4 / 50e9), 0)
    assert seconds(torus(V5P, 4, 4, 4), "all-gather", rows(16, 4)) == (pytest.approx(MB * 3 / 4 / 200e9), 0)


def test_a_slice_that_is_no_whole_cubes_has_no_wrap_around_links():
    # v5p: the ends of a dimension of 4 chips are linked in 4 x 4 x 4, and not in 2 x 2 x 4.
    assert seconds(torus(V5P, 2, 2, 4), "all-gather", rows(4, 4)) == (pytest.approx(MB * 3 / 4 / 100e9), 0)
    assert seconds(torus(V5P, 4, 4, 8), "all-gather", rows(16, 8)) == (pytest.approx(MB * 7 / 8 / 200e9), 0)
    shifted = [[4 * row + n, 4 * row + (n + 3) % 4] for row in range(4) for n in range(4)]
    # Three of four pairs are neighbours, and the fourth is three hops apart.
    assert seconds(torus(V5P, 2, 2, 4), "collective-permute", shifted) == (pytest.approx(1.5 * MB / 100e9), 0)


def latency(found, kind, groups):
    return found.latency(Collective(kind, 1, MB, np.array(groups)))


def test_the_latency_of_a_torus_is_that_of_the_hops():
    assert latency(torus(V5E, 16, 16), "all-gather", rows(16, 16)) == pytest.approx(8e-6)
    assert latency(torus(V5E, 16, 16), "all-reduce", rows(1, 256)) == pytest.approx(2 * 16e-6)
    assert latency(torus(V5E, 4, 4), "all-gather", rows(4, 4)) == pytest.approx(3e-6)
    assert latency(torus(V5E, 16, 16), "collective-permute", [[0, 1], [1, 0]]) == pytest.approx(1e-6)
    assert latency(torus(V5E, 16, 16), "all-gather", rows(256, 1)) == 0


def test_the_latency_of_gpus_is_that_of_the_networks_they_use():
    hosts = cluster(4, 8)
    assert latency(hosts, "all-gather", rows(4, 8)) == pytest.approx(40e-6)
    assert latency(hosts, "all-gather", rows(4, 8).T) == pytest.approx(203e-6)
    # The latency that was measured over hosts has the part inside of them.
    assert latency(hosts, "all-reduce", rows(1, 32)) == pytest.approx(203e-6)
    # A ring over all GPUs waits for its slowest pair, wherever that stands in the list.
    ring = [[n, (n + 1) % 32] for n in range(32)]
    for first in (0, 7):
        assert latency(hosts, "collective-permute", ring[first:] + ring[:first]) == pytest.approx(203e-6)
    assert latency(hosts, "collective-permute", [[0, 1], [1, 0]]) == pytest.approx(40e-6)


def test_a_group_over_several_dimensions_uses_the_links_of_all():
    assert seconds(torus(V5E, 16, 16), "all-gather", rows(1, 256)) == (pytest.approx(MB * 255 / 256 / 200e9), 0)
    assert seconds(torus(V5P, 4, 4, 4), "all-gather", rows(1, 64)) == (pytest.approx(MB * 63 / 64 / 600e9), 0)


def test_interleaved_groups_share_their_links():
    # Every second chip of a row: two groups on the same ring.
    groups = rows(16, 8, 2).transpose(0, 2, 1).reshape(32, 8)
    assert seconds(torus(V5E, 16, 16), "all-gather", groups) == (pytest.approx(MB * 7 / 8 / 50e9), 0)


def test_half_of_an_all_to_all_crosses_the_middle_of_the_ring():
    # Each of the 8 chips in one half sends half of its bytes over the 2 links with 50 GB/s between the halves.
    assert seconds(torus(V5E, 16, 16), "all-to-all", rows(16, 16)) == (pytest.approx(8 * MB / 2 / (2 * 50e9)), 0)


def test_a_permutation_takes_one_link_per_hop():
    ring = torus(V5E, 16, 1)
    shifted = [[n, (n + 1) % 16] for n in range(16)]
    assert seconds(ring, "collective-permute", shifted) == (pytest.approx(MB / 50e9), 0)
    by_three = [[n, (n + 3) % 16] for n in range(16)]
    assert seconds(ring, "collective-permute", by_three) == (pytest.approx(3 * MB / 50e9), 0)


def test_between_slices_each_chip_sends_its_part():
    slices = torus(V5E, 16, 16, slices=2)
    everywhere = rows(1, 512)
    inside, outside = seconds(slices, "all-reduce", everywhere)
    assert inside == pytest.approx(2 * MB * 255 / 256 / 200e9)
    assert outside == pytest.approx(2 * (MB / 256) * 1 / 2 / 3.125e9)
    assert seconds(slices, "all-reduce", rows(2, 256).T)[0] == 0


def test_nvlink_inside_a_host_and_the_network_between_hosts():
    hosts = cluster(4, 8)
    assert seconds(hosts, "all-gather", rows(4, 8)) == (pytest.approx(MB * 7 / 8 / 450e9), 0)
    assert seconds(hosts, "all-gather", rows(4, 8).T) == (0, pytest.approx(MB * 3 / 4 / 50e9))
    inside, outside = seconds(hosts, "all-gather", rows(1, 32))
    assert (inside, outside) == (pytest.approx(MB * 7 / 8 / 450e9), pytest.approx(MB / 8 * 3 / 4 / 50e9))
    inside, outside = seconds(hosts, "all-to-all", rows(1, 32))
    assert outside == pytest.approx(MB * 24 / 32 / 50e9)
    assert inside == pytest.approx(MB * 8 / 32 * 7 / 8 / 450e9)
    assert seconds(hosts, "collective-permute", [[0, 8], [1, 2]]) == (
        pytest.approx(MB / 450e9),
        pytest.approx(MB / 50e9),
    )


def test_nvlink_domains_are_counted_in_gpus_and_stay_in_a_slice():
    gb200 = links.machine("NVIDIA GB200")
    # 36 hosts with 2 GPUs fill a domain.
    assert seconds(cluster(36, 2, gb200), "all-gather", rows(1, 72)) == (pytest.approx(MB * 71 / 72 / 900e9), 0)
    # 12 hosts of each slice: one domain per slice, although 18 hosts would make one.
    two = cluster(24, 4, gb200, slices=2)
    assert seconds(two, "all-gather", rows(2, 48)) == (pytest.approx(MB * 47 / 48 / 900e9), 0)
    assert seconds(two, "all-gather", rows(2, 48).T) == (0, pytest.approx(MB * 1 / 2 / 50e9))
    # Two hosts with half of their GPUs are two domains.
    assert seconds(cluster(2, 4), "all-gather", rows(2, 4).T) == (0, pytest.approx(MB * 1 / 2 / 50e9))


def test_hosts_of_a_gb200_rack_are_one_nvlink_domain():
    rack = cluster(18, 4, links.machine("NVIDIA GB200"))
    assert seconds(rack, "all-gather", rows(1, 72)) == (pytest.approx(MB * 71 / 72 / 900e9), 0)
    assert seconds(cluster(36, 4, links.machine("NVIDIA GB200")), "all-gather", rows(1, 144))[1] > 0


def test_a_group_of_one_device_takes_no_time():
    assert seconds(cluster(1, 8), "all-reduce", rows(8, 1)) == (0, 0)


def test_each_chip_that_is_planned_for_has_bandwidths():
    for chip in CHIPS:
        if chip.topology is not None:
            found = links.machine(chip.gpu.name if chip.gpu else chip.kind)
            assert found is not None, chip.kind
            assert found.memory > 0
    assert links.machine("cpu") is None
