"""Inputs whose batch n is a pure function of n, so that a position is one integer.

The words used here: an *example* is one row of a batch. The examples of all processes stand in one global *order*;
global batch n holds its places [n * G, (n + 1) * G), where G = batch_size * num_infeed_hosts, and process h takes its
rows [h * batch_size, (h + 1) * batch_size) of them. The *position* is the number of global batches already taken. So
the same examples stand in the same global batch however many processes share the work. What is saved is the number of
places taken: an input with another G goes on at the next place, and its batch 0 then holds the places from there on.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from praxis import base_input
from praxis.py_utils import NestedMap

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import batches


@dataclasses.dataclass(frozen=True)
class ExampleOrder:
    """Which example stands at which place of the global order.

    Attributes:
      num_examples: size of the set; None for a set without end, where example i stands at place i.
      endless: the order starts over after the last example. Otherwise it ends there.
      shuffle: each epoch of an endless order is a permutation of its own, drawn from (seed, epoch).
      seed: seeds the permutations; 0 or more.
    """

    num_examples: int | None
    endless: bool = True
    shuffle: bool = False
    seed: int = 0

    def examples(self, first: int, count: int) -> np.ndarray:
        """int64 [count]: examples at places [first, first + count); after the end of a finite order, `num_examples`."""
        places = np.arange(first, first + count, dtype=np.int64)
        if self.num_examples is None:
            return places
        if not self.endless:
            return np.minimum(places, self.num_examples)
        epochs, within = np.divmod(places, self.num_examples)
        if not self.shuffle:
            return within
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            here = epochs == epoch
            within[here] = _permutation(self.num_examples, self.seed, epoch)[within[here]]
        return within


@functools.lru_cache(maxsize=4)
def _permutation(size: int, seed: int, epoch: int) -> np.ndarray:
    # RandomState, not Generator: numpy promises that its streams never change, and a resumed run relies on that.
    bits = np.random.MT19937(np.random.SeedSequence((seed, epoch)))
    return np.random.RandomState(bits).permutation(size)


class IndexedInput(base_input.BaseInput):
    """Base of inputs whose batch n is a pure function of n and of the settings.

    A subclass gives `order`, `input_specs` and `batch_at`, and where a pipeline of its own is faster also `_iterate`.
    Training inputs are endless. Inputs over a finite set are finite when `is_training` is off: each example comes exactly
    once, the last batch is filled up with rows of weight 0, then StopIteration until `reset()`; `reset_for_eval` is
    switched on for them. All processes see the same number of batches.
    """

    # The place that batch 0 begins at, and the batches taken since.
    _origin: int = dataclasses.field(default=0, init=False, repr=False)
    _position: int = dataclasses.field(default=0, init=False, repr=False)
    _iterator: Any = dataclasses.field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("batch_size")
        if not 0 <= self.infeed_host_index < self.num_infeed_hosts:
            raise self.error(
                f"infeed_host_index={self.infeed_host_index} with num_infeed_hosts={self.num_infeed_hosts}; set them "
                "to jax.process_index() and jax.process_count()"
            )
        if self.input_random_seed is not None and self.input_random_seed < 0:
            raise self.error(f"input_random_seed={self.input_random_seed}; set it to 0 or more")

    @property
    def order(self) -> ExampleOrder:
        """The global order of examples, the same in every process."""
        raise NotImplementedError

    @property
    def endless(self) -> bool:
        """Whether the order has no end. A subclass whose `order` is dear to know says so itself."""
        return self.order.endless

    def input_specs(self) -> NestedMap:
        """NestedMap of jax.ShapeDtypeStruct: this process' batch without padding. Reads nothing."""
        raise NotImplementedError

    def batch_at(self, position: int) -> NestedMap:
        """This process' rows of global batch `position`, numpy arrays as `input_specs` says."""
        raise NotImplementedError

    @property
    def seed(self) -> int:
        """`input_random_seed`, 0 where it is not set."""
        return self.input_random_seed or 0

    @property
    def global_batch_size(self) -> int:
        """Rows of one batch, all processes together."""
        return self.batch_size * self.num_infeed_hosts

    @property
    def num_batches(self) -> int | None:
        """Batches until StopIteration, the same in every process. None: endless."""
        if self.endless:
            return None
        order = self.order
        if order.num_examples is None:
            return None
        return -(-(order.num_examples - self._origin) // self.global_batch_size)

    def first_place(self, position: int) -> int:
        """The place in the global order of this process' first row of global batch `position`; its others follow."""
        return self._origin + position * self.global_batch_size + self.infeed_host_index * self.batch_size

    def examples_at(self, position: int) -> np.ndarray:
        """int64 [batch_size]: the examples in this process' rows of global batch `position`."""
        return self.order.examples(self.first_place(position), self.batch_size)

    def get_next(self) -> NestedMap:
        """The batch at the position, which moves on by one.

        Raises:
          StopIteration: the set is finite and all of it has been given; `reset()` starts over.
        """
        if self.num_batches is not None and self._position >= self.num_batches:
            raise StopIteration
        if self._iterator is None:
            self._iterator = self._iterate(self._position)
        try:
            batch = next(self._iterator)
        except Exception:
            self._iterator = None  # a generator that raised is spent: asked again, it would pretend to have ended
            raise
        self._position += 1
        return batch

    def get_next_padded(self) -> NestedMap:
        """`get_next` with `batch_padding_size` rows of weight 0 added (see `batches.pad_batch`)."""
        if self._peek is not None:
            return super().get_next_padded()
        if not self.batch_padding_size:
            return self.get_next()
        return batches.pad_batch(self.get_next(), self.batch_size + self.batch_padding_size)

    def reset(self) -> None:
        """Back to the first batch."""
        super().reset()
        self._move_to(0)

    def settle_reset_for_eval(self) -> None:
        """Sets `reset_for_eval` for a finite input; a subclass calls it when its `order` is known.

        Raises:
          UserError: it was set for an endless input.
        """
        if self.endless and self.reset_for_eval:
            raise self.error("reset_for_eval is set, but this input never ends; unset it, or make the input finite")
        self.reset_for_eval: bool = not self.endless

    def error(self, message: str) -> UserError:
        """A UserError that says which input is meant."""
        return UserError(f"{type(self).__name__} {self.name!r}: {message}")

    def require_positive(self, field: str) -> None:
        """Refuses a count that is not a whole number of 1 or more.

        Raises:
          UserError: naming the input, the field and its value.
        """
        value = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise self.error(f"{field}={value!r}; set it to a whole number, 1 or more")

    def _iterate(self, start: int) -> Iterator[NestedMap]:
        return map(self.batch_at, itertools.count(start))

    def _move_to(self, place: int) -> None:
        """The next batch begins at `place`."""
        self._position, self._origin = divmod(place, self.global_batch_size)
        self._iterator = None

    def _fingerprint(self) -> dict[str, Any]:
        """What the batches depend on besides the position, as JSON values: a position is valid only with the same."""
        order = self.order
        return {"num_examples": order.num_examples, "shuffle": order.shuffle, "seed": order.seed}

    def _sizes_behind_checksums(self) -> dict[str, str]:
        """What an error tells in place of a checksum of `_fingerprint`, by its key, e.g. {'files': '3 files of 900 bytes'}."""
        return {}

    def _get_state_internal(self) -> bytes:
        state: dict[str, Any] = {
            "places_taken": self._origin + self._position * self.global_batch_size,
            "data": self._fingerprint(),
        }
        sizes = self._sizes_behind_checksums()
        if sizes:
            state["sizes"] = sizes  # not compared: positions that were saved without them are valid
        return json.dumps(state, sort_keys=True).encode()

    def _set_state_internal(self, state: bytes) -> None:
        try:
            saved = json.loads(state)
            taken, data, sizes = int(saved["places_taken"]), dict(saved["data"]), dict(saved.get("sizes", {}))
        except (ValueError, KeyError, TypeError) as error:
            raise self.error(f"this is no saved position of such an input: {state[:80]!r}") from error
        now = self._fingerprint()
        changed = [key for key in sorted({*data, *now}) if data.get(key) != now.get(key)]
        if changed:
            sizes_now = self._sizes_behind_checksums()
            what = ", ".join(
                _changed_size(key, sizes.get(key), sizes_now[key])
                if key in sizes_now
                else f"{key} was {data.get(key)} and is {now.get(key)}"
                for key in changed
            )
            raise self.error(
                f"the saved position belongs to other batches: {what}. Put these back as they were, or start the input "
                "from its beginning with task.train.enable_input_checkpointing=False"
            )
        self._move_to(taken)


def _changed_size(key: str, before: str | None, now: str) -> str:
    """Says that the data behind a checksum changed; `before` is None for positions that were saved without sizes."""
    if before is None:
        return f"the {key} have changed: now {now}"
    if before == now:
        return f"the {key} have changed: still {now}, but in another order or of other sizes"
    return f"the {key} have changed: {before}, now {now}"
