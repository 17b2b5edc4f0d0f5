"""The verdict of `benchmarks.attention_memory`, on sizes that are given."""

import pytest
from facts import assert_names

from benchmarks import attention_memory
from spmd_trainer.planner.plan import ChipBytes


@pytest.mark.parametrize(
    ("trainer", "hand_written", "unfused", "met"),
    [(100, 100, 400, True), (105, 100, 500, True), (106, 100, 500, False), (100, 100, 399, False)],
)
def test_both_bars_must_be_met(trainer, hand_written, unfused, met, monkeypatch, capsys):
    def step(peak, *attention):
        return attention_memory.Step(ChipBytes(10, 20, 0, peak), 1.0, attention)

    def trainer_step(case, *, fused):
        return step(trainer, "attention kernel: cudnn") if fused else step(unfused)

    monkeypatch.setattr(attention_memory, "trainer_step", trainer_step)
    monkeypatch.setattr(attention_memory, "hand_written_step", lambda case: step(hand_written))
    assert attention_memory.compare(attention_memory.CASE) is met
    out = capsys.readouterr().out
    assert "lm.cloud.LmCloudSpmd2B on h100:1x8, mesh (1, 8, 1), 16 rows of 8192 tokens" in out
    assert "attention kernel: cudnn" in out
    assert_names(out, "unfused / trainer", f"peak: {unfused / trainer:.2f}")
