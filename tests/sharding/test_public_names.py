"""`spmd_trainer.sharding` imports its public names when they are first used."""

import subprocess
import sys

from facts import raises_naming

from spmd_trainer import sharding
from spmd_trainer.sharding import messages, public


def test_every_public_name_is_an_attribute():
    assert sharding.__all__ == public.__all__ == sorted(public.__all__)
    assert dir(sharding) == sorted(public.__all__)
    for name in public.__all__:
        assert getattr(sharding, name) is getattr(public, name)


def test_an_unknown_name_is_an_attribute_error():
    with raises_naming(AttributeError, "'spmd_trainer.sharding'", "'nothing'"):
        _ = sharding.nothing


def test_jax_comes_with_the_first_name():
    code = (
        "import sys; from spmd_trainer import sharding; import spmd_trainer.sharding.messages;"
        "assert 'jax' not in sys.modules; sharding.fsdp; assert 'jax' in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")


def test_mesh_text():
    assert messages.mesh_text({"replica": 1, "data": 4}) == "replica=1, data=4"
    assert messages.mesh_text({}) == "no axes"
