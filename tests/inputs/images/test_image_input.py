"""Images: which a batch holds, for any number of processes; resuming; bad images."""

import pathlib

import numpy as np
import pytest
import store_fixtures
from etils import epath
from facts import raises_naming
from image_files import SHAPE, encoded, encoded_array, pixels, write_parquet, write_tar
from input_helpers import assert_same, drain, stack_processes, take
from praxis import base_hyperparams, pax_fiddle

from spmd_trainer import inputs
from spmd_trainer.errors import UserError
from spmd_trainer.inputs import Images, Mixture
from spmd_trainer.inputs.images.image_input import ImageInput

gs_address, address_of, use = store_fixtures.gs_address, store_fixtures.address_of, store_fixtures.use

pytest.importorskip("grain")
COUNT = 11
WRITERS = {"tar": (write_tar, "cls"), "parquet": (write_parquet, "label")}


def make(source, **kwargs):
    defaults = {"name": "pictures", "batch_size": 6, "shape": SHAPE}
    return base_hyperparams.instantiate(pax_fiddle.Config(ImageInput, source=source, **{**defaults, **kwargs}))


@pytest.fixture(params=list(WRITERS))
def images(request, tmp_path):
    """Images 0 to 10 in two files."""
    write, label = WRITERS[request.param]
    files = [write(tmp_path, range(7), "a"), write(tmp_path, range(7, COUNT), "b")]
    return Images(files, label=label)


def labels(given):
    return [batch.label.tolist() for batch in given]


def test_evaluation_gives_every_image_once(images):
    source = make(images, batch_size=4)
    given = drain(source)
    assert labels(given) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 10]]
    assert np.concatenate([batch.eval_sample_weights for batch in given]).tolist() == [1] * COUNT + [0]
    for batch in given:
        np.testing.assert_array_equal(batch.image, np.stack([pixels(label) for label in batch.label]))
        assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
            name: (spec.shape, spec.dtype) for name, spec in source.input_specs().items()
        }
    source.reset()
    assert_same(drain(source), given)


@pytest.mark.parametrize("shuffle", ["auto", 2, None])
def test_each_epoch_of_training_holds_every_image_once(images, shuffle):
    source = make(Images(images.files, label=images.label, shuffle=shuffle), is_training=True)
    epochs = np.concatenate([batch.label for batch in take(source, COUNT)]).reshape(6, COUNT)
    for epoch in epochs:
        assert sorted(epoch) == list(range(COUNT))
    assert len({tuple(epoch) for epoch in epochs}) == (1 if shuffle is None else 6)


def test_a_weight_that_changes_is_refused(tmp_path):
    images = Images(write_tar(tmp_path, range(5), "m"), label="cls")
    with raises_naming(UserError, "source 'a'", "changes", "CorpusInput"):
        make(Mixture({"a": (images, {0: 1, 9: 2}), "b": (images, 1)}), is_training=True)


@pytest.mark.parametrize("images", ["tar", pytest.param("parquet", marks=pytest.mark.full)], indirect=True)
def test_three_processes_then_two_then_five_give_the_batches_of_one(images, tmp_path):
    mixed = Mixture({"all": (images, 3.0), "more": (Images(write_tar(tmp_path, range(20, 25), "m"), label="cls"), 1.0)})

    def job(processes, rows=30):
        return [
            make(mixed, is_training=True, batch_size=rows // processes, num_infeed_hosts=processes, infeed_host_index=i)
            for i in range(processes)
        ]

    expected = take(job(1)[0], 6)
    given, state = [], None
    for processes in (3, 2, 5):
        members = job(processes)
        for member in members:
            if state is not None:
                member.set_state(state)
        given += stack_processes(*(take(member, 2) for member in members))
        (state,) = {member.get_state() for member in members}
    assert_same(given, expected)
    counts = np.bincount(np.concatenate([batch["label"] for batch in given]) >= 20)
    assert counts.tolist() == [135, 45]


def test_batch_n_is_a_function_of_n(images):
    source = make(images, is_training=True, input_random_seed=3)
    given = take(source, 5)
    again = make(images, is_training=True, input_random_seed=3, threads=0)
    assert_same([again.batch_at(n) for n in (4, 0, 2)], [given[n] for n in (4, 0, 2)])
    other = make(images, is_training=True, input_random_seed=4)
    assert labels(take(other, 5)) != labels(given)


def replaced(files, position, content):
    """The tar shard with the content of its image at a place exchanged; both are of the same size."""
    path = pathlib.Path(files[0])
    whole = path.read_bytes()
    old = encoded(position)
    assert whole.count(old) == 1
    path.write_bytes(whole.replace(old, content(old)))


def half(content):
    return content[: len(content) // 2] + bytes(len(content) - len(content) // 2)


def test_a_damaged_image_is_named_with_its_file_and_member(tmp_path):
    files = [write_tar(tmp_path, range(COUNT))]
    replaced(files, 4, half)
    images = Images(files, label="cls")
    for _ in range(2):
        source = make(images)
        with raises_naming(UserError, "ImageInput 'pictures'", "a.tar, member s004.png", "whole image", "'skip'"):
            source.get_next()
    source = make(images, bad_records="skip")
    given = drain(source)
    assert given[0].eval_sample_weights.tolist() == [1, 1, 1, 1, 0, 1]
    assert given[0].label.tolist() == [0, 1, 2, 3, 0, 5]
    assert not given[0].image[4].any()
    assert source.skipped == {"documents": 1}


def test_a_damaged_image_of_a_parquet_file_is_named_with_its_row(tmp_path):
    content = [{"bytes": encoded(n) if n != 4 else b"GIF89a", "path": None} for n in range(6)]
    content[5] = {"bytes": None, "path": None}
    images = Images(write_parquet(tmp_path, range(6), content=content, labels=[0, 1, None, 3, 4, 5]), label="label")
    with raises_naming(UserError, "a.parquet row group 1, row 3", "'label'", "null"):
        make(images).get_next()
    with raises_naming(UserError, "a.parquet row group 2, row 2", "whole image"):
        make(Images(images.files)).get_next()
    source = make(images, bad_records="skip")
    assert source.get_next().eval_sample_weights.tolist() == [1, 1, 0, 1, 0, 0]
    assert source.skipped == {"documents": 3}


def test_a_sample_without_label_or_image_is_named(tmp_path):
    def without_label(number, members):
        return members if number != 2 else {"png": members["png"], "clss": b"2"}

    def without_image(number, members):
        return members if number != 2 else {"json": {}, "cls": b"2"}

    label = Images(write_tar(tmp_path, range(4), "label", change=without_label), label="cls")
    with raises_naming(UserError, "label.tar, member s002.png", "member 'cls'", "clss?"):
        make(label).get_next()
    image = Images(write_tar(tmp_path, range(4), "image", change=without_image), label="cls")
    with pytest.raises(UserError, match=r"image.tar, sample 's002' has no member 'jpg' or 'jpeg' or 'png'"):
        make(image).get_next()
    skipping = make(image, bad_records="skip", batch_size=4)
    assert skipping.get_next().eval_sample_weights.tolist() == [1, 1, 0, 1]


def test_labels_are_numbers_names_or_entries_of_json(tmp_path):
    names = ["cat", "dog", "owl"]

    def named(number, members):
        return {"png": members["png"], "txt": f"{names[number % 3]}\n".encode(), "json": {"id": {"n": 7 * number}}}

    files = write_tar(tmp_path, range(5), change=named)
    assert make(Images(files, label="txt"), classes=names, batch_size=5).get_next().label.tolist() == [0, 1, 2, 0, 1]
    assert make(Images(files, label="json.id.n"), batch_size=5).get_next().label.tolist() == [0, 7, 14, 21, 28]
    assert "label" not in make(Images(files), batch_size=5).get_next()
    for label, settings, facts in (
        ("txt", {}, ["label 'cat'", "whole number", "set `classes`"]),
        ("txt", {"classes": ["cat", "dogs"]}, ["label 'dog'", "`classes`", "dogs?"]),
        ("json.id.m", {}, ["key 'id.m'", "member 'json'"]),
    ):
        with raises_naming(UserError, *facts):
            make(Images(files, label=label), batch_size=5, **settings).get_next()


def test_images_are_brought_to_one_shape(tmp_path):
    def sized(number, members):
        # Three columns of colours, of which 'crop' keeps the middle one.
        columns = np.concatenate([pixels(n, (12, 12, 3)) for n in (5, 50, 100)], axis=1)
        return {"png": encoded_array(columns), "cls": b"0"}

    files = write_tar(tmp_path, range(2), change=sized)
    cropped = make(Images(files), shape=(6, 6, 3), batch_size=2).get_next().image
    np.testing.assert_array_equal(cropped, np.stack([pixels(50, (6, 6, 3))] * 2))
    stretched = make(Images(files), shape=(6, 6, 3), resize="stretch", batch_size=2).get_next().image
    np.testing.assert_array_equal(stretched[:, :, 0], np.stack([pixels(5, (6, 3))] * 2))
    assert make(Images(files), shape=(4, 4, 1), batch_size=2).get_next().image.shape == (2, 4, 4, 1)
    with raises_naming(UserError, "shape (12, 36, 3)", "(6, 6, 3)", "resize"):
        make(Images(files), shape=(6, 6, 3), resize="exact", batch_size=2).get_next()


def test_jpeg_and_a_transform(tmp_path):
    source = make(
        Images(write_tar(tmp_path, range(3), form="jpg"), label="cls"),
        batch_size=3,
        transform=lambda batch: {"pixels": batch.image.astype(np.float32) / 255, "label": batch.label},
    )
    batch = source.get_next()
    np.testing.assert_allclose(batch.pixels * 255, np.stack([pixels(n) for n in range(3)]), atol=3)
    assert batch.label.tolist() == [0, 1, 2]


def test_positions_of_other_images_are_refused(tmp_path):
    files = write_tar(tmp_path, range(5))
    state = make(Images(files, label="cls"), is_training=True).get_state()
    with pytest.raises(UserError, match=r"shape was \[6, 8, 3\] and is \[6, 6, 3\]"):
        make(Images(files, label="cls"), is_training=True, shape=(6, 6, 3)).set_state(state)
    before = pathlib.Path(files).stat().st_size
    write_tar(tmp_path, range(50))
    with raises_naming(
        UserError,
        "files of documents",
        f"1 file of {before:,} bytes",
        f"now 1 file of {pathlib.Path(files).stat().st_size:,} bytes",
        "num_images",
    ):
        make(Images(files, label="cls"), is_training=True).set_state(state)


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"source": "a.tar"}, ["source='a.tar';", "give Images"]),
        ({"source": inputs.Documents("a.tar")}, ["source=Documents", "; give Images"]),
        ({"shape": (4, 4)}, ["shape=(4, 4);", "(height, width, channels)"]),
        ({"resize": "crops"}, ["resize='crops';", "'stretch'", "crop?"]),
        ({"bad_records": "drop"}, ["bad_records='drop';", "'raise'", "'skip'"]),
        ({"classes": "cat"}, ["classes='cat';", "a list"]),
        ({"threads": -1}, ["threads=-1;", "0 or more"]),
    ],
)
def test_settings_that_do_not_fit_say_why(tmp_path, settings, facts):
    with raises_naming(UserError, "ImageInput 'pictures':", *facts):
        make(**{"source": Images(write_tar(tmp_path, range(2))), **settings})


def test_files_that_do_not_fit_say_why(tmp_path):
    packed = write_tar(tmp_path, range(2), "packed", suffix=".gz")
    with pytest.raises(UserError, match=r"packed.tar.gz is compressed .*unpack it"):
        make(Images(packed))
    text = tmp_path / "a.jsonl"
    text.write_text('{"text": "no image"}\n')
    with raises_naming(UserError, f"'pictures': {text}", "kind 'jsonl'", "Parquet", "tar"):
        make(Images(str(text)))
    parquet = write_parquet(tmp_path, range(3))
    with raises_naming(UserError, f"'pictures': {parquet}", "column 'labels'", "label?"):
        make(Images(parquet, label="labels"))
    with pytest.raises(UserError, match=r"shuffle='global' needs .*read by number"):
        make(Images(parquet, shuffle="global"), is_training=True)
    both = write_tar(tmp_path, range(2), "both", change=lambda n, members: {**members, "jpg": encoded(n, "jpeg")})
    with raises_naming(UserError, f"'pictures': {both}", "sample 's000'", "jpg and png", "set column"):
        make(Images(both))
    assert make(Images(both, column="png")).get_next().image.shape == (6, *SHAPE)
    with raises_naming(UserError, "some sources", "mixture", "a label", "none"):
        make(Mixture({"a": (Images(both, "png"), 1), "b": (Images(both, "png", label="cls"), 1)}))


def test_a_shard_that_changes_under_a_run_is_refused(tmp_path):
    files = write_tar(tmp_path, range(5))
    source = make(Images(files, label="cls"), is_training=True, threads=0)
    source.get_next()
    size = pathlib.Path(files).stat().st_size
    write_tar(tmp_path, range(50))
    with raises_naming(UserError, "ImageInput 'pictures'", files, f"{size} bytes", "has changed"):
        take(source, 5)


def test_images_in_an_object_store(images, address_of, use):
    use("gs", address_of("gs"))
    folder = epath.Path("gs://bkt/images")
    for path in images.files:
        (folder / pathlib.Path(path).name).write_bytes(pathlib.Path(path).read_bytes())
    remote = Images(f"{folder}/*{pathlib.Path(images.files[0]).suffix}", label=images.label)
    assert_same(drain(make(remote)), drain(make(images)))
