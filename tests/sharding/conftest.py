"""The meshes of the contract's examples, on eight host devices."""

import jax
import pytest
from jax.sharding import AxisType, Mesh


def _mesh(shape, names):
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


@pytest.fixture(scope="session")
def xy_mesh() -> Mesh:
    return _mesh((2, 4), ("x", "y"))


@pytest.fixture(scope="session")
def pax_mesh() -> Mesh:
    return _mesh((1, 4, 2), ("replica", "data", "mdl"))


@pytest.fixture(scope="session")
def data_mesh() -> Mesh:
    return _mesh((4, 2), ("data", "mdl"))
