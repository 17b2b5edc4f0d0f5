"""Learning-rate schedules equal their formulas at 20 points each, and are fields of an experiment."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from facts import raises_naming
from praxis import schedules as praxis_schedules
from praxis.pax_fiddle import Config, build

from spmd_trainer.step import schedules

DECAYS = {"linear": lambda x: x, "cosine": lambda x: (1 - math.cos(math.pi * x)) / 2, "sqrt": math.sqrt}


def at_points(schedule_p, last, formula):
    """Compares a schedule with a function at 20 steps, jitted as in a train step."""
    schedule = build(schedule_p)
    steps = np.unique(np.linspace(0, last, 20).astype(int))
    assert len(steps) == 20
    found = jax.jit(jax.vmap(schedule.value_at))(jnp.asarray(steps, jnp.uint32))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, [formula(int(step)) for step in steps], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("warmup", [0, 100])
def test_warmup_stable_decay(decay, warmup):
    def formula(step):
        if step < warmup:
            return step / warmup
        if step <= 800:
            return 1.0
        return 1.0 - 0.9 * DECAYS[decay](min(1.0, (step - 800) / 200))

    config = Config(
        schedules.WarmupStableDecay, total_steps=1000, warmup_steps=warmup, decay_steps=200, min_ratio=0.1, decay=decay
    )
    at_points(config, 1100, formula)


def test_no_decay_is_a_plateau():
    config = Config(schedules.WarmupStableDecay, total_steps=100, warmup_steps=10)
    at_points(config, 200, lambda step: min(1.0, step / 10))


def test_a_longer_plateau_keeps_the_past():
    """A run goes on from before the decay with more steps: until then both schedules are equal."""
    short, long = (
        build(Config(schedules.WarmupStableDecay, total_steps=total, warmup_steps=10, decay_steps=20))
        for total in (100, 500)
    )
    assert all(short.value_at(step) == long.value_at(step) for step in range(0, 81, 4))
    assert short.value_at(100) == 0 < long.value_at(100)


def test_piecewise_by_tokens():
    """Counts beyond int32: 20 points over ten trillion tokens."""
    per_step, tokens = 4_000_000, [1e12, 2e12, 2e12, 8e12]

    def formula(step):
        count = step * per_step
        if count < 1e12:
            return 1.0
        if count < 2e12:
            return 1.0 + (count - 1e12) / 1e12  # from 1 to 2
        return 0.5 if count >= 8e12 else 4.0 + (count - 2e12) / 6e12 * (0.5 - 4.0)

    config = Config(schedules.PiecewiseByTokens, tokens=tokens, values=[1.0, 2.0, 4.0, 0.5], tokens_per_step=per_step)
    at_points(config, 2_500_000, formula)


def test_one_count_is_a_constant():
    config = Config(schedules.PiecewiseByTokens, tokens=[100], values=[0.3], tokens_per_step=7)
    at_points(config, 40, lambda step: 0.3)


def test_inverse_square_root_is_praxis_own():
    at_points(
        Config(praxis_schedules.LinearRampupSqrtDecay, peak=1.0, warmup_steps=50),
        1000,
        lambda step: min(max(step, 1) / 50, math.sqrt(50 / max(step, 1))),
    )


def test_cosine_with_restarts_is_optax_own():
    """Cycles of 100, 200 and 400 steps, each with a warm-up of a tenth, and peaks of 1, 0.5 and 0.25."""
    cycles = [
        {"init_value": 0.0, "peak_value": peak, "warmup_steps": length // 10, "decay_steps": length, "end_value": 0.0}
        for peak, length in ((1.0, 100), (0.5, 200), (0.25, 400))
    ]

    def formula(step):
        begin = 0
        for number, cycle in enumerate(cycles):
            length, warmup = cycle["decay_steps"], cycle["warmup_steps"]
            if step < begin + length or number == len(cycles) - 1:
                at = min(step - begin, length)
                if at < warmup:
                    return cycle["peak_value"] * at / warmup
                return cycle["peak_value"] * (1 + math.cos(math.pi * (at - warmup) / (length - warmup))) / 2
            begin += length
        raise AssertionError(step)

    config = Config(schedules.OptaxSchedule, schedule=Config(optax.sgdr_schedule, cosine_kwargs=cycles))
    at_points(config, 750, formula)


def test_warm_restarts_are_those_of_sgdr():
    """Loshchilov & Hutter 2017, equation 5: T_0 = 20, T_mult = 2, learning rates from 0.1 to 1, no warm-up."""
    first, factor, least, cycles = 20, 2, 0.1, 5

    def formula(step):
        # Cycle i begins after T_0 (T_mult^i - 1) / (T_mult - 1) steps.
        cycle = int(math.log(step * (factor - 1) / first + 1, factor) + 1e-9)
        current = step - first * (factor**cycle - 1) // (factor - 1)
        return least + (1 - least) * (1 + math.cos(math.pi * current / (first * factor**cycle))) / 2

    about = {"init_value": 1.0, "peak_value": 1.0, "warmup_steps": 0, "end_value": least}
    kwargs = [{**about, "decay_steps": first * factor**cycle} for cycle in range(cycles)]
    config = Config(schedules.OptaxSchedule, schedule=Config(optax.sgdr_schedule, cosine_kwargs=kwargs))
    at_points(config, first * (factor**cycles - 1) - 1, formula)
    schedule = build(config)
    for begin in (0, 20, 60, 140, 300):  # restarts
        assert schedule.value_at(begin) == 1.0


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        (
            Config(schedules.WarmupStableDecay, total_steps=10, decay="cosin"),
            ("decay='cosin'", "did you mean", "cosine"),
        ),
        (
            Config(schedules.WarmupStableDecay, total_steps=10, warmup_steps=6, decay_steps=5),
            ("warmup_steps=6", "decay_steps=5", "total_steps=10"),
        ),
        (Config(schedules.PiecewiseByTokens, tokens=[1, 2], values=[1.0], tokens_per_step=1), ("2 tokens", "1 values")),
        (
            Config(schedules.PiecewiseByTokens, tokens=[2, 1], values=[1.0, 2.0], tokens_per_step=1),
            ("[2, 1]", "ascend"),
        ),
        (Config(schedules.PiecewiseByTokens, tokens=[1], values=[1.0]), ("tokens_per_step=0", "rows times length")),
        (Config(schedules.OptaxSchedule), ("schedule is None", "optax")),
    ],
)
def test_settings_that_make_no_schedule(config, facts):
    with raises_naming(ValueError, *facts):
        build(config)
