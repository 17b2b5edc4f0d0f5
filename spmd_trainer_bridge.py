"""Lets a program import praxis before spmd_trainer. Loaded by `spmd_trainer_bridge.pth` when Python starts.

praxis 1.4.0 needs names that today's JAX no longer has (see `spmd_trainer/praxis_bridge.py`), and import sorters put `praxis`
before `spmd_trainer`. This module only waits for praxis: it imports nothing, and a program that never imports praxis never
loads any of the trainer. SPMD_TRAINER_BRIDGE=0 in the environment switches it off; then import spmd_trainer first.
"""

import sys


class WaitForPraxis:
    """A finder that hands over to the bridge's own finder when praxis is imported."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        """Returns None for everything but praxis."""
        if fullname != "praxis":
            return None
        sys.meta_path.remove(cls)
        from spmd_trainer import praxis_bridge  # importing spmd_trainer installs the bridge

        # Python is on its way through the finders and has passed the bridge's place, so it is asked here.
        return praxis_bridge.PraxisFinder().find_spec(fullname, path, target)


def wait_for_praxis():
    """Puts the finder in place, unless the environment says not to."""
    os = sys.modules["os"]  # `site`, which reads .pth files, has imported it
    if os.environ.get("SPMD_TRAINER_BRIDGE") != "0":
        sys.meta_path.insert(0, WaitForPraxis)


wait_for_praxis()
