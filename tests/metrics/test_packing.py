"""Packing a step's scalars into one vector, and unpacking them."""

import jax
import jax.numpy as jnp
import pytest
from trained_helpers import make_job

from spmd_trainer.step import step_fns
from spmd_trainer.step.packing import ScalarPacking, Scalars, SummaryNames
from spmd_trainer.step.step_fns import StepFnOutput


def packed_and_read(**summaries):
    packing = ScalarPacking()
    output = StepFnOutput(
        loss=jnp.float32(2.5),
        weighted_scalars={"xent": (jnp.float32(2.0), jnp.float32(64.0))},
        per_example_out={},
        summary_tensors=summaries,
    )
    packed = jax.jit(lambda: packing.pack(output))()
    return packing.unpack(packed)


def test_loss_values_weights_and_summaries_come_back():
    scalars = packed_and_read(norm_scalar=jnp.float32(0.5), **{"layer/gate_aggregate_scalar": jnp.int32(3)})
    assert scalars.loss == 2.5
    assert scalars.means == {"xent": 2.0}
    assert scalars.weights == {"xent": 64.0}
    assert scalars.summaries == {"norm": 0.5, "layer/gate": 3.0}


def test_a_repeated_layers_summary_has_one_scalar_for_each_repetition():
    scalars = packed_and_read(**{"stack/sub/norm_scalar": jnp.array([1.0, 2.0, 4.0]), "z_scalar": jnp.ones((2, 1, 2))})
    assert scalars.summaries == {
        "stack/sub/norm/0": 1.0,
        "stack/sub/norm/1": 2.0,
        "stack/sub/norm/2": 4.0,
        **{f"z/{i}/{j}": 1.0 for i in range(2) for j in range(2)},
    }


def test_summaries_of_other_kinds_are_left_out():
    scalars = packed_and_read(
        picture_image=jnp.zeros((1, 2, 2, 3)), all_histogram=jnp.zeros(9), a_scalar=jnp.float32(1)
    )
    assert scalars.summaries == {"a": 1.0}


def test_the_tokens_of_experts_are_arrays_beside_the_scalars():
    loads = {"a/moe/router": jnp.arange(6.0).reshape(2, 3), "b/moe/router": jnp.array([7.0, 0.0])}
    found = packed_and_read(
        z_scalar=jnp.float32(1), **{f"{name}/expert_load_histogram": load for name, load in loads.items()}
    )
    assert dict(found) == {"loss": 2.5, "xent": 2.0, "z": 1.0}
    assert {name: load.tolist() for name, load in found.loads.items()} == {
        "a/moe/router": [[0, 1, 2], [3, 4, 5]],
        "b/moe/router": [7, 0],
    }


def test_summaries_are_found_by_the_last_part_of_their_names():
    found = packed_and_read(
        **{
            "learning/is_valid_step_scalar": 1.0,
            "learning/a/is_valid_step_scalar": 0.0,
            "not_is_valid_step_scalar": 2.0,
        }
    )
    assert sorted(found.summaries_called("is_valid_step")) == [0.0, 1.0]
    assert found.summaries_called("unknown") == []


@pytest.mark.parametrize("part", ["loss", "value", "weight"])
def test_a_loss_or_weighted_scalar_must_be_a_scalar(part):
    numbers = {"loss": 1.0, "value": 1.0, "weight": 1.0} | {part: jnp.ones(3)}
    scalars = {"xent": (numbers["value"], numbers["weight"])}
    output = StepFnOutput(loss=numbers["loss"], weighted_scalars=scalars, per_example_out={}, summary_tensors={})
    with pytest.raises(ValueError, match=r"shape \(3,\)"):
        ScalarPacking().pack(output)


@pytest.mark.parametrize("verbosity", [pytest.param(2, marks=pytest.mark.full), 3])
@pytest.mark.full
def test_layers_say_as_much_as_the_task_asks_for(tmp_path, verbosity):
    def customize(config):
        config.task.summary_verbosity = verbosity

    job = make_job(tmp_path, customize=customize)
    partitioner = job.partitioner
    packing = ScalarPacking()

    def step(*args):
        state, output = step_fns.train_step(*args)
        return state, packing.pack(output)

    partitioned = partitioner.partition(step, job.global_shape_dtype(job.process_inputs_shape_dtype), is_eval=False)
    partitioned.lower(job.prng_key)
    names = packing._summaries.names
    layer = "lm/transformer/repeat/sub/x_layers_0/xformer_input_abs_max"
    assert {name for name in names if name.startswith(layer)} == (
        {f"{layer}/0", f"{layer}/1"} if verbosity > 2 else set()
    )


def test_printed_scalars_are_their_names_and_values():
    scalars = Scalars(0.5, {"accuracy": 0.25}, {"accuracy": 1.0}, SummaryNames(["layer/norm"]), [2.0])
    assert str(scalars) == str({"loss": 0.5, "accuracy": 0.25, "layer/norm": 2.0})
