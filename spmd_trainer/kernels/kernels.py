"""The interface of attention kernels, the choice of a kernel for a call, and a record of the choices while a program is traced.

`Rows` are the arrays of a call. `Pattern` says which keys a query sees, and how logits are computed. Both are the same for all
kernels. Shapes: B rows, T tokens of a row, N query heads, K key heads, head width H.

    with kernels.recording() as recorded:
        lowered = jitted.lower(...)
    for line in kernels.choice_lines(recorded):
        print(line)
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp

from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.kernels.chips import Target

# Names of the kernels: each is a module, and a `Kernel`.
NAMES = ("splash", "cudnn", "chunked", "reference")
# Kernels of one platform, tried before those of all platforms.
_OF_PLATFORM = {"tpu": ("splash",), "cuda": ("cudnn",)}
# Up to this many tokens a row's logits are small, and computing them at once is faster than in blocks.
SHORT_ROW = 512
# The logit of a key that a query doesn't see. Not -inf: a difference of two of these must be a number.
MASKED = -1e30


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Which keys of its segment a query sees, and how its logits are computed.

    Query i sees key j if both have the same segment id, `j <= i` if `causal`, and `i - j < window` if there is a window. Every
    query sees itself, so no row of logits is fully masked.

    Attributes:
      causal: a query sees no key after it.
      window: a query sees itself and the `window - 1` tokens before it. Needs `causal`. None for no window.
      softcap: logits x become softcap * tanh(x / softcap). None for no cap.
      scale: factor of the logits, applied before the cap.
    """

    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        """Checks the fields.

        Raises:
          UserError: a window without `causal`, or a window or cap that is not positive.
        """
        if self.window is not None and not self.causal:
            raise UserError(
                f"a window of {self.window} tokens needs causal=True: it counts the tokens before the query"
            )
        if self.window is not None and self.window < 1:
            raise UserError(f"the window is {self.window}; it must be at least 1, the query's own token")
        if self.softcap is not None and self.softcap <= 0:
            raise UserError(f"softcap is {self.softcap}; it must be positive, or None for no cap")

    def logits(self, products: jax.Array) -> jax.Array:
        """Scales and caps query-key products (float32, any shape); returns the logits."""
        logits = self.scale * products
        return logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap)


@dataclasses.dataclass(frozen=True)
class Call:
    """The properties of a call that decide which kernels can be used. Shapes are per device.

    Attributes:
      query: [B, T, N, H].
      key: [B, T, K, H]; N is a multiple of K. The values have the same shape and dtype.
      pattern: which keys a query sees.
      segments: True if rows hold several segments.
      dropout: True if probabilities are dropped.
      sinks: True if heads have sinks.
      target: the device that the program is compiled for.
    """

    query: jax.ShapeDtypeStruct
    key: jax.ShapeDtypeStruct
    pattern: Pattern
    segments: bool
    dropout: bool
    target: Target
    sinks: bool = False


class Rows(NamedTuple):
    """The arrays of a call: whole rows, or a device's part of them.

    Attributes:
      query: [B, T, N, H].
      key, value: [B, T, K, H]; N is a multiple of K. Query head n uses key head n // (N / K).
      segment_ids: int32 [B, T]; None if each row is one segment.
      sinks: float32 [B, N], a further logit of each head's softmax, whose probability goes to no key. Neither the scale nor the
        cap of the pattern applies to it. None for no sinks.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    segment_ids: jax.Array | None = None
    sinks: jax.Array | None = None


class Kernel(Protocol):
    """A module that computes attention. Logits and softmax are float32; the output has the dtype of the values."""

    def reasons_against(self, call: Call) -> list[str]:
        """Returns why the kernel can't be used, e.g. ['head width 320 is over 256']; empty if it can."""
        ...

    def attend(self, rows: Rows, pattern: Pattern) -> jax.Array:
        """Computes attention on one device. Returns [B, T, N, H], of value's dtype.

        The output and all other residuals get the checkpoint name 'context', so a policy that saves 'context' needs no second
        forward pass.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Choice:
    """The kernel chosen for a call.

    Attributes:
      kernel: the kernel's name.
      reasons: {name of a preferred kernel: why it can't be used}.
      context_parallel: 'ring' or 'all_to_all' if rows are split over devices; otherwise None.
      of: what the kernel computes: 'attention' or 'experts'.
    """

    kernel: str
    reasons: Mapping[str, list[str]] = dataclasses.field(default_factory=dict)
    context_parallel: str | None = None
    of: str = "attention"


@functools.cache
def kernel(name: str) -> Kernel:
    """Returns the kernel of this name.

    Raises:
      UserError: the name is unknown.
    """
    if name not in NAMES:
        raise UserError(
            f"there is no attention kernel {name!r}; kernels: {', '.join(NAMES)}{did_you_mean(name, NAMES, otherwise='')}"
        )
    return cast(Kernel, importlib.import_module(f"{__package__}.{name}"))


def choose(call: Call, asked: str | None = None) -> Choice:
    """Picks the first usable kernel in the order of `order`. Returns the kernel, and why preferred ones can't be used.

    Args:
      call: the call, with the shapes of one device.
      asked: name of the kernel to use; None for the first that can be used.

    Raises:
      UserError: the kernel `asked` is unknown or can't be used.
    """
    if asked is not None:
        if against := kernel(asked).reasons_against(call):
            able = [name for name in NAMES if name != asked and not kernel(name).reasons_against(call)]
            raise UserError(
                f"attention kernel {asked!r} can't be used: {'; '.join(against)}. Kernels that can: {', '.join(able)}; "
                "or leave the choice to the trainer with None"
            )
        return Choice(asked)
    return first_usable(order(call), lambda name: kernel(name).reasons_against(call))


def first_usable(names: Iterable[str], reasons_against: Callable[[str], list[str]], of: str = "attention") -> Choice:
    """Returns the first usable kernel, with the reasons against those before it. The last kernel must always be usable."""
    reasons: dict[str, list[str]] = {}
    for name in names:
        if not (against := reasons_against(name)):
            return Choice(name, reasons, of=of)
        reasons[name] = against
    raise AssertionError(f"{name} can always be used")


def order(call: Call) -> list[str]:
    """Returns the kernels to try for a call, best first. The last one is always usable."""
    general = ["reference"] if call.query.shape[1] <= SHORT_ROW else ["chunked", "reference"]
    return [*_OF_PLATFORM.get(call.target.platform, ()), *general]


_RECORDERS: contextvars.ContextVar[tuple[dict[str, Choice], ...]] = contextvars.ContextVar(
    "attention_choices", default=()
)


@contextlib.contextmanager
def recording() -> Iterator[dict[str, Choice]]:
    """Records the kernels chosen inside the context. Yields {layer name: latest choice}.

    Choices are made while a program is traced, so calls of traced programs add nothing.
    """
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


def choice_lines(recorded: Mapping[str, Choice]) -> list[str]:
    """Returns one line per distinct choice, e.g. 'attention kernel: chunked (not cudnn: head width 320 is over 256)'.

    If layers differ, each line names its layers.
    """
    layers: dict[tuple[str, str], list[str]] = {}
    for name, choice in recorded.items():
        layers.setdefault((choice.of, _choice_text(choice)), []).append(name)
    kinds = [of for of, _ in layers]
    return [
        f"{of} kernel: {text}" if kinds.count(of) == 1 else f"{of} kernel of {', '.join(names)}: {text}"
        for (of, text), names in layers.items()
    ]


def _choice_text(choice: Choice) -> str:
    form = {None: "", "ring": " in a ring", "all_to_all": " between all-to-all exchanges"}[choice.context_parallel]
    against = "; ".join(f"not {name}: {', '.join(why)}" for name, why in choice.reasons.items())
    return f"{choice.kernel}{form}" + (f" ({against})" if against else "")
