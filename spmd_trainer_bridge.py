"""Lets a program import praxis before spmd_trainer. Loaded by `spmd_trainer_bridge.pth` when Python starts.

praxis 1.4.0 needs names that today's JAX no longer has (see `spmd_trainer/pax/bridge.py`), and import sorters put `praxis`
before `spmd_trainer`. This module only waits for praxis: it imports nothing, and a program that never imports praxis never
loads any of the trainer. SPMD_TRAINER_BRIDGE=0 in the environment switches it off; then import spmd_trainer first.
"""

import sys


class WaitForPraxis:
    """A finder that finds what the others find, and has the bridge installed before praxis' first line runs."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        """Returns None for everything but praxis, and for praxis where the trainer's own finder is in place already."""
        if fullname != "praxis" or "spmd_trainer" in sys.modules:
            return None
        for finder in sys.meta_path:
            spec = None if finder is cls else finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _BridgingLoader(spec.loader)
                return spec
        return None


class _BridgingLoader:
    """praxis' own loader, which imports spmd_trainer first: that installs the bridge."""

    def __init__(self, loader):
        self._loader = loader

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module):
        import spmd_trainer  # noqa: F401

        self._loader.exec_module(module)

    def __getattr__(self, name):  # get_source and friends
        return getattr(self._loader, name)


def wait_for_praxis():
    """Puts the finder in place, unless the environment says not to."""
    os = sys.modules["os"]  # `site`, which reads .pth files, has imported it
    if os.environ.get("SPMD_TRAINER_BRIDGE") != "0":
        sys.meta_path.insert(0, WaitForPraxis)


wait_for_praxis()
