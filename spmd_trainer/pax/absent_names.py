"""Placeholders for unsupported paxml names. They can be imported, but using one raises an error that says what to use instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from spmd_trainer.errors import UserError


class AbsentNameError(UserError, NotImplementedError):
    """Raised when code uses a paxml name that this trainer doesn't have. The message says what to use instead."""


class Absent:
    """Placeholder for an unsupported paxml name. Calls, public attributes and subclassing raise AbsentNameError."""

    def __init__(self, name: str, instead: str):
        self._name = name
        self._instead = instead

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._raise()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # what `inspect`, `copy` and the like ask of any object
            raise AttributeError(name)
        self._raise()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> NoReturn:
        self._raise()

    def __or__(self, other: Any) -> Any:
        return Any  # in annotations: `checkpoints.Checkpointer | None`

    __ror__ = __or__

    def __repr__(self) -> str:
        return f"<paxml's {self._name}, absent here>"

    def _raise(self) -> NoReturn:
        raise AbsentNameError(f"paxml's {self._name} does not exist here: {self._instead}")


def getter(module: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Returns a `__getattr__` function for a module. It returns an `Absent` for each name in `names`.

    Args:
      module: the module's `__name__`.
      names: {unsupported paxml name: text that says what to use instead}.
    """

    def get(name: str) -> Any:
        if name in names:
            return Absent(f"{module.removeprefix('spmd_trainer.')}.{name}", names[name])
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get
