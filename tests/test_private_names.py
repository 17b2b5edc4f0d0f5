"""Names of JAX and Orbax that are not public stand in six files. When an upgrade removes one, a test says what to do."""

import ast
import importlib
import pathlib

import pytest

from spmd_trainer.storage.backends import ObjectPath

ROOT = pathlib.Path(__file__).parents[1] / "spmd_trainer"
# What each file needs, and what to do when it is gone.
ADVICE = {
    "multihost/service.py": "JAX's coordination service, its client, the state of jax.distributed and the detection of clusters: "
    "read what jax.distributed.initialize does by then; tests/multiprocess say what must hold",
    "kernels/cudnn.py": "cuDNN's fused attention with packed rows: jax.nn.dot_product_attention may take segments by then",
    "kernels/attend.py": "whether this is a vmap over a mesh axis: give shard_map check_vma=False where that can't be asked",
    "checkpointing/unpadded_arrays.py": "the parts of Orbax' ArrayHandler.serialize: write it again after Orbax' own",
    "checkpointing/orbax_io.py": "how Orbax ends the threads of a failed save: see what CheckpointManager.close does by then",
    "storage/orbax_s3.py": "where Orbax decides what is an object store: if it takes s3:// by then, delete the file",
}
# The one file that changes a library: Orbax asks module functions whether a path is an object store.
PATCHING = {"storage/orbax_s3.py"}
# JAX's record of the job that this process is in. `jax.distributed.initialize` fills it in, and so do we, instead of that.
RECORDS = {("multihost/service.py", "global_state")}


def tree_of(path):
    return ast.parse(path.read_text())


def private_imports(tree):
    """{the local name: the module it is from, its name there} of what comes from a package's `_src`."""
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and "_src" in (node.module or "").split(".")
        for alias in node.names
    }


def test_six_files_use_private_names():
    files = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py") if private_imports(tree_of(path))}
    assert files == ADVICE.keys()


@pytest.mark.parametrize("file", ADVICE)
def test_private_names_are_there(file):
    tree = tree_of(ROOT / file)
    missing = []
    for local, (module, name) in private_imports(tree).items():
        full = f"{module}.{name}"
        try:
            holder = importlib.import_module(module)
            # None: cuDNN's version on a machine without CUDA.
            found = getattr(holder, name) if hasattr(holder, name) else importlib.import_module(full)
        except ImportError:
            missing.append(full)
            continue
        used = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == local
        }
        missing += [
            f"{full}.{attribute}" for attribute in sorted(used) if found is not None and not hasattr(found, attribute)
        ]
    assert not missing, f"{file} needs {ADVICE[file]}. Gone: {missing}"


def test_orbax_has_the_methods_that_our_manager_overrides():
    import orbax.checkpoint as ocp

    for name in ("_wait_for_checkpointers", "_finalize", "reached_preemption", "metrics"):
        assert hasattr(ocp.CheckpointManager, name), f"checkpointing/orbax_io.py overrides {name}: see where it went"


def test_epath_asks_its_paths_for_their_backend():
    assert any("_backend" in vars(cls) for cls in ObjectPath.__mro__[1:]), "storage/backends.py overrides _backend"


def test_nothing_of_a_library_is_replaced():
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        file, tree = str(path.relative_to(ROOT)), tree_of(path)
        if file in PATCHING or file == "pax/bridge.py":
            continue
        foreign = {
            (alias.asname or alias.name).split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import | ast.ImportFrom)
            and not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("spmd_trainer"))
            for alias in node.names
        }
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                owner = target
                while isinstance(owner, ast.Attribute):
                    owner = owner.value
                if isinstance(owner, ast.Name) and (file, owner.id) in RECORDS:
                    continue
                if isinstance(target, ast.Attribute) and isinstance(owner, ast.Name) and owner.id in foreign:
                    found.append(f"{file}:{node.lineno} {ast.unparse(target)}")
    assert not found
