"""Prepared TensorFlow Datasets in both file formats: examples, resuming, and error messages."""

import pathlib
import shutil

import numpy as np
import pytest
from facts import raises_naming
from input_helpers import assert_same, drain, stack_processes, take
from praxis import base_hyperparams, pax_fiddle

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import tfds_input

tfds = pytest.importorskip("tensorflow_datasets")
SIZE = 13


class NumberedImages(tfds.core.GeneratorBasedBuilder):
    """Images that hold their number, in an order that TFDS chooses."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {
            "image": tfds.features.Image(shape=(4, 5, 3)),
            "label": tfds.features.ClassLabel(num_classes=SIZE),
            "ids": tfds.features.Sequence(np.int64),
            "name": tfds.features.Text(),
            "items": tfds.features.Tensor(shape=(2,), dtype=np.float64),
        }
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        del dl_manager
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for i in range(SIZE):
            image = np.full((4, 5, 3), i, np.uint8)
            yield i, {"image": image, "label": i, "ids": [i] * i, "name": f"number {i}", "items": [i, 0.5]}


@pytest.fixture(scope="module", params=["tfrecord", "array_record"])
def data_dir(request, tmp_path_factory):
    data_dir = tmp_path_factory.mktemp(request.param)
    config = tfds.download.DownloadConfig(num_shards=3)
    NumberedImages(data_dir=data_dir, file_format=request.param).download_and_prepare(download_config=config)
    return data_dir


FEATURES = {"image": "image", "label": "label", "pair": "items"}


def make(data_dir, **kwargs):
    defaults = {"dataset": "numbered_images", "data_dir": data_dir, "features": FEATURES, "batch_size": 4}
    return base_hyperparams.instantiate(pax_fiddle.Config(tfds_input.TfdsInput, **{**defaults, **kwargs}))


def test_a_name_that_is_no_list_is_refused(data_dir):
    """It was taken letter by letter."""
    with raises_naming(UserError, "TfdsInput '", "features='label'", "['label']"):
        make(data_dir, features="label").input_specs()


def test_evaluation_gives_every_example_once(data_dir):
    source = make(data_dir)
    given = drain(source)
    labels = np.concatenate([batch.label for batch in given])
    counted = np.concatenate([batch.eval_sample_weights for batch in given]) > 0
    assert sorted(labels[counted]) == list(range(SIZE))
    assert len(given) == source.num_batches == 4
    specs = source.input_specs()
    for batch in given:
        np.testing.assert_array_equal(batch.image[:, 3, 4, 2], batch.label)
        np.testing.assert_array_equal(batch.pair, np.stack([batch.label, np.full(4, 0.5)], axis=1))
        assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
            name: (spec.shape, spec.dtype) for name, spec in specs.items()
        }
    assert batch.label.dtype == np.int32


def test_both_ways_to_name_it_give_the_same(data_dir):
    directory = str(data_dir / "numbered_images" / "1.0.0")
    assert_same(drain(make(None, dataset=directory)), drain(make(data_dir, dataset="numbered_images:1.0.0")))


def test_splits_are_those_of_tfds(data_dir):
    def labels(split):
        batches = drain(make(data_dir, split=split, batch_size=1))
        return [int(batch.label[0]) for batch in batches]

    whole = labels("train")
    assert labels("train[2:9]") == whole[2:9]
    assert labels("train[9:]+train[:3]") == whole[9:] + whole[:3]


def test_training_resumes_exactly_for_any_number_of_processes(data_dir):
    source = make(data_dir, is_training=True, input_random_seed=5)
    take(source, 6)
    shares = [
        make(data_dir, is_training=True, input_random_seed=5, batch_size=2, num_infeed_hosts=2, infeed_host_index=i)
        for i in (0, 1)
    ]
    for share in shares:
        share.set_state(source.get_state())
    assert_same(stack_processes(*(take(share, 5) for share in shares)), take(source, 5))
    with raises_naming(ValueError, "split was train", "is train[:13]"):
        make(data_dir, is_training=True, input_random_seed=5, split="train[:13]").set_state(source.get_state())


def test_a_function_makes_examples_of_one_shape(data_dir):
    def example_fn(example):
        # TFDS reads an empty sequence of integers as floats.
        ids = np.append(example["ids"], 0).astype(np.int64)
        return {"first_ids": np.resize(ids, 3), "length": len(example["ids"])}

    source = make(data_dir, example_fn=example_fn, features=None)
    assert source.input_specs().first_ids.shape == (4, 3)
    lengths = np.concatenate([batch.length[batch.eval_sample_weights > 0] for batch in drain(source)])
    assert sorted(lengths) == list(range(SIZE))
    with pytest.raises(ValueError, match=r"example \d+ of train .*\bids of shape .*crop, pad"):
        drain(make(data_dir, example_fn=lambda example: {"ids": np.array(example["ids"], np.int64)}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": ""}, "dataset is not set"),
        ({"dataset": "no_such"}, r"no prepared dataset 'no_such' in .*Prepare it with `tfds build no_such"),
        ({"split": "tst"}, r"split='tst': .*has train"),
        ({"split": "train[:0]"}, r"split 'train\[:0\]' has no examples"),
        ({"features": ["name"]}, "'name' .*fixed shape.* image, items, label"),
        ({"features": ["nam"]}, "'nam' .*feature.* image, items, label"),
        ({"features": None}, r"'items' can't be a name"),
        ({"example_fn": lambda example: 3, "features": None}, "result of example_fn .*example.* int"),
    ],
)
def test_bad_settings_say_what_to_do(data_dir, change, message):
    with pytest.raises(ValueError, match=rf"TfdsInput 'input': .*{message}"):
        make(data_dir, **change).get_next()


def test_broken_files_are_named(data_dir, tmp_path):
    copy = shutil.copytree(data_dir, tmp_path / "copy")
    for path in pathlib.Path(copy).rglob("*record-*"):
        content = bytearray(path.read_bytes())
        # ArrayRecord keeps little content in much padding.
        content[:] = bytes(byte ^ 1 for byte in content)
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"record-0000\d-of-00003, record \d+ \(at byte|of .*can't be read"):
        drain(make(copy))
