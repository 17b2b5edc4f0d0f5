"""The interface of attention kernels, the choice of a kernel for a call, and a record of the choices while a program is traced.

`Rows` are the arrays of an attention call. `Pattern` says which keys a query sees, and how logits are computed. Both are the
same for all kernels.

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
# {platform: its own kernels}, which are tried before the kernels for all platforms.
_OF_PLATFORM = {"tpu": ("splash",), "cuda": ("cudnn",)}
# In rows of up to this many tokens, computing all logits at once is faster than in blocks.
SHORT_ROW = 512
# The logit of a key that a query doesn't see. Not -inf: a difference of two of these must be a number.
MASKED = -1e30


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Says which keys of its segment a query sees, and how logits are computed.

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
        """Raises UserError for a window without `causal`, and for a window or cap that is not positive."""
        if self.window is not None and not self.causal:
            raise UserError(
                f"a window of {self.window} tokens needs causal=True: it counts the tokens before the query"
            )
        if self.window is not None and self.window < 1:
            raise UserError(f"the window is {self.window}; it must be at least 1, the query's own token")
        if self.softcap is not None and self.softcap <= 0:
            raise UserError(f"softcap is {self.softcap}; it must be positive, or None for no cap")

    def logits(self, products: jax.Array) -> jax.Array:
        """Computes logits from products of queries and keys (float32, any shape): applies the scale, then the cap."""
        logits = self.scale * products
        return logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap)


@dataclasses.dataclass(frozen=True)
class Call:
    """The properties of an attention call that decide which kernels can compute it. Shapes are those on one device.

    Attributes:
      query: [rows, tokens, query heads, head width].
      key: [rows, tokens, key heads, head width]. The values have the same shape and dtype.
      pattern: which keys a query sees.
      segments: True if a row may hold several segments, i.e. texts.
      dropout: True if there is dropout of attention probabilities.
      sinks: True if heads have sinks, see `Rows`.
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
    """The arrays of an attention call, or a device's part of them: B rows of T tokens, with N query and K key heads of width H.

    Attributes:
      query: [B, T, N, H].
      key, value: [B, T, K, H]; N is a multiple of K. Query head n uses key head n // (N / K).
      segment_ids: int32 [B, T]; None if each row is one segment.
      sinks: float32 [B, N], an additional logit in each head's softmax, whose probability goes to no key. Neither the scale nor
        the cap of the pattern applies to it. None for no sinks.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    segment_ids: jax.Array | None = None
    sinks: jax.Array | None = None


class Kernel(Protocol):
    """A module that computes attention. Logits and softmax are float32; the output has the dtype of the values."""

    def reasons_against(self, call: Call) -> list[str]:
        """Returns the reasons why the kernel can't compute a call, e.g. ['head width 320 is over 256']; [] if it can."""
        ...

    def attend(self, rows: Rows, pattern: Pattern) -> jax.Array:
        """Computes attention on one device. Returns an array with the shape of the queries and the dtype of the values.

        The output and all other residuals get the checkpoint name 'context'. With a rematerialization policy that saves this
        name, the backward pass does not compute the attention a second time.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Choice:
    """The kernel chosen for a call.

    Attributes:
      kernel: the kernel's name.
      reasons: {name of a kernel that was tried before: reasons why it can't be used}.
      context_parallel: 'ring' or 'all_to_all' if rows are split over devices; otherwise None.
      of: what the kernel computes: 'attention' or 'experts'.
    """

    kernel: str
    reasons: Mapping[str, list[str]] = dataclasses.field(default_factory=dict)
    context_parallel: str | None = None
    of: str = "attention"


@functools.cache
def kernel(name: str) -> Kernel:
    """Returns the attention kernel of this name.

    Raises:
      UserError: the name is unknown.
    """
    if name not in NAMES:
        raise UserError(
            f"there is no attention kernel {name!r}; kernels: {', '.join(NAMES)}{did_you_mean(name, NAMES, otherwise='')}"
        )
    return cast(Kernel, importlib.import_module(f"{__package__}.{name}"))


def choose(call: Call, asked: str | None = None) -> Choice:
    """Picks the first kernel of `order(call)` that can be used. The result also says why the kernels before it can't be used.

    Args:
      call: the attention call, with the shapes on one device.
      asked: name of the requested kernel; None for the first that can be used.

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
    """Returns the first usable kernel, with the reasons against earlier ones. The last must be usable. `of`: see `Choice`."""
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
    """Context manager that records the kernels chosen inside the `with` block. Yields {layer name: latest choice}.

    Kernels are chosen while a program is traced, so calling a program that was traced before adds nothing.
    """
    recorded: dict[str, Choice] = {}
    token = _RECORDERS.set((*_RECORDERS.get(), recorded))
    try:
        yield recorded
    finally:
        _RECORDERS.reset(token)


def record(name: str, choice: Choice) -> None:
    """Records the kernel chosen for the layer `name` in all active `recording` contexts."""
    for recorded in _RECORDERS.get():
        recorded[name] = choice


def choice_lines(recorded: Mapping[str, Choice]) -> list[str]:
    """Returns one line per distinct choice, e.g. 'attention kernel: chunked (not cudnn: head width 320 is over 256)'.

    If the choices for layers differ, each line names its layers.
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
