"""The XLA flags that an experiment asks for reach the compiler of its train step."""

import types

import jax
import jax.numpy as jnp
import pytest
from facts import raises_naming

from spmd_trainer.errors import UserError
from spmd_trainer.experiments.lm import stdlib
from spmd_trainer.training import start_up, xla_flags
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import make_run_config


def job_with(tmp_path, **flags):
    experiment = type("WithFlags", (stdlib.StdlibBytesTiny,), {"__module__": __name__, "XLA_FLAGS": flags})
    return Job.build(make_run_config(experiment, tmp_path, mode="inspect"))


class Lowered:
    """Stands for a lowered step: remembers the options that it is compiled with."""

    def compile(self, compiler_options=None):
        self.options = compiler_options


@pytest.mark.parametrize(
    ("platform", "used"),
    [
        ("cpu", {"xla_cpu_a", "xla_b"}),
        ("tpu", {"xla_tpu_c", "xla_b"}),
        ("cuda", {"xla_gpu_d", "xla_b"}),
        ("gpu", {"xla_gpu_d", "xla_b"}),
    ],
)
def test_a_device_gets_its_own_flags_and_those_of_all(platform, used):
    experiment = types.SimpleNamespace(XLA_FLAGS=dict.fromkeys(["xla_cpu_a", "xla_b", "xla_tpu_c", "xla_gpu_d"], True))
    assert set(xla_flags.flags_for(experiment, types.SimpleNamespace(platform=platform))) == used


def test_flags_are_compiler_options():
    lowered = Lowered()
    xla_flags.compile_with(lowered, {"xla_b": 3}, "exp")
    assert lowered.options == {"xla_b": 3}


@pytest.mark.full
def test_a_run_compiles_its_step_with_the_flags(tmp_path):
    step = start_up.compile_train_step(job_with(tmp_path, xla_cpu_enable_fast_math=False, xla_gpu_unused=1))
    assert step.xla_flags == {"xla_cpu_enable_fast_math": False}


@pytest.mark.full
def test_an_unknown_flag_of_a_step_is_refused_with_the_nearest(tmp_path):
    job = job_with(tmp_path, xla_cpu_enable_fast_maths=False)
    with raises_naming(UserError, "WithFlags: XLA_FLAGS", "'xla_cpu_enable_fast_maths'", "xla_cpu_enable_fast_math"):
        start_up.compile_train_step(job)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("xla_gpu_enable_latency_hiding_schedule", "mean xla_gpu_enable_latency_hiding_scheduler"),
        ("xla_tpu_enable_latency_hiding_schedule", "doesn't know$"),
    ],
)
def test_an_unknown_flag_of_other_devices_is_refused_in_the_same_way(name, meant):
    with pytest.raises(UserError, match=meant):
        xla_flags.compile_with(jax.jit(jnp.cos).lower(1.0), {name: True}, "exp")


def test_a_value_that_a_flag_does_not_take_is_refused():
    lowered = jax.jit(jnp.sin).lower(1.0)
    with raises_naming(UserError, "exp: XLA_FLAGS['xla_cpu_enable_fast_math']", "'maybe'", "bool"):
        xla_flags.compile_with(lowered, {"xla_cpu_enable_fast_math": "maybe"}, "exp")


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        ({"--xla_cpu_x": True}, ("XLA_FLAGS has '--xla_cpu_x'", "e.g. 'xla_cpu_x'")),
        ({"xla-cpu-x": 1}, ("e.g. 'xla_cpu_x'",)),
        ({3: 1}, ("XLA_FLAGS has 3", "e.g. 'xla_3'")),
        ({"xla_cpu_x": None}, ("XLA_FLAGS['xla_cpu_x'] is None", "bool", "number", "string")),
        ({"xla_cpu_x": [1]}, ("is [1]",)),
    ],
)
def test_what_is_no_flag_is_refused(flags, facts):
    with raises_naming(UserError, *facts):
        xla_flags.flags_for(types.SimpleNamespace(XLA_FLAGS=flags), types.SimpleNamespace(platform="cpu"))
