"""Makes praxis 1.4.0 (April 2024) run on a current JAX. All workarounds for the old praxis are in this file.

`install()` adds an import hook. When praxis is imported, the hook first restores the JAX names that praxis expects. Importing
`spmd_trainer` calls `install()`, and so does `spmd_trainer_bridge.py` when a program imports praxis first. Until praxis is
imported, nothing changes. Files in site-packages stay as they are, and calling `install()` twice has no further effect.

What is restored, why praxis needs it, and how:

- `jax.tree_map`: called in 213 places; removed in JAX 0.6. Restored as `jax.tree.map`, but as before, a None in the first tree
  gives None, whatever the other trees have in that position (chunked and lazy-prefix decode rely on it).
- `jax.tree_flatten`: used by `py_utils.update_matched_variables`. Restored as `jax.tree.flatten`.
- `jax.lib.xla_client`: imported by `base_input` for custom device orders, which are not supported. Restored as a stand-in whose
  `OpSharding` raises an error.
- `pxla.thread_resources`: gives praxis the ambient mesh. Restored as a view of the mesh of `jax.set_mesh` or `with mesh:`.
- `jnp.reshape(newshape=)`: used only by `decoder_utils` (beam search, token samplers), whose `jnp` is wrapped to accept it.
- `jnp.issubdtype(array, ...)`: used by `optimizers.apply_ema_weights`; deprecated, an error in a later JAX. The `jnp` of
  `optimizers` is wrapped to accept arrays.
- `int(x)` of a one-element array: used by `py_utils.get_enumeration_id`; a TypeError from numpy 2.4 on. It now gets scalars.
- `py_utils.with_sharding_constraint`: called for every activation that praxis shards. If a batch is sharded over several mesh
  axes, XLA computes wrong products for some orders of these axes, so `sharding.constraints.computable` reorders the axes.

What is changed for a faster start:

- `pax_fiddle.auto_config` of a lambda that calls nothing, in class bodies of `optimizers`: fiddle would parse its 3,000 lines
  twice, which takes 2 s at every start. Such a lambda builds nothing, so it is returned unchanged.
- The type hint of `BaseInput.dataset` becomes `Any`. fiddle evaluates the type hints of every input that it configures, and the
  original hint imports TensorFlow (2 s and more).
- `sympy`, `lingvo.core.symbolic` and `jax.experimental.sparse.linalg` are imported at their first use. The modules that import
  them hardly use them (`layers.ngrammer`: one function of `sympy`). With scipy, they take a fifth of the import time at start.
- The modules of `praxis.layers` are imported when one of their names is first used (`_LazyNamesLoader`), not with the package.

Not restored, because nothing here uses them: `jax.sharding.GSPMDSharding` (custom device orders), `PmapSharding` (pmap
helpers), Pallas attention of 2024 (imported lazily by `gpu_fast_attention`), flax `fp8_ops.quantize_dequantize`.
"""

from __future__ import annotations

import ast
import collections
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import lazy_loader

from spmd_trainer.errors import installation

PRAXIS_VERSION = installation.UNRESOLVABLE["praxis"]
# The lowest JAX version that works, and the first version that has not been tested.
JAX_MIN = (0, 10)
JAX_BELOW = (0, 13)


def install() -> None:
    """Adds the import hook, and fixes praxis modules that are already imported. May be called again.

    Raises:
      ImportError: the installed version of JAX or praxis is not supported. Raised here if praxis is already imported,
        otherwise when it is imported.
    """
    if not any(isinstance(finder, PraxisFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, PraxisFinder())
    if "praxis" in sys.modules:
        _restore_jax_names()
        for name, mend in _MODULE_MENDS.items():
            if name in sys.modules:
                mend(sys.modules[name])


class PraxisFinder(importlib.abc.MetaPathFinder):
    """Import hook that restores JAX's old names for praxis, and fixes a few praxis modules when they are imported.

    The changes are made when a module is executed. Finding a module (`find_spec`) changes nothing.
    """

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Returns the spec of a module that this hook handles, and None for any other module.

        The hook handles praxis, lingvo, `praxis.layers`, the modules of `_MODULE_MENDS` and, once praxis is imported, those of
        `_LAZY_MODULES`. If praxis or lingvo is not installed, importing it raises an error with the command that installs it.
        """
        is_lazy = fullname in _LAZY_MODULES and "praxis" in sys.modules
        if not (fullname in installation.UNRESOLVABLE or fullname in _MODULE_MENDS or is_lazy or fullname == _LAYERS):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None and fullname in installation.UNRESOLVABLE:
            return importlib.machinery.ModuleSpec(fullname, _MissingLoader())
        if spec is None or spec.loader is None:
            return spec
        if is_lazy:
            spec.loader = importlib.util.LazyLoader(spec.loader)
        elif fullname == _LAYERS:
            spec.loader = _LazyNamesLoader(spec.loader)
        elif fullname == "praxis":
            spec.loader = _MendingLoader(spec.loader, before=_restore_jax_names)
        elif fullname in _MODULE_MENDS:
            spec.loader = _MendingLoader(spec.loader, after=_MODULE_MENDS[fullname])
        return spec


class _MissingLoader(importlib.abc.Loader):
    """Loader of a package that is not installed: raises an error with the command that installs it."""

    def exec_module(self, module: types.ModuleType) -> None:
        raise ModuleNotFoundError(installation.missing_packages_text([module.__name__]), name=module.__name__)


class _MendingLoader(importlib.abc.Loader):
    """Wraps a module's loader, and calls functions before and after the module is executed."""

    def __init__(
        self,
        loader: Any,
        *,
        before: Callable[[], None] = lambda: None,
        after: Callable[[types.ModuleType], None] = lambda module: None,
    ):
        self._loader = loader
        self._before = before
        self._after = after

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._before()
        self._loader.exec_module(module)
        self._after(module)

    def __getattr__(self, name: str) -> Any:  # inspect and fiddle use get_source and others
        return getattr(self._loader, name)


def names_by_module(source: str, package: str) -> dict[str, list[str]] | None:
    """Returns the names that a package's `__init__.py`, given as source text, imports from each module of the package.

    Returns:
      {module name relative to the package: imported names}; None if the file has any other statement, `import *` or `as`.
    """
    found: dict[str, list[str]] = collections.defaultdict(list)
    first, *rest = ast.parse(source).body
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    for statement in rest if is_docstring else [first, *rest]:
        if not isinstance(statement, ast.ImportFrom) or statement.level:
            return None
        parent, _, module = (statement.module or "").rpartition(".")
        if parent != package or any(alias.asname or alias.name == "*" for alias in statement.names):
            return None
        found[module] += [alias.name for alias in statement.names]
    return dict(found)


class _LazyNamesLoader(_MendingLoader):
    """Wraps the loader of a package, so that each name is imported at its first use.

    An `__init__.py` that does more than import names is executed unchanged.

    `praxis/layers/__init__.py` imports 40 modules, from conformers to vision transformers. A language model needs a third of
    them; importing the others takes a tenth of the time of a restart.
    """

    def exec_module(self, module: types.ModuleType) -> None:
        """Makes the package import each name at its first use. Executes it as usual if `names_by_module` returns None."""
        names = names_by_module(self._loader.get_source(module.__name__), module.__name__)
        if names is None:
            self._loader.exec_module(module)
        else:
            attached = lazy_loader.attach(module.__name__, submodules=list(names), submod_attrs=names)
            vars(module).update(zip(("__getattr__", "__dir__", "__all__"), attached, strict=True))


def _check_versions() -> None:
    import importlib.metadata

    import jax

    version = tuple(int(part) for part in jax.__version__.split(".")[:2])
    if not JAX_MIN <= version < JAX_BELOW:
        low, high = (".".join(map(str, v)) for v in (JAX_MIN, JAX_BELOW))
        raise ImportError(
            f"spmd_trainer runs praxis {PRAXIS_VERSION} on JAX >= {low}, < {high}; the installed JAX is {jax.__version__}. "
            f"Install e.g. 'jax>={low},<{high}'."
        )
    try:
        praxis = importlib.metadata.version("praxis")
    except importlib.metadata.PackageNotFoundError:
        return  # a source tree on sys.path has no version to check
    if praxis != PRAXIS_VERSION:
        raise ImportError(
            f"spmd_trainer knows praxis {PRAXIS_VERSION}; the installed praxis is {praxis}. "
            f"Run: {installation.install_command(['praxis'])}"
        )


def _restore_jax_names() -> None:
    import jax
    import jax.lib
    from jax.interpreters import pxla

    _check_versions()
    if not hasattr(jax, "tree_map"):
        jax.tree_map = _tree_map  # type: ignore[attr-defined]
    if not hasattr(jax, "tree_flatten"):
        jax.tree_flatten = jax.tree.flatten  # type: ignore[attr-defined]
    if not hasattr(jax.lib, "xla_client"):
        stand_in = types.ModuleType("jax.lib.xla_client", "Stands in for a module that JAX no longer has.")
        stand_in.OpSharding = _OpSharding  # type: ignore[attr-defined]
        sys.modules.setdefault("jax.lib.xla_client", stand_in)
        jax.lib.xla_client = stand_in  # type: ignore[attr-defined]
    if not isinstance(vars(pxla).get("thread_resources"), _ThreadResources):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            legacy = getattr(pxla, "thread_resources", None)
        pxla.thread_resources = _ThreadResources(legacy)  # type: ignore[assignment]


def _tree_map(f: Callable[..., Any], tree: Any, *rest: Any, is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Like `jax.tree_map` of 2024: a None in `tree` maps to None, whatever `rest` has there."""
    import jax

    def stop(x: Any) -> bool:
        return x is None or (is_leaf is not None and is_leaf(x))

    def call(x: Any, *xs: Any) -> Any:
        if x is None and not (is_leaf is not None and is_leaf(x)):
            return None
        return f(x, *xs)

    return jax.tree.map(call, tree, *rest, is_leaf=stop)


class _OpSharding:
    """Stand-in for a class that JAX removed; raises an error, because custom device orders are not supported."""

    def __init__(self, *args: Any, **kwargs: Any):
        raise NotImplementedError(
            "custom device orders for input (BaseInput.experimental_remote_input with a device order) need OpSharding, "
            "which JAX no longer has; leave `custom_device_order` unset"
        )


class _ThreadResources:
    """The part of `pxla.thread_resources` that praxis reads: `.env.physical_mesh`, the ambient mesh."""

    def __init__(self, legacy: Any):
        self._legacy = legacy

    @property
    def env(self) -> _ThreadResources:
        return self

    @property
    def physical_mesh(self) -> Any:
        import jax

        if self._legacy is not None and not self._legacy.env.physical_mesh.empty:
            return self._legacy.env.physical_mesh
        return _AmbientMesh(jax.sharding.get_abstract_mesh())


class _AmbientMesh:
    """The part of the ambient mesh that praxis reads: axis names and the shape of `devices`. Also works while tracing."""

    def __init__(self, mesh: Any):
        self.empty = mesh.empty
        self.axis_names = tuple(mesh.axis_names)
        self.shape = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))

    @property
    def devices(self) -> Any:
        import numpy as np

        return np.empty(() if self.empty else tuple(self.shape.values()), dtype=object)


class _NumpyOf2024:
    """`jax.numpy` with two features that JAX dropped: `reshape(newshape=)`, and `issubdtype` of an array."""

    def __init__(self, jnp: Any):
        self._jnp = jnp

    def __getattr__(self, name: str) -> Any:
        return getattr(self._jnp, name)

    def reshape(self, a: Any, shape: Any = None, *args: Any, newshape: Any = None, **kwargs: Any) -> Any:
        return self._jnp.reshape(a, newshape if shape is None else shape, *args, **kwargs)

    def issubdtype(self, a: Any, b: Any) -> bool:
        return bool(self._jnp.issubdtype(a.dtype if hasattr(a, "aval") else a, b))


def _mend_numpy(module: Any) -> None:
    if not isinstance(module.jnp, _NumpyOf2024):
        module.jnp = _NumpyOf2024(module.jnp)


def _mend_py_utils(module: Any) -> None:
    original = module.get_enumeration_id
    if hasattr(original, "__wrapped__"):
        return
    keys = (module.INDEX_WITHIN_SHARD_KEY, module.SHARD_INDEX_KEY, module.NUM_SHARDS_KEY)

    @functools.wraps(original)
    def get_enumeration_id(example: dict[str, Any], pop: bool = False) -> str | None:
        import numpy as np

        if all(key in example for key in keys):
            example.update({key: np.asarray(example[key]).item() for key in keys})
        return original(example, pop)

    module.get_enumeration_id = get_enumeration_id
    split = module.with_sharding_constraint

    @functools.wraps(split)
    def with_sharding_constraint(x: Any, axis_resources: Any) -> Any:
        from spmd_trainer.sharding import constraints

        mesh = module.pxla.thread_resources.env.physical_mesh
        if axis_resources is not None and not mesh.empty:
            axis_resources = constraints.computable(axis_resources, dict(mesh.shape))
        return split(x, axis_resources)

    module.with_sharding_constraint = with_sharding_constraint


def _mend_pax_fiddle(module: Any) -> None:
    original = module.auto_config
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def auto_config(fn: Any = None, **kwargs: Any) -> Any:
        code = getattr(fn, "__code__", None)
        calls_nothing = code is not None and fn.__name__ == "<lambda>" and not (code.co_names or code.co_freevars)
        if kwargs or not calls_nothing:
            return original(fn, **kwargs)
        return module.fdl_auto_config.AutoConfig(fn, fn, always_inline=True)

    module.auto_config = auto_config


def _mend_base_input(module: Any) -> None:
    module.BaseInput.__annotations__["dataset"] = Any


_LAYERS = "praxis.layers"
_LAZY_MODULES = frozenset({"jax.experimental.sparse.linalg", "lingvo.core.symbolic", "sympy"})

_MODULE_MENDS: dict[str, Callable[[Any], None]] = {
    "praxis.base_input": _mend_base_input,
    "praxis.decoder_utils": _mend_numpy,
    "praxis.optimizers": _mend_numpy,
    "praxis.py_utils": _mend_py_utils,
    "praxis.pax_fiddle": _mend_pax_fiddle,
}
