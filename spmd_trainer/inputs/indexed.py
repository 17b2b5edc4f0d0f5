"""Inputs whose batch n is a pure function of n, so that the position in the data is a single integer.

An *example* is one row of a batch. All processes share one global *order* of examples. Global batch n holds the
examples at indices [n * G, (n + 1) * G) of the order, where G = batch_size * num_infeed_hosts; process h takes the
rows [h * batch_size, (h + 1) * batch_size) of the global batch. If G stays the same, a global batch therefore holds the
same examples with any number of processes. The *position* is the number of global batches taken so far. A checkpoint
stores the next example's index in the order, so an input can be restored with a different G: the next batch of the
restored input begins at that index.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from praxis import base_input
from praxis.py_utils import NestedMap

from spmd_trainer.errors import UserError, first_paragraph
from spmd_trainer.inputs import batches, permutations
from spmd_trainer.sharding.messages import shortened

_INT32_MAX = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class ExampleOrder:
    """The order in which all processes together read the examples of a set.

    Attributes:
      num_examples: number of examples in the set. None for an infinite set, whose example i is at index i of the order.
      endless: True repeats the set endlessly; False gives each example once.
      shuffle: True makes each epoch of an endless order a different permutation, drawn from (seed, epoch). Permutations of
        more than `permutations.STORED_SIZE` examples (16.8 million) are computed on demand.
      seed: seed of the permutations, 0 or more.
    """

    num_examples: int | None
    endless: bool = True
    shuffle: bool = False
    seed: int = 0

    def examples(self, first: int, count: int) -> np.ndarray:
        """Returns the examples at indices [first, first + count) of the order, as indices in the unshuffled set, int64 [count].

        After the end of a finite order, returns `num_examples` for each index.
        """
        indices = np.arange(first, first + count, dtype=np.int64)
        if self.num_examples is None:
            return indices
        if not self.endless:
            return np.minimum(indices, self.num_examples)
        epochs, within = np.divmod(indices, self.num_examples)
        if not self.shuffle:
            return within
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            here = epochs == epoch
            within[here] = permutations.permute(within[here], self.num_examples, self.seed, epoch)
        return within

    def fingerprint(self) -> dict[str, Any]:
        """Returns all settings on which the order depends, as JSON values."""
        found: dict[str, Any] = {"num_examples": self.num_examples, "shuffle": self.shuffle, "seed": self.seed}
        if self.shuffle and (self.num_examples or 0) > permutations.STORED_SIZE:
            # Earlier versions stored these permutations, in another order. Positions that they saved are refused.
            found["permutation"] = "feistel"
        return found


class CheckpointedInput(base_input.BaseInput):
    """Base class of all inputs: pads batches, names the input in errors, and refuses positions saved with other settings."""

    # True for preference pairs whose reference's log-probabilities the trainer can provide; see `PreferenceInput`.
    takes_reference: ClassVar[bool] = False

    def limit_vocabulary(self, model_vocab_size: int) -> None:
        """Called with the model's vocabulary size before the first batch. Inputs of text reject larger tokens from then on."""

    def error(self, message: str) -> UserError:
        """Returns a UserError whose message names this input."""
        return UserError(f"{type(self).__name__} {self.name!r}: {message}")

    @contextlib.contextmanager
    def naming(self, where: str = "") -> Iterator[None]:
        """Context manager that puts this input's name and `where` before the message of a UserError raised in its body.

        If the body raises UnicodeEncodeError, because UTF-8 can't encode a text, it also becomes a UserError.
        """
        try:
            yield
        except UnicodeEncodeError as error:
            if error.encoding != "utf-8":  # raised by the user's own code
                raise
            raise self.error(f"{where}the text has half of a surrogate pair: {error}") from error
        except UserError as error:
            raise self.error(f"{where}{first_paragraph(error)}") from error

    def get_next_padded(self) -> NestedMap:
        """Returns the next batch, with `batch_padding_size` rows of weight 0 appended (see `batches.pad_batch`)."""
        if self._peek is not None or not self.batch_padding_size:
            return super().get_next_padded()
        return batches.pad_batch(self.get_next(), self.batch_size + self.batch_padding_size)

    def _fingerprint(self) -> dict[str, Any]:
        """Returns all settings and data checksums on which the batches depend, as JSON values. Excludes the position."""
        raise NotImplementedError

    def _encode_position(self, *position: int) -> bytes:
        return json.dumps({"position": position, "data": self._fingerprint()}, sort_keys=True).encode()

    def _decode_position(self, state: bytes, count: int) -> list[int]:
        """Returns the `count` integers of a saved position. Raises UserError if they were saved with other settings."""
        try:
            saved = json.loads(state)
            position, data = [int(number) for number in saved["position"]], dict(saved["data"])
            if len(position) != count:
                raise ValueError(f"{len(position)} numbers")
        except (ValueError, KeyError, TypeError) as cause:
            raise self._not_a_position(state) from cause
        self._refuse_other_settings(data)
        return position

    def _refuse_other_settings(self, saved: Mapping[str, Any], texts: Mapping[str, str] | None = None) -> None:
        """Raises UserError if `_fingerprint()` differs from a saved fingerprint.

        `texts` is {key of the fingerprint: message to show if the values differ}, for keys whose values are checksums.
        """
        now, texts = self._fingerprint(), texts or {}
        changed = [key for key in sorted({*saved, *now}) if saved.get(key) != now.get(key)]
        if changed:
            raise self._other_batches(
                [texts.get(key, f"{key} was {saved.get(key)} and is {now.get(key)}") for key in changed]
            )

    def _not_a_position(self, state: bytes) -> UserError:
        return self.error(f"this is not a saved position of this input: {state[:80]!r}")

    def _other_batches(self, changes: Sequence[str]) -> UserError:
        return self.error(
            f"the saved position belongs to other batches: {'; '.join(changes)}. Put these back as they were, or start "
            "the input from its beginning with task.train.enable_input_checkpointing=False"
        )


class IndexedInput(CheckpointedInput):
    """Base class of inputs whose batch n is a pure function of n and of the settings.

    A subclass implements `order`, `input_specs` and `batch_at`, and may override `_iterate` with a faster pipeline.
    Training inputs are endless. An evaluation input over a finite set gives each example exactly once, fills up the last
    batch with rows of weight 0, and then raises StopIteration until `reset()` is called. It sets praxis' `reset_for_eval`.
    All processes have the same number of batches.
    """

    # The saved position is valid for all processes; see `Prefetcher.state_is_shared`.
    state_is_shared: ClassVar[bool] = True

    # Index in the order where batch 0 begins, and number of batches taken since then.
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
        """Global order of examples, the same in every process."""
        raise NotImplementedError

    @property
    def endless(self) -> bool:
        """True if the order of examples never ends. Subclasses override it if computing `order` is expensive."""
        return self.order.endless

    def input_specs(self) -> NestedMap:
        """Returns the shapes and dtypes of one process's batch, without padding rows, as ShapeDtypeStruct. Reads no data."""
        raise NotImplementedError

    def batch_at(self, position: int) -> NestedMap:
        """Returns this process's rows of global batch `position`: numpy arrays that match `input_specs`."""
        raise NotImplementedError

    @property
    def takes_any_batch_size(self) -> bool:
        """True if a saved position stays valid when the batch size changes. The next example is then the same."""
        return True

    @property
    def seed(self) -> int:
        """`input_random_seed`, or 0 if it is not set."""
        return self.input_random_seed or 0

    @property
    def global_batch_size(self) -> int:
        """Number of rows of one global batch: the rows of all processes."""
        return self.batch_size * self.num_infeed_hosts

    @property
    def num_batches(self) -> int | None:
        """Number of batches until StopIteration, the same in every process; None for an endless input."""
        if self.endless:
            return None
        order = self.order
        if order.num_examples is None:
            return None
        return -(-(order.num_examples - self._origin) // self.global_batch_size)

    def first_index(self, position: int) -> int:
        """Returns the index, in the order of examples, at which this process's rows of global batch `position` begin."""
        return self._origin + position * self.global_batch_size + self.infeed_host_index * self.batch_size

    def examples_at(self, position: int) -> np.ndarray:
        """Returns the numbers of the examples in this process's rows of global batch `position`, int64 [batch_size].

        Rows after the end of a finite order get the number `order.num_examples`.
        """
        return self.order.examples(self.first_index(position), self.batch_size)

    def get_next(self) -> NestedMap:
        """Returns the next batch and advances the position. After the last batch, raises StopIteration until `reset()`."""
        if self.num_batches is not None and self._position >= self.num_batches:
            raise StopIteration
        if self._iterator is None:
            self._iterator = self._iterate(self._position)
        try:
            batch = next(self._iterator)
        except Exception:
            self._iterator = None  # a generator that raised would raise StopIteration at the next call
            raise
        self._position += 1
        return batch

    def reset(self) -> None:
        """Goes back to the first batch."""
        super().reset()
        self._move_to(0)

    def settle_reset_for_eval(self) -> None:
        """Sets `reset_for_eval` to True only for a finite input. Raises UserError if the user has set it for an endless one."""
        if self.endless and self.reset_for_eval:
            raise self.error("reset_for_eval is set, but this input never ends; unset it, or make the input finite")
        self.reset_for_eval: bool = not self.endless

    def require_positive(self, field: str) -> None:
        """Raises UserError unless field `field` is an integer from 1 to 2**31 - 1, so that positions fit in int32."""
        value = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
            raise self.error(f"{field}={value!r}; set it to a whole number, 1 or more")
        if value > _INT32_MAX:
            raise self.error(
                f"{field}={shortened(str(value), 40)}; the largest is {_INT32_MAX:,}, because positions are int32"
            )

    def _iterate(self, start: int) -> Iterator[NestedMap]:
        return map(self.batch_at, itertools.count(start))

    def _move_to(self, index: int) -> None:
        self._position, self._origin = divmod(index, self.global_batch_size)
        self._iterator = None

    def _fingerprint(self) -> dict[str, Any]:
        return self.order.fingerprint()

    def _sizes_behind_checksums(self) -> dict[str, str]:
        """Returns {key: data size, e.g. '3 files of 900 bytes'} for each checksum in `_fingerprint()`. Errors show the size."""
        return {}

    def _get_state_internal(self) -> bytes:
        state: dict[str, Any] = {
            "places_taken": self._origin + self._position * self.global_batch_size,
            "data": self._fingerprint(),
        }
        sizes = self._sizes_behind_checksums()
        if sizes:
            state["sizes"] = sizes  # for messages only: not compared
        return json.dumps(state, sort_keys=True).encode()

    def _set_state_internal(self, state: bytes) -> None:
        try:
            saved = json.loads(state)
            taken, data, sizes = int(saved["places_taken"]), dict(saved["data"]), dict(saved.get("sizes", {}))
        except (ValueError, KeyError, TypeError) as error:
            raise self._not_a_position(state) from error
        now = self._sizes_behind_checksums()
        self._refuse_other_settings(data, {key: _changed_size(key, sizes.get(key), now[key]) for key in now})
        self._move_to(taken)


def _changed_size(key: str, before: str | None, now: str) -> str:
    """Returns the message that the data `key` have changed from size `before` (None if unknown) to size `now`."""
    if before is None:
        return f"the {key} have changed: now {now}"
    if before == now:
        return f"the {key} have changed: still {now}, but in another order or of other sizes"
    return f"the {key} have changed: {before}, now {now}"
