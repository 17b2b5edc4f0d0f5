"""Pairs with adapters: the frozen base is the reference, live, and equals the one that is computed once."""

import jax
import numpy as np
import pytest
from decoder_helpers import evaluating
from facts import raises_naming
from praxis.pax_fiddle import Config
from preference_helpers import KEY, pair_batch, partitioner_on, shapes_of, steps_on_one_device, task_of

from spmd_trainer.decoder.lm import DecoderLanguageModel
from spmd_trainer.decoder.lora import Lora
from spmd_trainer.errors import UserError
from spmd_trainer.step import pjit, step_fns
from spmd_trainer.step.shard_map import ShardMapPartitioner
from spmd_trainer.training import verify

MESHES = [(1, 1, 1), (1, 8, 1), (1, 1, 8), (1, 4, 2), (2, 2, 2)]


def adapted_task(*, reference=True):
    """A tiny Llama with adapters of rank 3, which no mesh divides."""
    return task_of({"beta": 2.0}, lora=Config(Lora, targets="all-linear", rank=3, reference=reference))


@pytest.fixture(scope="module")
def live():
    """The task, three batches, and three steps with the live reference on one device."""
    task = adapted_task()
    batches = [pair_batch(seed=seed, reference=False) for seed in range(3)]
    return task, batches, *steps_on_one_device(task, batches)


@pytest.mark.full
def test_the_live_reference_is_the_one_that_is_computed_once(live):
    task, batches, snapshots, initial = live
    with_file = []
    for batch in batches:
        model = task.model
        base = {"params": {name: x for name, x in initial.mdl_vars["params"].items() if name != "lora"}}
        with evaluating():
            found = jax.tree.map(np.asarray, model.apply(base, batch, method=model.with_reference))
        for side in (found.chosen, found.rejected):
            side.reference_logps = side.reference_logps.view(np.int32)
        with_file.append(found)
    assert snapshots[1].loss == pytest.approx(np.log(2), rel=1e-5)
    assert snapshots[3].loss != pytest.approx(np.log(2), rel=1e-3)
    partitioner = partitioner_on(adapted_task(reference=False), (1, 1, 1), with_file[0])
    for ours, theirs in zip(snapshots, verify.run_steps(partitioner, with_file, KEY, initial), strict=True):
        assert verify.compare(ours, theirs, verify.Tolerance()).passed


@pytest.mark.full
def test_the_base_stays_as_it_is(live):
    _, _, snapshots, _ = live
    before, after = snapshots[0].variables, snapshots[-1].variables
    changed = {path for path in before if path.startswith("mdl_vars/") and np.any(before[path] != after[path])}
    assert changed
    assert all(path.startswith("mdl_vars/params/lora/") for path in changed)


@pytest.mark.parametrize(
    "sizes", [sizes if sizes == (2, 2, 2) else pytest.param(sizes, marks=pytest.mark.full) for sizes in MESHES], ids=str
)
@pytest.mark.full
def test_any_mesh_gives_the_numbers_of_one_device(sizes, live):
    task, batches, snapshots, initial = live
    partitioner = partitioner_on(task, sizes, batches[0], pjit.PjitPartitioner())
    for ours, theirs in zip(snapshots, verify.run_steps(partitioner, batches, KEY, initial), strict=True):
        assert verify.compare(ours, theirs, verify.Tolerance()).passed


@pytest.mark.full
def test_each_device_on_its_own_pairs_gives_the_numbers_of_one_device(live):
    task, batches, snapshots, initial = live
    settings = {"sharding": "fsdp", "min_weight_size": 1, "num_minibatches": 2}
    partitioner = partitioner_on(task, (1, 4, 1), batches[0], ShardMapPartitioner(**settings))
    for ours, theirs in zip(snapshots, verify.run_steps(partitioner, batches, KEY, initial), strict=True):
        assert verify.compare(ours, theirs, verify.Tolerance()).passed


@pytest.mark.full
def test_the_live_reference_takes_no_memory():
    sizes = {"MODEL_DIMS": 128, "HIDDEN_DIMS": 512, "NUM_HEADS": 4, "NUM_KV_HEADS": 4, "HEAD_DIMS": 32}
    found = []
    for is_live in (True, False):
        task = task_of(sizes=sizes, lora=Config(Lora, targets="all-linear", rank=4, reference=is_live))
        batch = pair_batch(8, reference=not is_live)
        partitioner = partitioner_on(task, (1, 4, 2), batch)
        step = partitioner.partition(step_fns.train_step, shapes_of(batch), is_eval=False)
        compiled = step.lower(KEY).compile()
        memory = compiled.memory_analysis()
        found.append(memory.temp_size_in_bytes + memory.argument_size_in_bytes)
    assert found[0] <= 1.01 * found[1]


@pytest.mark.full
def test_a_model_without_reference_is_refused():
    task = adapted_task()
    plain = Config(DecoderLanguageModel, name="lm", lm_tpl=task.model.lm_tpl)
    task.model = plain.Instantiate()
    with raises_naming(UserError, "task.lora.reference=True", "task.model", "DecoderLanguageModel"):
        partitioner_on(task, (1, 1, 1), pair_batch(reference=False).chosen)
