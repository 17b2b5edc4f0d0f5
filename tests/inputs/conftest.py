"""Puts the praxis bridge in place before a test module imports praxis, in whichever order it names its imports."""

import spmd_trainer  # noqa: F401
