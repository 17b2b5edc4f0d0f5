"""Predictions before a compilation, and their correction by what was compiled."""

import dataclasses
import itertools
import math

import pytest

from spmd_trainer.experiments.lm import llama
from spmd_trainer.planner import links, plan_prediction
from spmd_trainer.planner.jaxpr_costs import DotCosts
from spmd_trainer.planner.plan_candidates import Candidate
from spmd_trainer.planner.plan_prediction import Work
from spmd_trainer.planner.plan_report import Outcome
from spmd_trainer.step.mesh_choice import mesh_over_slices
from spmd_trainer.training.job import BatchSettings, Job
from spmd_trainer.training.run_config import make_run_config

H100 = "NVIDIA H100 80GB HBM3"
MACHINE = links.machine(H100)
SIZES = (
    "ICI_MESH_SHAPE=(1, 8, 1)",
    "PERCORE_BATCH_SIZE=2",
    "MODEL_DIMS=512",
    "HIDDEN_DIMS=2048",
    "NUM_HEADS=8",
    "NUM_KV_HEADS=8",
    "HEAD_DIMS=64",
    "VOCAB_SIZE=1024",
    "MAX_SEQ_LEN=1024",
)
# 3 passes over 16 rows of 1,024 tokens.
FORWARD = 2 * 16 * 1024 * (2 * (4 * 512**2 + 3 * 512 * 2048) + 2 * 512 * 1024)
WORK = Work(DotCosts(3.0 * FORWARD), DotCosts(1.0 * FORWARD))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    directory = tmp_path_factory.mktemp("job")
    return Job.build(make_run_config("lm.llama.TinyLlama", directory, mode="plan", overrides=SIZES))


@pytest.fixture(scope="module")
def predict(base):
    """Predicts the step on a mesh of these sizes."""

    def on(replica, data, mdl, work=WORK, **settings):
        mesh = mesh_over_slices({"replica": replica, "data": data, "mdl": mdl})
        job = base.on_mesh(mesh, BatchSettings(8, 1, 1))
        return plan_prediction.predict(job, MACHINE, work, **settings)

    return on


@pytest.mark.full
def test_activations_cross_the_axes_that_split_weights_but_not_the_batch(predict):
    """A device of a mesh with a larger 'mdl' has more tokens, whose activations it gathers in each pass."""
    longest = [predict(1, 8 // mdl, mdl).longest for mdl in (1, 2, 4, 8)]
    assert longest == sorted(longest)
    # On 8 chips of 'mdl', at least 7/8 of the activations of two sides in each of 2 layers move 3 times.
    moved = 3 * 2 * 2 * 16 * 1024 * 512 * 2 * 7 / 8
    assert longest[3] > longest[0] + moved / MACHINE.link / 2


def test_rematerialisation_repeats_the_forward_pass_and_its_collectives(predict):
    more = Work(DotCosts(4.0 * FORWARD), DotCosts(1.0 * FORWARD))
    products = FORWARD / 8 / MACHINE.measured.products
    for mdl in (1, 8):
        extra = predict(1, 8 // mdl, mdl, more).longest - predict(1, 8 // mdl, mdl).longest
        assert extra > products
    assert extra > 2 * products  # with the collectives over 'mdl'


@pytest.mark.full
def test_each_minibatch_gathers_the_weights(predict):
    assert predict(1, 8, 1, minibatches=2).longest > predict(1, 8, 1).longest
    # Without weights that are split, only gradients are summed.
    assert predict(1, 8, 1).longest > predict(8, 1, 1).longest


def test_rows_that_do_not_divide_are_padded(predict):
    """16 rows in 4 minibatches are 4 rows for 8 devices: half of the devices compute padding."""
    assert predict(1, 8, 1, minibatches=4).shortest > 1.9 * predict(1, 8, 1).shortest


def test_the_range_starts_at_the_peak(predict):
    found = predict(1, 8, 1, Work(DotCosts(3e15), DotCosts(1e15)))
    assert found.shortest == pytest.approx(3e15 / 8 / MACHINE.chip.peak_flops)
    assert found.shortest < found.seconds < found.longest


def test_the_tokens_of_a_batch_without_ids_follow_from_its_flops(base, predict):
    shapes = base.process_inputs_shape_dtype
    images = dataclasses.replace(base, process_inputs_shape_dtype=type(shapes)(images=shapes.ids))
    found = plan_prediction.predict(images, MACHINE, WORK)
    # The embeddings are looked up, not multiplied, so the weights seem to see a few tokens less or more.
    assert found.seconds == pytest.approx(predict(1, 8, 1).seconds, rel=0.2)


def outcome(mdl, predicted, seconds=None, **settings):
    candidate = Candidate((("data", 64 // mdl), ("mdl", mdl)), **settings)
    shortest = longest = seconds
    return Outcome(candidate, seconds, shortest, longest, predicted=predicted)


def test_without_results_the_standard_deviation_is_a_factor_of_2():
    found = outcome(1, 3.0)
    assert plan_prediction.optimistic([found]) == {id(found): pytest.approx(3.0 / 2**2)}


def test_results_correct_similar_candidates_more_than_others():
    known = [outcome(1, 1.0, 1.0), outcome(2, 1.0, 1.0), outcome(64, 1.0, 4.0)]
    near, far = outcome(32, 1.0), outcome(4, 1.0)
    found = plan_prediction.optimistic([*known, near, far])
    assert set(found) == {id(near), id(far)}
    assert found[id(near)] > 1.5 * found[id(far)]


def test_results_make_predictions_of_their_neighbours_certain():
    alone = outcome(8, 1.0)
    unsure = plan_prediction.optimistic([alone])[id(alone)]
    known = [outcome(mdl, 1.0, 1.0) for mdl in (1, 2, 4, 16, 32, 64)]
    sure = plan_prediction.optimistic([*known, alone])[id(alone)]
    assert unsure < sure < 1.0
    # Another policy is another program: less certain.
    other = outcome(8, 1.0, remat="save_nothing")
    assert plan_prediction.optimistic([*known, other])[id(other)] < sure


def test_a_result_that_does_not_fit_counts():
    """Its time is known, although its `seconds` are not, because it can't be run."""
    too_large = dataclasses.replace(outcome(1, 1.0, 5.0), seconds=None, reason="too large")
    near = outcome(2, 1.0)
    assert plan_prediction.optimistic([too_large, near])[id(near)] > 1.0


def test_equal_results_are_no_division_by_zero():
    known = [outcome(mdl, 2.0, 4.0) for mdl, _ in itertools.product((1, 2), range(2))]
    found = outcome(4, 2.0)
    assert math.isfinite(plan_prediction.optimistic([*known, found])[id(found)])


def test_the_bound_does_not_write_frozen_variables(tmp_path):
    class TinyLora(llama.Lora, llama.TinyLlama):
        pass

    job = Job.build(make_run_config(TinyLora, tmp_path, mode="plan"))
    whole, _ = plan_prediction.state_bytes(job)
    mesh = job.partitioner.mesh_shape()
    frozen = sum(
        v.bytes_per_device(mesh)
        for v in job.partitioner.metadata.records()
        if v.path.startswith("mdl_vars/params/") and "lora" not in v.path
    )
    assert 0 < frozen < whole
    bound = plan_prediction.lower_bound(job, MACHINE, 0.0)
    assert bound == pytest.approx((2 * whole - frozen) / MACHINE.memory)


def test_results_with_each_setting_alone_predict_one_with_both():
    """A mesh and a policy each change the estimate by a factor."""
    factors = {1: 1.0, 2: 1.2, 4: 1.1, 8: 1.4, 64: 2.0}
    known = [outcome(mdl, 1.0, factor, remat="save_everything") for mdl, factor in factors.items()]
    known += [outcome(mdl, 1.0, 3.0 * factors[mdl], remat="save_nothing") for mdl in (1, 2, 4, 8)]
    mean, deviation = plan_prediction._correction(known, [outcome(64, 1.0, remat="save_nothing")])
    assert math.exp(mean[0]) == pytest.approx(6.0, rel=0.2)  # its nearest results are 2 and 4.2
    assert deviation[0] < plan_prediction._correction(known, [outcome(64, 1.0, remat="save_context")])[1][0]


def test_a_setting_that_all_share_changes_nothing():
    def found(**settings):
        known = [outcome(1, 1.0, 1.0, **settings), outcome(8, 1.0, 3.0, **settings)]
        waiting = outcome(64, 1.0, **settings)
        return plan_prediction.optimistic([*known, waiting])[id(waiting)]

    assert found() == pytest.approx(found(remat="save_nothing", minibatches=4, rows=512))
