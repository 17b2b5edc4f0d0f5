"""The factor of the adapters' product."""

import pytest

from spmd_trainer.decoder.lora import Lora


@pytest.mark.parametrize(("fields", "scale"), [({}, 16 / 4), ({"rslora": True}, 16 / 2), ({"alpha": 2.0}, 2 / 4)])
def test_the_scale_of_the_adapters(fields, scale):
    assert Lora(rank=4, **fields).scale == scale
