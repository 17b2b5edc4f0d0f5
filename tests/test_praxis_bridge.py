"""The praxis bridge in fresh interpreters, with different import orders."""

import subprocess
import sys

import pytest


def run_python(code: str) -> str:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    "first",
    [
        pytest.param("import spmd_trainer", marks=pytest.mark.full),
        pytest.param("from spmd_trainer import base_experiment", marks=pytest.mark.full),
        "from praxis import base_input, layers",
    ],
)
def test_praxis_works_whatever_is_imported_first(first):
    code = f"""
{first}
import jax
from praxis import base_input, layers, optimizers, py_utils
assert jax.tree_map(lambda x, y: (x, y), {{'a': None, 'b': 1}}, {{'a': 3, 'b': 2}}) == {{'a': None, 'b': (1, 2)}}
assert len(jax.tree_flatten({{'a': 1}})[0]) == 1
print('ok')
"""
    assert run_python(code).strip() == "ok"


@pytest.mark.full
def test_installing_twice_is_installing_once():
    code = """
import sys, spmd_trainer
from spmd_trainer.pax import bridge as praxis_bridge
from praxis import decoder_utils, py_utils
before = (decoder_utils.jnp, py_utils.get_enumeration_id, len(sys.meta_path))
praxis_bridge.install()
assert before == (decoder_utils.jnp, py_utils.get_enumeration_id, len(sys.meta_path))
"""
    run_python(code)


def test_sharding_alone_brings_in_neither_praxis_nor_tensorflow():
    code = """
import sys, spmd_trainer.sharding
heavy = {'praxis', 'tensorflow', 'flax', 'fiddle', 'clu', 'orbax', 'lingvo'} & {m.split('.')[0] for m in sys.modules}
assert not heavy, heavy
"""
    run_python(code)


@pytest.mark.full
def test_praxis_sees_the_mesh_of_set_mesh_also_while_tracing():
    code = """
import os
os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=2'
import spmd_trainer, jax, numpy as np
from jax.sharding import AxisType, Mesh
from praxis import py_utils
mesh = Mesh(np.array(jax.devices()), ('x',), axis_types=(AxisType.Auto,))
assert not py_utils.global_mesh_defined()
seen = []
with jax.set_mesh(mesh):
    assert py_utils.global_mesh_defined()
    jax.jit(lambda x: seen.append(py_utils.global_mesh_defined()) or x)(1)
assert seen == [True] and not py_utils.global_mesh_defined()
"""
    run_python(code)


@pytest.mark.full
def test_enumeration_ids_may_be_arrays_of_one_element():
    code = """
import spmd_trainer, numpy as np
from praxis import py_utils
keys = (py_utils.INDEX_WITHIN_SHARD_KEY, py_utils.SHARD_INDEX_KEY, py_utils.NUM_SHARDS_KEY)
example = {key: np.array([i]) for i, key in enumerate(keys)}
text = py_utils.get_enumeration_id(example, pop=True)
assert text == '/'.join(f'{key}={i}' for i, key in enumerate(keys)) and not example
"""
    run_python(code)


@pytest.mark.parametrize(
    ("package", "version"), [pytest.param("jax", "0.4.26", marks=pytest.mark.full), ("praxis", "1.3.1")]
)
def test_a_version_outside_the_known_range_is_a_clear_import_error(package, version):
    code = f"""
import spmd_trainer, jax, importlib.metadata
real = importlib.metadata.version
if {package!r} == 'jax':
    jax.__version__ = {version!r}
else:
    importlib.metadata.version = lambda name: {version!r} if name == 'praxis' else real(name)
try:
    import praxis.base_layer
except ImportError as error:
    assert {version!r} in str(error) and '{"0.10" if package == "jax" else "1.4.0"}' in str(error), error
else:
    raise AssertionError('imported')
"""
    run_python(code)


@pytest.mark.full
def test_nothing_changes_before_praxis_is_imported():
    code = """
import sys, spmd_trainer_bridge
assert 'spmd_trainer' not in sys.modules and 'importlib.util' not in spmd_trainer_bridge.__dict__
import spmd_trainer, sympy
assert type(sympy).__name__ == 'module' and 'sympy.core' in sys.modules
assert 'praxis' not in sys.modules and 'jax' not in sys.modules
"""
    run_python(code)


@pytest.mark.full
def test_the_bridge_can_be_switched_off_and_spmd_trainer_imported_first():
    code = """
import os, subprocess, sys
def status(code):
    env = os.environ | {'SPMD_TRAINER_BRIDGE': '0'}
    return subprocess.run([sys.executable, '-c', code], env=env, capture_output=True).returncode
assert status('from praxis import base_input') == 1
assert status('import spmd_trainer; from praxis import base_input') == 0
"""
    run_python(code)


@pytest.mark.parametrize("package", ["praxis", pytest.param("lingvo", marks=pytest.mark.full)])
def test_without_praxis_or_lingvo_the_error_has_the_command(package):
    code = f"""
import importlib.machinery, sys, spmd_trainer
real = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = lambda name, *args: None if name == {package!r} else real(name, *args)
try:
    from spmd_trainer import base_experiment
except ModuleNotFoundError as error:
    assert error.name == {package!r}
    assert 'install --' in str(error) and '--no-deps praxis==1.4.0 lingvo==0.14.2' in str(error), error
else:
    raise AssertionError('imported')
"""
    run_python(code)


@pytest.mark.full
def test_looking_for_praxis_loads_nothing():
    code = """
import importlib.util, sys
assert importlib.util.find_spec('praxis') is not None
assert 'jax' not in sys.modules and 'spmd_trainer' not in sys.modules
import spmd_trainer
assert importlib.util.find_spec('praxis') is not None and 'jax' not in sys.modules
"""
    run_python(code)


@pytest.mark.full
def test_looking_for_praxis_where_it_is_missing_finds_nothing_in_programs_of_others():
    code = """
import importlib.machinery, importlib.util
real = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = lambda name, *args: None if name == 'praxis' else real(name, *args)
assert importlib.util.find_spec('praxis') is None
"""
    run_python(code)


@pytest.mark.full
def test_modules_of_layers_are_imported_at_their_first_use():
    code = """
import sys, spmd_trainer
from praxis import layers
assert not [name for name in sys.modules if name.startswith('praxis.layers.')]
assert layers.attentions.DotProductAttention is layers.DotProductAttention
assert 'praxis.layers.vits' not in sys.modules
assert {'VisionTransformer', 'vits', 'causal_mask'} <= set(dir(layers))
assert not hasattr(layers, 'NoSuchLayer')
from praxis.layers import *
assert VisionTransformer.__module__ == 'praxis.layers.vits' and 'praxis.layers.vits' in sys.modules
"""
    run_python(code)


@pytest.mark.full
def test_a_package_that_does_more_than_to_import_names_is_left_as_it_is():
    code = """
from spmd_trainer.pax.bridge import names_by_module
names = 'from a.b import C\\nfrom a.b import d\\nfrom a.e import F\\n'
assert names_by_module(names, 'a') == {'b': ['C', 'd'], 'e': ['F']}
for more in ('x = 1', 'import os', 'from z import C', 'from a.b import C as D', 'from a.b import *'):
    assert names_by_module(names + more, 'a') is None, more
"""
    run_python(code)
