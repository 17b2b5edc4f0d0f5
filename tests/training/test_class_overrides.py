"""Overrides of an experiment's class attributes, set before its config is built."""

import dataclasses

import pytest
from facts import assert_names

from spmd_trainer.errors import UserError
from spmd_trainer.experiments.lm.stdlib import StdlibBytesTiny
from spmd_trainer.models import config_lines
from spmd_trainer.training import experiment_config
from spmd_trainer.training.class_overrides import make_experiment


class Reads(StdlibBytesTiny):
    """Reads its attributes in every way there is."""

    WIDTH = 8
    SHAPE = (1, 4, 2)
    LAYER = dict
    FOLDER: str = ""
    SHUFFLE = "global"
    START: str = None
    FILES: str | None = None
    TITLE: str = ""
    EITHER: str | int = ""
    UNKNOWN = None
    later: int

    @property
    def doubled(self):
        return 2 * self.WIDTH

    @classmethod
    def of_class(cls):
        return cls.WIDTH

    @staticmethod
    def helper():
        return 1

    def of_type(self):
        return type(self).WIDTH


@dataclasses.dataclass
class Copies(StdlibBytesTiny):
    """A dataclass, whose constructor copies the defaults into the instance."""

    width: int = 8


def message(*overrides, experiment=Reads):
    with pytest.raises(UserError) as raised:
        experiment_config.resolve(experiment, overrides)
    return str(raised.value)


def test_the_config_is_built_from_the_overridden_attributes():
    resolved = experiment_config.resolve("lm.stdlib.StdlibBytesTiny", ["NUM_TRAIN_STEPS=3", "task.train.random_seed=5"])
    assert resolved.task_p.train.num_train_steps == 3
    assert resolved.task_p.train.random_seed == 5
    assert StdlibBytesTiny.NUM_TRAIN_STEPS != 3
    # A field beats the attribute that it is built from, in any order.
    both = ["task.train.num_train_steps=4", "NUM_TRAIN_STEPS=3"]
    assert experiment_config.resolve(StdlibBytesTiny, both).task_p.train.num_train_steps == 4


def test_strings_need_no_quotes():
    values = ["FOLDER=models/llama", "FILES=corpus/*.txt"]
    experiment, _ = make_experiment(Reads, Reads, values)
    assert (experiment.FOLDER, experiment.FILES) == ("models/llama", "corpus/*.txt")
    experiment, _ = make_experiment(Reads, Reads, ["FOLDER='models/llama'", "FILES=['a.txt', 'b.txt']"])
    assert (experiment.FOLDER, experiment.FILES) == ("models/llama", ["a.txt", "b.txt"])
    assert_names(message("UNKNOWN=two"), "UNKNOWN", "'two'", "Python literal")


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("FOLDER=2024", "2024"),
        ("FOLDER=true", "true"),
        ("FOLDER=1e-3", "1e-3"),
        ("FOLDER='2024'", "2024"),
        ("SHUFFLE=1000", 1000),
        ("SHUFFLE=None", None),
        ("START=None", None),
        ("START=7", "7"),
        ("TITLE=None", "None"),
        ("TITLE=7", "7"),
        ("FILES=2024", "2024"),
        ("FILES=None", None),
        ("EITHER=2024", 2024),
        ("WIDTH=16", 16),
        ("UNKNOWN=2024", 2024),
    ],
)
def test_a_string_stays_a_string_if_its_text_is_a_number(override, value):
    name = override.partition("=")[0]
    found = getattr(make_experiment(Reads, Reads, [override])[0], name)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("exp", [Reads, Reads()])
def test_every_way_of_reading_sees_the_value_and_the_caller_sees_none(exp):
    experiment, values = make_experiment(exp, Reads, ["WIDTH=16", "later=7"])
    assert (experiment.WIDTH, experiment.doubled, experiment.of_class(), experiment.of_type()) == (16, 32, 16, 16)
    assert values == {"WIDTH": 16, "later": 7}
    assert experiment.later == 7
    assert isinstance(experiment, Reads)
    assert type(experiment).__qualname__ == Reads.__qualname__
    assert Reads.WIDTH == Reads().of_type() == 8
    if isinstance(exp, Reads):
        assert exp.WIDTH == exp.of_type() == 8


@pytest.mark.parametrize("exp", [Copies, Copies(width=9)])
def test_what_the_constructor_copies_into_the_instance_is_overridden_there(exp):
    experiment, _ = make_experiment(exp, Copies, ["width=16"])
    assert experiment.width == type(experiment).width == 16
    assert getattr(exp, "width", None) in (8, 9)


def test_an_attribute_of_the_instance_alone_is_overridden():
    exp = Reads()
    exp.name = "mine"
    experiment, _ = make_experiment(exp, Reads, ["name='yours'"])
    assert (experiment.name, exp.name) == ("yours", "mine")


def test_overridden_attributes_are_settings_of_the_run():
    before = experiment_config.resolve(Reads).lines()
    resolved = experiment_config.resolve(Reads, ["WIDTH=16"])
    assert "WIDTH: 16" in resolved.lines()
    assert resolved.overrides == ("WIDTH=16",)
    assert [str(change) for change in config_lines.changes(before, resolved.lines())] == ["WIDTH is new: 16"]
    again = experiment_config.resolve(Reads, ["WIDTH=32"]).lines()
    assert [str(change) for change in config_lines.changes(resolved.lines(), again)] == ["WIDTH was 16, is now 32"]


@pytest.mark.parametrize(
    ("override", "facts"),
    [
        ("WIDHT=3", ("WIDHT is no attribute", "of Reads", "mean WIDTH")),
        ("tsk.train.num_train_steps=3", ("tsk is no attribute", "of Reads", "mean task")),
        ("train_dataset[0].batch_size=3", ("train_dataset is no attribute", "of Reads", "mean train_datasets")),
        ("doubled=3", ("doubled is a method", "of Reads")),
        ("of_class=3", ("of_class is a method", "of Reads")),
        ("helper=3", ("helper is", "a method", "of Reads")),
        ("validate=3", ("validate is", "a method", "of Reads")),
        ("__doc__='x'", ("__doc__ is no attribute", "of Reads")),
        ("SHAPE[1]=3", ("SHAPE is (1, 4, 2)", "SHAPE=VALUE")),
        ("WIDTH.x=3", ("WIDTH is 8", "WIDTH=VALUE")),
        ("WIDTH=three", ("'three'", "Python literal", "quotes")),
        ("WIDTH", ("'WIDTH'", "NAME=value")),
    ],
)
def test_mistakes_are_refused_with_what_would_be_right(override, facts):
    assert_names(message(override), *facts)


def test_an_error_that_an_override_causes_has_the_users_line():
    class Divides(StdlibBytesTiny):
        PARTS = 2

        def task(self):
            assert 8 % self.PARTS == 0, "PARTS must divide 8"
            return super().task()

    assert "PARTS must divide 8" in message("PARTS=3", experiment=Divides)
    assert f"{__file__}:" in message("PARTS=3", experiment=Divides)
