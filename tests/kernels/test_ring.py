"""Ring attention gives what the reference gives, computes equally much on every device, and moves what theory says."""

import jax.numpy as jnp
import numpy as np
import pytest
from split_rows import BATCH, WIDTH, compiled_programs, crossing_bytes, differences, mesh_of

from spmd_trainer.kernels import chunked, sequence_order
from spmd_trainer.kernels.kernels import Pattern
from spmd_trainer.kernels.ring import Ring, tables

PLAIN = Pattern(scale=0.3)


@pytest.mark.parametrize(
    ("length", "seq", "fields"),
    [
        pytest.param(1, 2, {}, marks=pytest.mark.full),
        pytest.param(1, 4, {"packed": True}, marks=pytest.mark.full),
        pytest.param(7, 4, {"mdl": 2}, marks=pytest.mark.full),
        pytest.param(64, 2, {"packed": True, "mdl": 2, "heads": 3, "kv_heads": 1}, marks=pytest.mark.full),
        pytest.param(67, 4, {"packed": True}, marks=pytest.mark.full),
        pytest.param(300, 2, {"packed": True}, marks=pytest.mark.full),
        pytest.param(513, 4, {}, marks=pytest.mark.full),
        (513, 4, {"packed": True, "mdl": 2, "heads": 6, "kv_heads": 3}),
        pytest.param(129, 8, {"packed": True}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_rows_of_any_length(length, seq, fields, monkeypatch):
    monkeypatch.setattr(chunked, "_BLOCK_ON_CPU", 32)
    assert max(differences("ring", length, seq, PLAIN, **fields)) < 1e-5


@pytest.mark.parametrize(
    "pattern",
    [
        Pattern(scale=0.3, window=5),
        pytest.param(Pattern(scale=0.3, window=100, softcap=2.0), marks=pytest.mark.full),
        pytest.param(Pattern(scale=0.3, window=400), marks=pytest.mark.full),
        pytest.param(Pattern(scale=0.3, causal=False, softcap=2.0), marks=pytest.mark.full),
    ],
    ids=str,
)
@pytest.mark.full
def test_patterns(pattern, monkeypatch):
    monkeypatch.setattr(chunked, "_BLOCK_ON_CPU", 32)
    assert max(differences("ring", 259, 4, pattern, packed=True)) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("packed", [True, False])
def test_bfloat16(packed):
    assert max(differences("ring", 131, 4, PLAIN, packed=packed, dtype=jnp.bfloat16)) < 2e-2


@pytest.mark.parametrize("count", [2, 4, 16])
@pytest.mark.parametrize("chunk", [3, 32, 35])
def test_causal_work_is_even_and_none_is_wasted(count, chunk):
    ring = Ring(("seq",), count, chunk, min(chunk, 8), PLAIN)
    assert ring.shifts == list(range(1, count))
    per_step = np.array([ring.visible(shift).sum(axis=(1, 2)) for shift in range(count)])
    assert (per_step == per_step[:, :1]).all()
    # Of the two chunks of each device, two of four products are needed at each step but the first.
    assert (per_step[1:] == 2 * ring.blocks**2).all()
    all_blocks = 2 * count * ring.blocks
    assert per_step.sum() == all_blocks * (all_blocks + 1) // 2


@pytest.mark.parametrize("window", [1, 9, 40, 1000])
def test_windows_leave_out_steps_and_work_stays_even(window):
    ring = Ring(("seq",), 8, 32, 8, Pattern(window=window))
    expected = {1: [], 9: [1, 7], 40: [1, 2, 6, 7], 1000: [1, 2, 3, 4, 5, 6, 7]}
    assert ring.shifts == expected[window]
    token = {shift: _tokens_of(8, 32, shift) for shift in range(8)}
    for shift in range(8):
        visible = ring.visible(shift)
        for device in range(8):
            distance = token[0][device][:, None] - token[shift][device][None, :]
            seen = (distance >= 0) & (distance < window)
            np.testing.assert_array_equal(visible[device], seen.reshape(8, 8, 8, 8).any(axis=(1, 3)))
        chosen = tables(visible)
        for device in range(8):
            assert len({tuple(pair) for pair in chosen[device]}) == chosen.shape[1] == visible.sum((1, 2)).max()
            assert {tuple(pair) for pair in np.argwhere(visible[device])} <= {tuple(pair) for pair in chosen[device]}


def _tokens_of(count, chunk, shift):
    """Returns the tokens of device i - shift, for each device i."""
    devices = (np.arange(count) - shift) % count
    chunks = np.arange(2 * count * chunk).reshape(2 * count, -1)
    order = np.concatenate([chunks[list(sequence_order.chunks_of(shard, count))] for shard in range(count)])
    return order.reshape(count, -1)[devices]


@pytest.mark.parametrize(
    ("seq", "mdl", "packed"),
    [(2, 1, False), pytest.param(4, 2, True, marks=pytest.mark.full), pytest.param(8, 1, True, marks=pytest.mark.full)],
)
def test_collectives_are_those_of_theory(seq, mdl, packed):
    length, heads, kv_heads = 64, 4, 2
    sizes = {"heads": heads, "kv_heads": kv_heads, "length": length, "packed": packed}
    mesh = mesh_of(seq, mdl)
    rows = BATCH // mesh.shape["data"]
    # The keys and values of whole rows, as far as the batch and the heads are not split.
    keys_and_values = 2 * rows * length * kv_heads // mdl * WIDTH * 4
    forward, backward = (crossing_bytes(x, mesh) for x in compiled_programs("ring", PLAIN, mesh, **sizes))
    # Each device sends its 1 / n of keys and values n - 1 times.
    once = keys_and_values * (seq - 1) // seq
    assert forward.pop("collective-permute") == once
    # Keys and values again, and their gradients.
    assert backward.pop("collective-permute") == 2 * once
    segment_ids = {"all-gather": rows * length * 4} if packed else {}
    assert forward == backward == segment_ids


@pytest.mark.full
def test_a_window_moves_keys_only_to_the_devices_that_need_them():
    mesh = mesh_of(8)
    programs = compiled_programs("ring", Pattern(window=4), mesh, heads=2, kv_heads=2, length=128)
    forward, backward = (crossing_bytes(program, mesh) for program in programs)
    local = 2 * BATCH * 128 * 2 * WIDTH * 4 // 8  # keys and values; the batch is whole
    assert forward == {"collective-permute": 2 * local}
    assert backward == {"collective-permute": 2 * 2 * local}
