"""Records which kernel each attention layer uses, while a program is traced.

with choices.recording() as recorded:
    lowered = jitted.lower(...)
for line in choices.lines(recorded):
    print(line)
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping

from spmd_trainer.kernels.kernels import Choice

_RECORDERS: contextvars.ContextVar[tuple[dict[str, Choice], ...]] = contextvars.ContextVar(
    "attention_choices", default=()
)


@contextlib.contextmanager
def recording() -> Iterator[dict[str, Choice]]:
    """Records choices made inside; yields layer name -> latest choice. Calls of programs traced before add nothing."""
    recorded: dict[str, Choice] = {}
    token = _RECORDERS.set((*_RECORDERS.get(), recorded))
    try:
        yield recorded
    finally:
        _RECORDERS.reset(token)


def record(name: str, choice: Choice) -> None:
    """Adds the choice of the layer `name` to the recordings in progress."""
    for recorded in _RECORDERS.get():
        recorded[name] = choice


def lines(recorded: Mapping[str, Choice]) -> list[str]:
    """Returns one line per distinct choice, e.g. 'attention kernel: chunked (not cudnn: head width 320 is over 256)'.

    If layers differ, each line names its layers.
    """
    layers: dict[str, list[str]] = {}
    for name, choice in recorded.items():
        layers.setdefault(_text(choice), []).append(name)
    if len(layers) == 1:
        return [f"attention kernel: {text}" for text in layers]
    return [f"attention kernel of {', '.join(names)}: {text}" for text, names in layers.items()]


def _text(choice: Choice) -> str:
    form = {None: "", "ring": " in a ring", "all_to_all": " between all-to-all exchanges"}[choice.context_parallel]
    against = "; ".join(f"not {name}: {', '.join(why)}" for name, why in choice.reasons.items())
    return f"{choice.kernel}{form}" + (f" ({against})" if against else "")
