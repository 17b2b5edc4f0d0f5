"""Which mesh a job takes on the devices that there are, and what is said when none fits."""

import math
import types

import hypothesis
import jax
import pytest
from facts import assert_names, raises_naming
from hypothesis import strategies as st

from spmd_trainer import experiment_modules, experiment_registry, sharding
from spmd_trainer.base_experiment import BaseExperiment
from spmd_trainer.errors import UserError
from spmd_trainer.step import mesh_choice
from spmd_trainer.step.mesh_choice import choose_mesh, declared_mesh


class Fixed(BaseExperiment):
    def datasets(self):
        return []

    def task(self):
        return None


class Adapts(Fixed):
    def adapt_mesh(self, mesh_shape, num_devices):
        return sharding.fit_mesh_shape(mesh_shape, num_devices, grow="data")


def model(ici=(1, 4, 2), dcn=None, names=("replica", "data", "mdl")) -> types.SimpleNamespace:
    return types.SimpleNamespace(ici_mesh_shape=ici, dcn_mesh_shape=dcn, mesh_axis_names=names)


def choose(experiment, count, given=None, declared=None):
    mesh, reason = choose_mesh(
        experiment, declared or model(), name="my.Exp", given=given, devices=jax.devices()[:count]
    )
    return types.SimpleNamespace(mesh=mesh, reason=reason)


@pytest.mark.parametrize(
    ("count", "shape"), [(1, (1, 1, 1)), (2, (1, 1, 2)), (3, (1, 3, 1)), (6, (1, 3, 2)), (8, (1, 4, 2))]
)
def test_an_experiment_that_adapts_runs_on_any_number_of_devices(count, shape):
    choice = choose(Adapts(), count)
    assert tuple(choice.mesh.shape.values()) == shape
    assert ("adapted" in choice.reason) == (count != 8)
    if count != 8:
        assert "replica=1, data=4, mdl=2" in choice.reason
        assert "8 devices" in choice.reason


def test_a_fixed_mesh_is_refused_with_the_flag_to_paste():
    with pytest.raises(UserError) as raised:
        choose(Fixed(), 6)
    text = str(raised.value)
    assert_names(text, "my.Exp", "(replica=1, data=4, mdl=2)", "8 devices", "are 6", "--mesh=replica:1,data:3,mdl:2")
    with pytest.raises(UserError, match=r"there is 1\. Run it with --mesh=replica:1,data:1,mdl:1"):
        choose(Fixed(), 1)


def test_a_given_mesh_that_does_not_fit_is_answered_with_one_that_does():
    with raises_naming(
        UserError, "--mesh=replica:1,data:4,mdl:2", "8 devices", "are 6", "--mesh=replica:1,data:3,mdl:2"
    ):
        choose(Adapts(), 6, given=[("data", 4), ("mdl", 2)])
    with raises_naming(UserError, "mdll", "mean mdl"):
        choose(Adapts(), 8, given=[("data", 4), ("mdll", 2)])
    with pytest.raises(UserError, match="axis twice"):
        choose(Adapts(), 8, given=[("data", 4), ("data", 2)])


def test_a_given_mesh_may_leave_the_rest_open():
    choice = choose(Fixed(), 6, given=[("data", -1), ("mdl", 2)])
    assert dict(choice.mesh.shape) == {"replica": 1, "data": 3, "mdl": 2}
    assert "--mesh" in choice.reason


def test_a_declared_rest_is_taken_where_it_comes_out_even():
    choice = choose(Fixed(), 6, declared=model(ici=(1, -1, 2)))
    assert dict(choice.mesh.shape) == {"replica": 1, "data": 3, "mdl": 2}
    adapted = choose(Adapts(), 3, declared=model(ici=(1, -1, 2)))
    assert dict(adapted.mesh.shape) == {"replica": 1, "data": 3, "mdl": 1}
    with raises_naming(UserError, "multiple of 2 devices", "are 3"):
        choose(Fixed(), 3, declared=model(ici=(1, -1, 2)))


def test_slices_count_in_what_a_mesh_needs():
    with pytest.raises(UserError, match=r"replica=2, data=4, mdl=2\), which needs 16 devices"):
        choose(Fixed(), 8, declared=model(dcn=(2, 1, 1)))


def test_a_rule_that_gives_the_wrong_product_is_named():
    class Wrong(Fixed):
        def adapt_mesh(self, mesh_shape, num_devices):
            return {"replica": 1, "data": 2, "mdl": 2}

    with raises_naming(UserError, "Wrong.adapt_mesh", "4 devices", "are 6"):
        choose(Wrong(), 6)


SHAPES = st.dictionaries(st.sampled_from(["stage", "replica", "mdl", "seq"]), st.integers(1, 16), max_size=3)


@hypothesis.given(SHAPES, st.integers(1, 16), st.integers(1, 96))
def test_a_fitted_mesh_has_the_devices_product_and_changes_no_more_than_it_must(others, data, count):
    shape = {**others, "data": data}
    fitted = sharding.fit_mesh_shape(shape, count, grow="data")
    assert list(fitted) == list(shape)
    product = 1
    for size in fitted.values():
        product *= size
    assert product == count
    assert all(shape[axis] % fitted[axis] == 0 for axis in others)
    needed = 1
    for size in others.values():
        needed *= size
    if count % needed == 0:
        assert {axis: fitted[axis] for axis in others} == others


experiment_modules.import_package(experiment_registry.EXPERIMENTS_PACKAGE)
SHIPPED = sorted(
    name
    for name in experiment_registry.get_all()
    if name.startswith("spmd_trainer.experiments.")
    and "needs_folder" not in experiment_registry.get_registry_tags(name)
)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_shipped_experiment_has_a_mesh_for_any_number_of_devices(name):
    experiment = experiment_registry.get(name)()
    found = declared_mesh(experiment.task().model)
    if found is None:  # then it is data-parallel over all devices
        return
    declared = found.shape
    for count in (1, 3, 6, 8, 12):
        adapted = experiment.adapt_mesh(declared, count)
        assert list(adapted) == list(declared)
        assert math.prod(adapted.values()) == count


def test_the_axis_that_grows_must_be_one():
    with pytest.raises(ValueError, match="grow='dat'"):
        sharding.fit_mesh_shape({"data": 4}, 2, grow="dat")


def slices(count, chips):
    return [types.SimpleNamespace(platform="tpu", slice_index=n) for n in range(count) for _ in range(chips)]


@pytest.mark.parametrize(
    ("sizes", "inside", "across"),
    [
        ({"replica": 2, "data": 4, "mdl": 4}, [1, 4, 4], [2, 1, 1]),
        ({"replica": 1, "data": 8, "mdl": 4}, [1, 4, 4], [1, 2, 1]),
        ({"replica": 1, "data": -1, "mdl": 4}, [1, 4, 4], [1, 2, 1]),
    ],
)
def test_slices_go_to_the_outermost_axis(sizes, inside, across, monkeypatch):
    monkeypatch.setattr(mesh_choice.sharding, "create_hybrid_mesh", lambda *arguments: arguments)
    devices = slices(2, 16)
    assert mesh_choice.mesh_over_slices(sizes, devices) == (inside, across, tuple(sizes), devices)


def test_an_outermost_axis_that_the_slices_do_not_divide_is_named():
    with raises_naming(UserError, "--mesh=data:3,mdl:8", "2 slices", "'data'", "size 3", "multiple of 2"):
        mesh_choice.mesh_over_slices({"data": 3, "mdl": 8}, slices(2, 12))
