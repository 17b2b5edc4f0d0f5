"""`--mode=plan --search=memory`, on host devices that stand for eight H100s, with programs whose bytes are a formula."""

import dataclasses
import math
import types

import plan_helpers
import pytest
from facts import assert_names, raises_naming
from plan_helpers import fake_plan, make_job
from praxis import schedules
from praxis.layers import AutodiffCheckpointType
from praxis.pax_fiddle import Config

from benchmarks import ladder_predictions
from spmd_trainer.errors import UserError
from spmd_trainer.kernels.chips import chip
from spmd_trainer.planner import (
    memory_ladder,
    plan,
    plan_candidates,
    plan_mode,
    plan_prediction,
    plan_report,
    plan_search,
)
from spmd_trainer.planner.plan_candidates import Try
from spmd_trainer.sharding.messages import count_text
from spmd_trainer.step import optax_bridge
from spmd_trainer.step.muon import Muon
from spmd_trainer.training.job import Job

as_h100 = pytest.fixture(plan_helpers.as_h100)

STATE, GRADIENTS, ROWS = 100_000_000, 10_000_000, 256
# A block of the loss has the tokens of this many of a device's rows, or of all if there are fewer.
BLOCK_ROWS = 8
ACTIVATIONS = {"save_everything": 64_000_000, "save_dot_only": 16_000_000, "save_nothing": 4_000_000}


@dataclasses.dataclass
class Chips:
    """Programs that need the state, the activations of a minibatch, and with several minibatches the accumulated gradients.

    Attributes:
      memory: usable bytes of a chip.
      activations: bytes of all rows' activations, by policy.
      compiled: (policy, dtype of the optimizer state, minibatches, rows, mdl) of each program.
      has_host: True for chips with host memory.
      again: bytes of a layer's activations that are computed again, which no prediction knows.
      logits: bytes of a whole block of the loss.
    """

    memory: int
    activations: dict
    compiled: list
    has_host: bool = False
    again: int = 0
    logits: int = 0

    def state(self, job: Job) -> int:
        """The model's own state is far smaller."""
        learner = job.task.train.learner
        whole = {"float32": STATE, "bfloat16": STATE * 2 // 3, "8bit": STATE // 2}[learner.opt_state_dtype]
        if self.has_host and learner.opt_state_memory_kind == "pinned_host":
            whole = STATE // 3
        return whole // job.partitioner.mesh_shape()["mdl"]

    def block(self, job: Job) -> int:
        rows = plan_prediction.rows_of_device(job, job.partitioner.num_minibatches)
        return self.logits * min(rows, BLOCK_ROWS) // BLOCK_ROWS

    def plan(self, job: Job):
        policy = str(job.task.model.lm_tpl.checkpoint_policy)
        dtype, number = job.task.train.learner.opt_state_dtype, job.partitioner.num_minibatches
        mdl = job.partitioner.mesh_shape()["mdl"]
        self.compiled.append((policy, dtype, number, job.num_rows, mdl))
        accumulated = GRADIENTS if number > 1 else 0
        if job.task.train.gradient_accumulation_dtype == "bfloat16":
            accumulated //= 2
        total = self.state(job) + accumulated + self.activations[policy] * job.num_rows // ROWS // number
        total += self.block(job) + self.again * (policy != "save_everything")
        return types.SimpleNamespace(**{**vars(fake_plan(job)), "total": total, "fits": total <= self.memory})


@pytest.fixture
def chips(monkeypatch, as_h100):
    def make(memory, activations=ACTIVATIONS, has_host=False):
        found = Chips(memory, activations, [], has_host)
        monkeypatch.setattr(plan_search.plan, "plan", found.plan)
        monkeypatch.setattr(
            memory_ladder, "AutodiffCheckpointType", [AutodiffCheckpointType(name) for name in activations]
        )
        monkeypatch.setattr(plan, "usable_memory", lambda kind, whole: memory if kind == "cpu" else whole)
        monkeypatch.setattr(plan_prediction, "trained_bytes", lambda job: GRADIENTS)
        monkeypatch.setattr(plan_prediction, "state_bytes", lambda job: (found.state(job), 0))
        monkeypatch.setattr(
            plan_prediction,
            "traced",
            lambda job: (
                f"{job.task.model.lm_tpl.checkpoint_policy} {job.task.train.learner.opt_state_dtype}",
                _work(found, job),
            ),
        )
        return found

    return make


def _work(chips, job):
    policy, order = str(job.task.model.lm_tpl.checkpoint_policy), list(chips.activations)
    stacked = chips.activations[policy] * job.partitioner.mesh.size
    costs = plan_prediction.DotCosts(flops=3.0 + order.index(policy))
    forward = plan_prediction.DotCosts(flops=1.0)
    return plan_prediction.Work(costs, forward, saved_bytes=float(stacked), bytes_in_loops=float(8 * chips.block(job)))


def climb(job, budget=1000.0):
    ladder = memory_ladder.MemoryLadder(job, plan_search.Search(job, ()), plan_report.Store(job, ("memory",)))
    ladder.climb(budget)
    return ladder


def job_with(tmp_path, policy="save_everything", mesh=(("replica", 1), ("data", 8), ("mdl", 1)), rows=ROWS, **settings):
    batch = f"train_datasets[0].batch_size.global_batch_size={rows}"
    return make_job(
        tmp_path, overrides=[f"task.model.lm_tpl.checkpoint_policy={policy!r}", batch], mesh=mesh, **settings
    )


def test_what_fits_is_left_as_it_is(tmp_path, chips):
    found = chips(memory=200_000_000)
    job = job_with(tmp_path)
    ladder = climb(job)
    assert found.compiled == [("save_everything", "float32", 1, job.num_rows, 1)]
    assert ladder.fitting.candidate == ladder.steps[0].outcome.candidate
    assert not ladder.has_fewer_rows


def test_the_cheapest_policy_that_fits_is_taken(tmp_path, chips):
    found = chips(memory=120_000_000)
    ladder = climb(job_with(tmp_path))
    assert [policy for policy, *_ in found.compiled] == ["save_everything", "save_dot_only"]
    assert ladder.fitting.bytes == STATE + ACTIVATIONS["save_dot_only"]
    assert ladder.steps[1].predicted == ladder.fitting.bytes  # what is stacked is all that changes here
    assert "task.model.lm_tpl.checkpoint_policy='save_dot_only'" in ladder.text()


def test_what_one_policy_computes_again_is_added_to_the_predictions_of_others(tmp_path, chips):
    """Of the policies that are left then, the cheapest that fits is taken, not the one with the fewest bytes."""
    order = ("save_everything", "save_dot_except_logits", "save_dot_only", "save_nothing")
    found = chips(memory=129_000_000, activations={name: {**ACTIVATIONS, order[1]: 24_000_000}[name] for name in order})
    found.again = 10_000_000
    ladder = climb(job_with(tmp_path))
    assert [policy for policy, *_ in found.compiled] == ["save_everything", "save_dot_except_logits", "save_dot_only"]
    assert ladder.steps[1].predicted == ladder.steps[1].outcome.bytes - found.again
    assert ladder.steps[2].predicted == ladder.fitting.bytes


def test_the_nearest_compiled_program_corrects_a_prediction():
    def tried(predicted):
        return Try("remat", lambda at: at, predicted)

    corrections = memory_ladder.Corrections()
    assert corrections.of(tried(100)).predicted == 100
    corrections.add(tried(100), 110)
    corrections.add(tried(40), 35)
    corrections.add(tried(300), None)
    assert [corrections.of(tried(n)).predicted for n in (320, 90, 60, 10)] == [330, 100, 55, 5]
    assert corrections.of(tried(None)).predicted is None


def test_policies_with_the_same_program_are_one_try(tmp_path, chips, monkeypatch):
    same = ("save_dot_only", "save_dot_with_no_batch_dims")
    found = chips(memory=1, activations={**ACTIVATIONS, same[1]: ACTIVATIONS[same[0]]})
    traced = plan_prediction.traced
    monkeypatch.setattr(plan_prediction, "traced", lambda job: (traced(job)[0].replace(*same[::-1]), traced(job)[1]))
    ladder = ladder_predictions.EveryRung(job_with(tmp_path))
    ladder.climb(1000.0)
    tried = [policy for policy, dtype, number, *_ in found.compiled if (dtype, number) == ("float32", 1)]
    assert tried[:3] == ["save_everything", "save_dot_only", "save_nothing"]
    assert same[1] not in tried


@pytest.mark.full
def test_moments_take_what_policies_leave(tmp_path, chips):
    """The policy isn't needed once the state is small, and is taken back."""
    found = chips(
        memory=140_000_000, activations={**ACTIVATIONS, "save_dot_only": 62_000_000, "save_nothing": 60_000_000}
    )
    ladder = climb(job_with(tmp_path))
    assert [one[:2] for one in found.compiled] == [
        ("save_everything", "float32"),
        ("save_nothing", "float32"),
        ("save_nothing", "bfloat16"),
        ("save_everything", "bfloat16"),
    ]
    assert ladder.fitting.candidate.remat is None
    assert ladder.fitting.candidate.more == ("task.train.learner.opt_state_dtype='bfloat16'",)
    assert ladder.fitting.bytes == STATE * 2 // 3 + ACTIVATIONS["save_everything"]
    flags = ladder.text()
    assert "task.train.learner.opt_state_dtype='bfloat16'" in flags
    assert all(abs(step.predicted - step.outcome.bytes) <= 1 for step in ladder.steps[1:])


@pytest.mark.full
def test_minibatches_are_predicted_from_two_numbers(tmp_path, chips):
    found = chips(memory=STATE // 2 + 21_000_000, activations=dict.fromkeys(ACTIVATIONS, 80_000_000))
    ladder = climb(job_with(tmp_path))
    numbers = [number for _, _, number, _, _ in found.compiled]
    wanted = next(n for n in (2, 4, 8, 16) if 80_000_000 // n + GRADIENTS <= 21_000_000)
    assert ladder.fitting.candidate.minibatches == wanted
    assert wanted > 4, "otherwise nothing was predicted"
    assert sorted({*numbers}) == [1, 2, 4, wanted]  # none in between
    last = next(step for step in ladder.steps if step.outcome is ladder.fitting)
    assert last.predicted == pytest.approx(last.outcome.bytes, rel=0.001)


def test_minibatches_below_a_block_of_the_loss_are_predicted_from_such_minibatches(tmp_path, chips):
    """A line through larger ones would say that 32 minibatches, of one row on a device, need the whole block."""
    found = chips(memory=STATE // 2 + 13_000_000, activations=dict.fromkeys(ACTIVATIONS, 1_000_000))
    found.logits = 20_000_000
    ladder = climb(job_with(tmp_path))
    numbers = {step.outcome.candidate.minibatches: step for step in ladder.steps}
    assert [number for number in numbers if number] == [2, 4, 8, 32]
    assert numbers[8].predicted is None
    assert numbers[32].predicted == pytest.approx(numbers[32].outcome.bytes, rel=0.001)
    assert ladder.fitting is numbers[32].outcome


@pytest.mark.parametrize("by_muon", [False, True])
def test_host_memory_is_not_tried_for_muon_which_needs_all_states_at_once(tmp_path, chips, by_muon):
    chips(memory=STATE)
    job = job_with(tmp_path)
    if by_muon:
        optimizer = optax_bridge.as_optimizer(Config(Muon, learning_rate=0.1, lr_schedule=Config(schedules.Constant)))
        object.__setattr__(job.task.learner, "optimizer", optimizer)
    search = plan_search.Search(job, ())
    ladder = memory_ladder.MemoryLadder(job, search, plan_report.Store(job, ("memory",)))
    assert len(list(ladder._host_memory(search.outcomes[0]))) == (not by_muon)


@pytest.mark.full
def test_host_memory_makes_fewer_bits_needless(tmp_path, chips):
    chips(memory=STATE // 3 + 1_500_000, activations=dict.fromkeys(ACTIVATIONS, 1_000_000), has_host=True)
    ladder = climb(job_with(tmp_path))
    assert ladder.fitting.candidate.more == ("task.train.learner.opt_state_memory_kind='pinned_host'",)
    assert "without optimizer state in 8bit" in [step.rung for step in ladder.steps]
    assert "opt_state_memory_kind='pinned_host'" in ladder.text()


@pytest.mark.full
def test_gradients_in_bfloat16_are_tried_behind_minibatches(tmp_path, chips):
    chips(memory=STATE // 2 + 8_500_000, activations=dict.fromkeys(ACTIVATIONS, 80_000_000))
    ladder = climb(job_with(tmp_path))
    found = ladder.fitting.candidate
    assert "task.train.gradient_accumulation_dtype='bfloat16'" in found.more
    assert found.minibatches == 32
    assert dict(found.mesh)["mdl"] == 1
    step = next(step for step in ladder.steps if step.outcome is ladder.fitting)
    assert step.predicted == step.outcome.bytes == STATE // 2 + GRADIENTS // 2 + 80_000_000 // 32


@pytest.mark.full
@pytest.mark.parametrize("at", [1, 3])
def test_an_interrupt_keeps_what_fits(tmp_path, chips, monkeypatch, at):
    """At the first program nothing fits yet; at the last one, a change is being taken back."""
    found = chips(
        memory=140_000_000, activations={**ACTIVATIONS, "save_dot_only": 62_000_000, "save_nothing": 60_000_000}
    )
    plan_of = found.plan

    def interrupted(job):
        if len(found.compiled) == at:
            raise KeyboardInterrupt
        return plan_of(job)

    monkeypatch.setattr(plan_search.plan, "plan", interrupted)
    job = job_with(tmp_path)
    ladder = memory_ladder.MemoryLadder(job, plan_search.Search(job, ()), plan_report.Store(job, ("memory",)))
    with pytest.raises(KeyboardInterrupt):
        ladder.climb(1000.0)
    assert (ladder.fitting is not None) == (at == 3)
    assert ("run with" in ladder.text()) == (at == 3)


@pytest.mark.full
def test_a_mesh_that_splits_the_state(tmp_path, chips):
    chips(memory=30_000_000, activations=dict.fromkeys(ACTIVATIONS, 1_000_000))
    ladder = climb(job_with(tmp_path))
    mesh = dict(ladder.fitting.candidate.mesh)
    assert mesh["mdl"] >= 2
    assert math.prod(mesh.values()) == 8
    assert ladder.fitting.bytes <= 30_000_000
    assert "--mesh=" in ladder.text()


@pytest.mark.full
def test_fewer_rows_are_the_nearest_where_nothing_fits(tmp_path, chips):
    chips(memory=22_000_000, activations=dict.fromkeys(ACTIVATIONS, 400_000_000))
    job = job_with(tmp_path)
    ladder = climb(job)
    assert ladder.has_fewer_rows
    rows = ladder.fitting.candidate.rows
    assert rows < job.num_rows
    assert ladder.fitting.bytes <= 22_000_000
    predictions = [step for step in ladder.steps if step.outcome.candidate.rows and step.predicted]
    assert predictions, "the last is predicted from the two before it, on the same mesh"
    for step in predictions:
        assert step.predicted == pytest.approx(step.outcome.bytes, rel=0.001)
    assert_names(ladder.text(), count_text(rows, "row"), "global_batch_size", "nothing fits")
    smallest = min(step.outcome.bytes for step in ladder.steps if step.outcome.candidate.rows is None)
    for name, other in (("h200", "NVIDIA H200"), ("v5e", "TPU v5 lite")):
        assert (name in ladder.text().split("per chip")[1]) == (chip(other).memory_bytes >= smallest)


@pytest.mark.full
def test_where_nothing_at_all_fits_it_is_an_error(tmp_path, chips):
    chips(memory=1000)
    job = job_with(tmp_path)
    config = dataclasses.replace(job.config, search=("memory",))
    with raises_naming(UserError, "nothing fits", "as it is"):
        plan_mode.search(dataclasses.replace(job, config=config))
    assert (tmp_path / "plan.html").exists()


def test_nothing_is_fewer_than_one_row_on_a_device(tmp_path, chips):
    found = chips(memory=1000, activations={"save_nothing": 8_000_000})
    ladder = climb(job_with(tmp_path, "save_nothing", rows=8))
    assert {(number, rows) for _, _, number, rows, mdl in found.compiled if mdl == 1} == {(1, 8)}
    assert ladder.fitting is None


@pytest.mark.full
def test_an_experiments_own_minibatches_are_multiplied_and_stay_with_fewer_rows(tmp_path, chips):
    found = chips(memory=1000, activations={"save_nothing": 80_000_000})
    climb(job_with(tmp_path, "save_nothing", num_minibatches=2))
    on_mesh = [(number, rows) for _, _, number, rows, mdl in found.compiled if mdl == 1]
    # Of the predicted numbers, none of which fits, only the last is compiled.
    assert list(dict.fromkeys(number for number, rows in on_mesh if rows == ROWS)) == [2, 4, 32]
    fewer = [(number, rows) for _, _, number, rows, _ in found.compiled if rows < ROWS]
    assert {number for number, _ in fewer} == {2}
    assert [rows for _, rows in fewer] == [ROWS // 2, ROWS // 4, 2]


@pytest.mark.full
def test_rows_that_minibatches_do_not_divide_do_not_hide_others(tmp_path, chips, monkeypatch):
    """13 rows are one on each of 8 devices, as 6 are, but 2 minibatches don't divide them."""
    monkeypatch.setattr(plan_candidates, "meshes", lambda *mesh: [])
    of_6_rows = 80_000_000 * 6 // ROWS // 2
    chips(memory=STATE // 2 + GRADIENTS + of_6_rows, activations={"save_nothing": 80_000_000})
    ladder = climb(job_with(tmp_path, "save_nothing", rows=26, num_minibatches=2))
    assert ladder.fitting is not None
    assert ladder.fitting.candidate.rows == 6


def test_the_budget_ends_the_climb(tmp_path, chips):
    chips(memory=1000)
    ladder = climb(job_with(tmp_path), budget=0.0)
    assert len(ladder.steps) == 1
    assert ladder.fitting is None


@pytest.mark.full
def test_a_second_climb_compiles_nothing_again(tmp_path, chips):
    found = chips(memory=120_000_000)
    first = climb(job_with(tmp_path))
    number = len(found.compiled)
    again = climb(job_with(tmp_path))
    assert len(found.compiled) == number
    assert again.text() == first.text()


def test_memory_is_searched_alone(tmp_path, as_h100):
    job = job_with(tmp_path)
    config = dataclasses.replace(job.config, search=("memory", "mesh"))
    with raises_naming(UserError, "--search=memory,mesh", "--search=memory"):
        plan_mode.search(dataclasses.replace(job, config=config))


@pytest.mark.parametrize(
    ("message", "arguments", "wanted"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (25.50G) exceeds "
            "available HBM (15.75G).",
            2**30,
            int(26.5 * 2**30),
        ),
        (
            "XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 33.5G of 15.75G hbm.",
            2**30,
            int(33.5 * 2**30),
        ),
        ("Used 512.0M of 15.75G hbm", 1, 512 * 2**20),
        ("the compiler crashed", 1, None),
    ],
)
def test_bytes_of_a_refused_program(message, arguments, wanted):
    assert plan.refused_bytes(message, arguments) == wanted
