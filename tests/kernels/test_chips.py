"""What chips are known to do, and the share of it that the progress line says."""

import jax
import pytest
from praxis import pax_fiddle

from spmd_trainer import sharding, tasks_lib
from spmd_trainer.kernels import chips
from spmd_trainer.step.packing import Scalars
from spmd_trainer.step.pjit import PjitPartitioner
from spmd_trainer.training import experiment_config
from spmd_trainer.watch.progress import Progress


@pytest.mark.parametrize(
    ("kind", "tera", "memory"),
    [
        ("TPU v4", 275, 32),
        ("TPU v5 lite", 197, 16),
        ("TPU v5p", 459, 95),
        ("TPU v6 lite", 918, 32),
        ("NVIDIA A100-SXM4-40GB", 312, 40),
        ("NVIDIA A100-SXM4-80GB", 312, 80),
        ("NVIDIA H100 80GB HBM3", 989, 80),
        ("NVIDIA H100 PCIe", 756, 80),
        ("NVIDIA H200", 989, 141),
        ("NVIDIA B200", 2250, 180),
        ("NVIDIA GB200", 2500, 186),
    ],
)
def test_a_chip_is_known_by_the_name_that_jax_gives_it(kind, tera, memory):
    chip = chips.chip(kind)
    assert (chip.peak_flops, chip.memory) == (tera * 1e12, memory)
    assert chips.peak_flops(kind, 8) == 8 * tera * 1e12


@pytest.mark.parametrize("kind", ["cpu", "TPU v4 lite", "Radeon"])
def test_others_are_not_guessed(kind):
    assert chips.chip(kind) is None
    assert chips.peak_flops(kind, 8) is None


@pytest.mark.parametrize(
    ("kind", "version"),
    [
        ("NVIDIA A100-SXM4-80GB", (8, 0)),
        ("NVIDIA A10G", (8, 6)),
        ("NVIDIA L40S", (8, 9)),
        ("NVIDIA H100 80GB HBM3", (9, 0)),
        ("NVIDIA H200", (9, 0)),
        ("NVIDIA GB200", (10, 0)),
        ("TPU v5e", None),
        ("AMD Instinct MI300X", None),
    ],
)
def test_compute_capability(kind, version):
    assert chips.compute_capability(kind) == version


def test_gpus_that_plans_are_made_for_agree_with_themselves():
    for chip in chips.CHIPS:
        if chip.gpu is not None:
            assert chips.chip(chip.gpu.name) is chip, "the compiler's device is found in the table by its name"
            assert chips.compute_capability(chip.gpu.name) == chip.gpu.compute_capability
            # CUDA reports a little less than the data sheet.
            assert 0.95 * chip.memory * chips.GIB < chip.memory_bytes <= chip.memory * chips.GIB


def line(caplog, **speeds) -> tuple[str, dict[str, float]]:
    """The progress line of 10 steps of 1,000 tokens in 2 seconds, and its timing scalars."""
    times = iter((0.0, 2.0, 2.0))
    progress = Progress(
        num_steps=20, items_per_step=1000, unit="tokens", interval=10, clock=lambda: next(times), **speeds
    )
    progress.start(0)
    scalars = Scalars()
    scalars.loss = 1.0
    with caplog.at_level("INFO", logger="absl"):
        timing = progress.report(10, scalars)
    return caplog.messages[-1], timing


def test_the_line_says_the_utilization_of_known_chips(caplog):
    flops = chips.model_flops(10**9, 1)
    peak = chips.peak_flops("TPU v5e", 1)
    said, timing = line(caplog, flops_per_item={"mfu_6n": flops}, peak_flops=peak)
    # 5,000 tokens/s of a model of 1B parameters: 3e13 of 1.97e14 FLOP/s.
    assert timing["mfu_6n"] == pytest.approx(3e13 / 1.97e14)
    assert "MFU 6N 15.2%" in said
    said, timing = line(caplog, flops_per_item={"mfu": 2 * flops, "mfu_6n": flops}, peak_flops=peak)
    assert timing["mfu"] == 2 * timing["mfu_6n"]
    assert "MFU 30.5% (6N 15.2%)" in said


def test_frozen_parameters_have_no_gradient_of_their_own():
    assert chips.model_flops(10, 3, num_frozen=100) == 6 * 10 * 3 + 4 * 100 * 3


def test_experts_that_a_token_does_not_choose_do_not_count():
    """TinyMixtral: 2 of 3 experts, each with three matrices of 20 x 7, in 2 layers."""
    resolved = experiment_config.resolve("lm.mistral.TinyMixtral")
    task = tasks_lib.build_task(resolved.task_p)
    batch = pax_fiddle.build(resolved.config.train_datasets[0]).get_next_padded()
    partitioner = PjitPartitioner()
    partitioner.use_mesh(
        sharding.create_device_mesh([("replica", 1), ("data", 1), ("mdl", 1)], devices=jax.devices()[:1])
    )
    partitioner.setup(task, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch))
    metadata = partitioner.metadata
    assert metadata.num_params() - metadata.num_params(per_token=True) == 2 * (3 * 20 * 7)
    assert metadata.num_frozen_params(per_token=True) == 0


def test_the_line_of_unknown_chips_is_what_it_was(caplog):
    said, timing = line(caplog, flops_per_item={"mfu_6n": 6e9}, peak_flops=None)
    assert "MFU" not in said
    assert said.endswith("5,000 tokens/s  200 ms/step  ETA 2s")
    assert set(timing) == {"steps_per_sec", "tokens_per_sec"}
