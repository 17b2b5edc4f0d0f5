"""The shape in which a variable moves between two meshes, by their sizes alone."""

from types import SimpleNamespace

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from spmd_trainer.sharding.variables import make_variable_spec
from spmd_trainer.step import moving


@pytest.mark.parametrize(
    ("shape", "before", "after", "common"),
    [
        ((7,), 4, 2, (8,)),  # 8 in both
        ((5,), 4, 3, (12,)),  # 8 and 6
        ((9, 2), 2, 6, (12, 2)),  # 10 and 12
        ((9, 2), 6, 4, (12, 2)),  # 12 in both
        ((13,), 4, 6, (24,)),  # 16 and 18
    ],
)
def test_both_meshes_divide_it(shape, before, after, common):
    def on(count):
        variable = make_variable_spec("w", shape, np.dtype(np.float32), P("x"), {"x": count}, "declared")
        return variable, SimpleNamespace(mesh=SimpleNamespace(shape={"x": count}))

    (old, old_layout), (new, new_layout) = on(before), on(after)
    found = moving._common_shape(old, new, old_layout, new_layout)
    assert found == common
    assert found[0] % before == 0
    assert found[0] % after == 0
