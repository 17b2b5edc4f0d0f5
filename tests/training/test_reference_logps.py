"""Reference log-probabilities: computed once when a run begins, kept in its job_log_dir, and read by every later start."""

import json
import logging
import os
import types

import jax
import numpy as np
import pytest
import trained_helpers
from etils import epath
from facts import assert_names, raises_naming
from praxis.pax_fiddle import Config

from spmd_trainer.decoder.preferences.loss import PreferenceLoss
from spmd_trainer.decoder.preferences.model import PreferenceModel
from spmd_trainer.errors import UserError
from spmd_trainer.experiments.lm.llama import TinyLlama
from spmd_trainer.inputs import ArrayInput
from spmd_trainer.inputs.preferences import PreferenceInput
from spmd_trainer.step import layout
from spmd_trainer.step.shard_map import ShardMapPartitioner
from spmd_trainer.training import evaluate, reference_files, reference_logps, train
from spmd_trainer.training.job import Job
from spmd_trainer.training.summary_writers import read_metrics

PAIRS = [{"prompt": f"{i} is", "chosen": " odd" if i % 2 else " even", "rejected": " a number"} for i in range(10)]
FIELDS = (
    "task.train.num_train_steps=4",
    "task.train.save_interval_steps=2",
    "task.train.eval_interval_steps=4",
    "task.train.summary_interval_steps=1",
    "task.train.eval_skip_train=True",
)


class TinyDpo(TinyLlama):
    """A tiny Llama on bytes, trained on pairs."""

    VOCAB_SIZE = 257
    FILES = ""

    def datasets(self):
        train_p = Config(PreferenceInput, name="train", files=self.FILES, seq_len=20, batch_size=3, reference="file")
        train_p.set(is_training=True, input_random_seed=2)
        return [train_p, train_p.clone().set(name="heldout", is_training=False, input_random_seed=None)]

    def task(self):
        task_p = super().task()
        model_p = task_p.model
        task_p.model = Config(PreferenceModel, **{name: getattr(model_p, name) for name in model_p.__arguments__})
        task_p.model.preference = Config(PreferenceLoss, beta=0.05)
        return task_p


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, PAIRS)) + "\n")
    return path


def make_job(directory, pairs, *fields, cls=TinyDpo, mesh=(1, 4, 2), **settings):
    exp = type("Dpo", (cls,), {"FILES": str(pairs), "__module__": __name__})
    return trained_helpers.make_job(directory, exp=exp, mesh=mesh, fields=(*FIELDS, *fields), **settings)


def values(directory, name="train"):
    """The values of a dataset, and its files."""
    (found,) = (epath.Path(directory) / reference_files.DIRECTORY).glob(f"{name}_*")
    paths = sorted(found.iterdir())
    return np.concatenate([np.array(json.loads(path.read_text())["logps"]) for path in paths]), paths


def losses(directory):
    return [record["preference_loss"] for _, record in sorted(read_metrics(directory, "train").items())]


@pytest.mark.full
def test_a_run_computes_its_reference_and_later_starts_read_it(tmp_path, pairs):
    whole = train.train(make_job(tmp_path / "whole", pairs))
    assert losses(tmp_path / "whole")[0] == pytest.approx(np.log(2), rel=1e-6)
    assert len({round(loss, 5) for loss in losses(tmp_path / "whole")}) == 3  # the first step's learning rate is 0
    assert whole.metrics["heldout/rewards/margins"] > 0
    found, _ = values(tmp_path / "whole")
    assert found.shape == (10, 2)
    assert (found < -5).all()
    np.testing.assert_array_equal(values(tmp_path / "whole", "heldout")[0], found)

    # Stopped half-way, and continued on another mesh: the variables are others by then, the reference is not.
    first = train.train(make_job(tmp_path / "parts", pairs, "task.train.num_train_steps=2"))
    assert first.step == 2
    before = [(path, os.stat(path).st_mtime_ns) for path in values(tmp_path / "parts")[1]]
    train.train(make_job(tmp_path / "parts", pairs, mesh=(1, 1, 1)))
    assert [(path, os.stat(path).st_mtime_ns) for path in values(tmp_path / "parts")[1]] == before
    np.testing.assert_allclose(losses(tmp_path / "parts"), losses(tmp_path / "whole"), rtol=1e-4)

    # An evaluation reads it too, and refuses to do without.
    job = make_job(tmp_path / "whole", pairs, mode="eval", mesh=(1, 1, 1))
    evaluate.evaluate_checkpoints(job)
    checkpoints = tmp_path / "whole" / "checkpoints"
    elsewhere = make_job(tmp_path / "other", pairs, mode="eval", restore_checkpoint_dir=epath.Path(checkpoints))
    with raises_naming(UserError, "'heldout'", "no reference log-probabilities", "job_log_dir"):
        evaluate.evaluate_checkpoints(elsewhere)

    # Other pairs have another reference, which the run no longer can compute.
    pairs.write_text(pairs.read_text().replace("9 is", "nine is"))
    with raises_naming(UserError, "saved position", "pairs.jsonl had", "task.train.enable_input_checkpointing=False"):
        train.train(make_job(tmp_path / "whole", pairs, "task.train.num_train_steps=6"))


def computed(job):
    state = job.partitioner.initialize_train_state(job.prng_key)
    reference_logps.compute(job, state)


@pytest.mark.full
def test_a_start_that_was_killed_continues_after_its_last_part(tmp_path, pairs, monkeypatch):
    monkeypatch.setattr(reference_logps, "_SECONDS_BETWEEN_PARTS", -1.0)
    job = make_job(tmp_path / "run", pairs)
    computed(job)
    whole, paths = values(tmp_path / "run")
    assert [path.name for path in paths] == [f"part_{first:09}.json" for first in (0, 3, 6, 9)]
    kept = [(path, os.stat(path).st_mtime_ns) for path in paths[:2]]
    for path in paths[2:]:
        path.unlink()
    # With another batch size, a batch begins within the last whole part.
    other = make_job(tmp_path / "run", pairs, "train_datasets[0].batch_size=4")
    computed(other)
    again, paths = values(tmp_path / "run")
    np.testing.assert_allclose(again, whole, rtol=1e-6)
    assert [(path, os.stat(path).st_mtime_ns) for path in paths[:2]] == kept
    assert [path.name for path in paths[2:]] == ["part_000000006.json", "part_000000008.json"]
    # A gap is filled, and what comes after it is computed again.
    paths[1].unlink()
    data = other.build_input(other.config.experiment.config.eval_datasets[0].clone().set(name="train"))
    assert reference_files.ReferenceFiles(other.config.job_log_dir, data).values() is None
    computed(job)
    np.testing.assert_allclose(
        reference_files.ReferenceFiles(other.config.job_log_dir, data).values(), whole, rtol=1e-6
    )


@pytest.mark.full
def test_pairs_that_are_left_out_have_no_values_and_the_others_keep_theirs(tmp_path, pairs, monkeypatch):
    monkeypatch.setattr(reference_logps, "_SECONDS_BETWEEN_PARTS", -1.0)
    computed(make_job(tmp_path / "whole", pairs))
    whole, _ = values(tmp_path / "whole")
    longer = [
        {**pair, "chosen": pair["chosen"] * 9} if number in (1, 4, 9) else pair for number, pair in enumerate(PAIRS)
    ]
    pairs.write_text("\n".join(map(json.dumps, longer)) + "\n")
    drops = [f"{name}_datasets[0].too_long='drop'" for name in ("train", "eval")] + ["train_datasets[0].shuffle=False"]
    computed(make_job(tmp_path / "run", pairs, *drops))
    for path in values(tmp_path / "run")[1][1:]:
        path.unlink()
    job = make_job(tmp_path / "run", pairs, *drops)
    computed(job)  # continues behind pairs that are left out
    found, _ = values(tmp_path / "run")
    assert np.isnan(found).all(axis=1).nonzero()[0].tolist() == [1, 4, 9]
    kept = [0, 2, 3, 5, 6, 7, 8]
    np.testing.assert_allclose(found[kept], whole[kept], rtol=1e-5)
    batch = job.build_train_input().get_next()
    assert batch.pair_index.tolist() == kept[:3]
    np.testing.assert_array_equal(batch.chosen.reference_logps.view(np.float32), found[kept[:3], 0].astype(np.float32))


@pytest.mark.full
def test_a_dataset_that_is_shuffled_gives_the_same_values(tmp_path, pairs):
    computed(make_job(tmp_path / "whole", pairs, mesh=(1, 1, 1)))
    computed(make_job(tmp_path / "run", pairs, "train_datasets[0].shuffle=True", mesh=(1, 1, 1)))
    np.testing.assert_array_equal(values(tmp_path / "run")[0], values(tmp_path / "whole")[0])


@pytest.mark.full
def test_any_mesh_gives_the_same_values(tmp_path, pairs):
    found = []
    for number, mesh in enumerate([(1, 1, 1), (1, 8, 1), (2, 2, 2)]):
        computed(make_job(tmp_path / str(number), pairs, mesh=mesh))
        found.append(values(tmp_path / str(number))[0])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)
    np.testing.assert_allclose(found[2], found[0], rtol=1e-5)


@pytest.mark.full
def test_the_order_of_a_batch_s_rows_doesn_t_matter(tmp_path, pairs, monkeypatch):
    """With several processes, the rows are in the order of the mesh's devices."""
    computed(make_job(tmp_path / "whole", pairs))
    put = layout.Layout.put

    def shuffled(self, batch):
        return put(self, jax.tree.map(lambda x: np.roll(x, 1, axis=0), batch))

    monkeypatch.setattr(layout.Layout, "put", shuffled)
    monkeypatch.setattr(reference_logps, "_SECONDS_BETWEEN_PARTS", -1.0)
    computed(make_job(tmp_path / "shuffled", pairs))
    np.testing.assert_allclose(values(tmp_path / "shuffled")[0], values(tmp_path / "whole")[0], rtol=1e-6)
    # A start that was killed continues within a batch.
    for path in values(tmp_path / "shuffled")[1][2:]:
        path.unlink()
    computed(make_job(tmp_path / "shuffled", pairs, "train_datasets[0].batch_size=4"))
    np.testing.assert_allclose(values(tmp_path / "shuffled")[0], values(tmp_path / "whole")[0], rtol=1e-5)


@pytest.mark.full
def test_values_of_another_model_are_computed_again(tmp_path, pairs, caplog):
    computed(make_job(tmp_path / "run", pairs))
    before, _ = values(tmp_path / "run")
    with caplog.at_level(logging.WARNING):
        computed(make_job(tmp_path / "run", pairs, mesh=(1, 1, 1)))
    assert "another model" not in caplog.text
    np.testing.assert_array_equal(values(tmp_path / "run")[0], before)
    other = make_job(tmp_path / "run", pairs, "task.train.random_seed=5")
    with caplog.at_level(logging.WARNING):
        computed(other)
    assert_names(caplog.text, "another model (1 file)")
    assert not np.allclose(values(tmp_path / "run")[0], before, rtol=1e-2)


@pytest.mark.full
def test_batches_to_look_at_need_no_values(tmp_path, pairs):
    job = make_job(tmp_path / "run", pairs)
    batch = reference_files.attach_zeros(job.build_train_input()).get_next()
    assert not batch.chosen.reference_logps.any()
    computed(job)
    batch = reference_files.attach_zeros(job.build_train_input()).get_next()
    assert batch.chosen.reference_logps.all()


@pytest.mark.full
def test_a_damaged_file_is_named(tmp_path, pairs):
    job = make_job(tmp_path / "run", pairs)
    computed(job)
    path = values(tmp_path / "run")[1][0]
    path.write_text(path.read_text()[:-20])
    with pytest.raises(UserError, match=rf"{path} is damaged: .*remove the file"):
        job.build_train_input()


@pytest.mark.full
def test_a_model_without_reference_is_refused(tmp_path, pairs):
    job = make_job(tmp_path / "run", pairs)
    job.task.model = TinyLlama().model().set(lm_tpl=job.task.model.lm_tpl).Instantiate()
    with raises_naming(UserError, "input 'train'", "reference='file'", "a DecoderLanguageModel"):
        reference_logps.compute(job, job.partitioner.initialize_train_state(job.prng_key))


@pytest.mark.full
@pytest.mark.parametrize("settings", [{}, {"sharding": "fsdp", "min_weight_size": 1}], ids=str)
def test_each_device_on_its_own_pairs_gives_the_same_values(settings, tmp_path, pairs):
    computed(make_job(tmp_path / "one", pairs, mesh=(1, 1, 1)))
    job = make_job(tmp_path / "own", pairs, mesh=(1, 4, 1))
    job.config.experiment.experiment.partitioner = lambda: ShardMapPartitioner(mesh=job.partitioner.mesh, **settings)
    computed(Job.build(job.config))
    np.testing.assert_allclose(values(tmp_path / "own")[0], values(tmp_path / "one")[0], rtol=1e-5)


class Named(ArrayInput):
    """An input of a user, with a field of a method's name."""

    use_reference: bool = True


def test_an_input_with_a_field_of_this_name_is_no_input_of_pairs():
    named = Config(Named, name="train", is_training=True, arrays={"x": np.zeros((4, 2))}, batch_size=2)
    config = types.SimpleNamespace(train_datasets=[named], eval_datasets=[named])
    experiment = types.SimpleNamespace(config=config)
    job = types.SimpleNamespace(config=types.SimpleNamespace(experiment=experiment))
    assert reference_logps.inputs_of(job) == []
    assert reference_files.attach_zeros(built := named.Instantiate()) is built
