"""TensorFlow's notices are off unless the user wants them, also where JAX was imported first."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
if sys.argv[1] == "first":
    import jax
from spmd_trainer.inputs import tensorflow_bridge
tensorflow_bridge.keep_quiet()
print(os.environ["TF_CPP_MIN_LOG_LEVEL"], os.environ["TF_ENABLE_ONEDNN_OPTS"])
"""


@pytest.mark.parametrize(
    ("order", "given", "level"),
    [
        ("first", None, "2"),
        ("later", None, "2"),
        pytest.param("first", "0", "0", marks=pytest.mark.full),
        ("later", "1", "1"),
    ],
)
def test_the_level(order, given, level):
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TF_")}
    env = kept if given is None else {**kept, "TF_CPP_MIN_LOG_LEVEL": given}
    done = subprocess.run([sys.executable, "-c", PROGRAM, order], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [level, "0"]
