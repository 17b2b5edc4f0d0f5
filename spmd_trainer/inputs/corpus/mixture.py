"""Mixes several sources of documents by weight.

The mixture's total is the number of tokens or documents that all its sources have given. A source should always have given its
share of this total. The total at which this share equals what the source has given so far is the source's *due time*. The next
document comes from the source with the earliest due time. For a constant share, the due time is amount / share, where amount is
what the source has given. For a share that changes at given totals, it is a piecewise linear function of the amount. So a saved
position needs only the amounts, and after each change every source stays within one document of its share.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from spmd_trainer.errors import UserError, require_one_of
from spmd_trainer.inputs.corpus import order
from spmd_trainer.inputs.corpus.documents import MAX_RECORD_BYTES, Documents
from spmd_trainer.inputs.corpus.file_source import FileSource
from spmd_trainer.inputs.corpus.open_source import open_documents

TOKENS, DOCUMENTS = "tokens", "documents"
TOTALS, STEPS = "totals", "steps"
REPEAT, DROP, STOP = "repeat", "drop", "stop"
# Name of the only source of an input without a mixture.
ONLY = "documents"


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Sources of documents, each with a weight.

    The next document always comes from the source that is furthest behind its share. So every share is exact to within one
    document at any time, for any seed.

    Attributes:
      sources: {name: (Documents, weight)} with weights above 0; or {name: Documents} without weights: the weight of each source
        is then its size, in bytes if `weigh_by` is 'tokens', otherwise in documents. A weight may change, and be 0 for a time:
        {0: 0.7, 10**9: 0.2} is 0.7 at first, and 0.2 once all sources together have given 10**9 tokens (see `change_by`). In
        this total, a source that has ended counts as if it still gave its share.
      weigh_by: unit in which shares are measured, 'tokens' or 'documents'.
      change_by: unit of the keys of a changing weight. 'totals': tokens or documents (see `weigh_by`) that the mixture has
        given. 'steps': training steps. A weight with the key s then applies to documents packed after the rows of s batches,
        and a saved position is valid only for the same number of rows per global batch.
      temperature: shares are proportional to weight ** (1 / temperature). Temperatures above 1 make the shares more equal.
      stopping_strategy: 'repeat': sources never end in training. 'drop': when a source ends, the mixture continues with the
        others. 'stop': the mixture ends when a source ends. With 'drop' and 'stop', and always in evaluation, a source ends
        after its `epochs`, one by default. In evaluation, 'repeat' acts as 'drop'.
    """

    sources: Mapping[str, Any]
    weigh_by: str = TOKENS
    change_by: str = TOTALS
    temperature: float = 1.0
    stopping_strategy: str = REPEAT

    def __post_init__(self) -> None:
        require_one_of("Mixture has weigh_by", self.weigh_by, (TOKENS, DOCUMENTS))
        require_one_of("Mixture has change_by", self.change_by, (TOTALS, STEPS))
        require_one_of("Mixture has stopping_strategy", self.stopping_strategy, (REPEAT, DROP, STOP))
        if not _is_positive(self.temperature):
            raise UserError(f"Mixture has temperature={self.temperature!r}; set it to a number above 0, e.g. 1.0")
        if not isinstance(self.sources, Mapping) or not self.sources:
            raise UserError("Mixture has no sources; give {name: (Documents, weight), ...}")


@dataclasses.dataclass(frozen=True)
class ChangingShare:
    """A source's share of the mixture, if it changes during training.

    Attributes:
      begins: for each share, the mixture's total or the training step at which the share begins to apply; ascending from 0.
      shares: the shares, 0 to 1.
      change_by: unit of `begins`, see `Mixture.change_by`.
    """

    begins: tuple[int, ...]
    shares: tuple[float, ...]
    change_by: str = TOTALS

    def so_far(self, begins: Sequence[int]) -> ChangingShare:
        """Returns this share with totals of the mixture in place of training steps, without changes that are yet to come.

        `begins`: the mixture's total at each change so far, but not at step 0. Ignored if `change_by` is 'totals'.
        """
        if self.change_by == TOTALS:
            return self
        return ChangingShare((0, *begins), self.shares[: 1 + len(begins)])

    @functools.cached_property
    def targets(self) -> tuple[float, ...]:
        """For each of `begins`, the number of tokens or documents that the source should have given by then."""
        phases = zip(itertools.pairwise(self.begins), self.shares[:-1], strict=True)
        return tuple(itertools.accumulate((share * (end - begin) for (begin, end), share in phases), initial=0.0))


Share = float | ChangingShare
T = TypeVar("T")


def holding(values: Mapping[int, T], place: int) -> T:
    """Returns the value in effect at `place`, e.g. a row number. `values`: {place at which a value begins to apply: value}."""
    return values[max(begin for begin in values if begin <= place)]


def steps_of(share: Share) -> tuple[int, ...]:
    """Returns 0 and the training steps at which the share changes; () for a share that doesn't change at training steps."""
    return share.begins if isinstance(share, ChangingShare) and share.change_by == STEPS else ()


def due_time(taken: int, share: Share) -> float:
    """Returns the due time (see the module) of a source that has this share and has given the amount `taken`; inf: never."""
    if not isinstance(share, ChangingShare):
        return taken / share
    # The last of equal targets: a source whose share is 0 for a time waits until that time is over.
    phase = bisect.bisect_right(share.targets, taken) - 1
    above = taken - share.targets[phase]
    return share.begins[phase] + above / share.shares[phase] if share.shares[phase] else math.inf


@dataclasses.dataclass(frozen=True)
class OpenSource:
    """An opened source of an input.

    Attributes:
      name: the source's name in the mixture.
      documents: the source as the user described it.
      source: the object that reads the documents.
      share: the source's fraction of the mixture. At any time, the shares of all sources sum to 1.
      shuffle: 'global', 'auto', the number of documents per window, or None for documents in order.
      epochs: number of epochs after which the source ends; None: never.
    """

    name: str
    documents: Documents
    source: FileSource
    share: Share
    shuffle: str | int | None
    epochs: int | None

    @property
    def first_share(self) -> float:
        return self.share.shares[0] if isinstance(self.share, ChangingShare) else self.share

    @property
    def made_by(self) -> dict[str, Any]:
        """The settings that determine a record's tokens, except the tokenizer, as JSON values."""
        most, processor = self.documents.max_record_bytes, self.documents.processor
        # Left out at its default, so that positions that were saved before stay valid.
        limit = {} if most == MAX_RECORD_BYTES else {"max_record_bytes": most}
        return {**limit, **({} if processor is None else processor.fingerprint())}

    def settings(self) -> dict[str, Any]:
        """Returns the settings that determine the source's documents and their order, as JSON values."""
        named = {"column": self.documents.column, "separator": self.documents.separator}
        share: Any = self.share
        if isinstance(share, ChangingShare):
            phases = [list(phase) for phase in zip(share.begins, share.shares, strict=True)]
            share = phases if share.change_by == TOTALS else {share.change_by: phases}
        return {**named, **self.made_by, "share": share, "shuffle": self.shuffle, "epochs": self.epochs}


def as_mixture(given: Any, *, is_training: bool) -> Mixture:
    """Converts an input's `source` field to a mixture. `Documents` become a mixture with one source.

    Raises:
      UserError: `given` is neither `Documents` nor a `Mixture`.
    """
    if isinstance(given, Mixture):
        return given
    if not isinstance(given, Documents):
        raise UserError(
            f"source={given!r}; give Documents('corpus/*.jsonl') or Mixture({{'web': (Documents(...), 0.7), ...}})"
        )
    repeats = is_training and given.epochs is None
    return Mixture({ONLY: (given, 1.0)}, stopping_strategy=REPEAT if repeats else DROP)


def open_mixture(
    mixture: Mixture,
    *,
    is_training: bool,
    shuffle: bool,
    open_one: Callable[[Documents], FileSource] = open_documents,
    bound: Callable[[Documents], Documents] = lambda documents: documents,
) -> list[OpenSource]:
    """Opens all sources of a mixture.

    Args:
      mixture: the mixture.
      is_training: if False, every source ends after its `epochs`, one by default.
      shuffle: if False, the documents of every source stay in order.
      open_one: opens a source.
      bound: called with each source's `Documents`; returns them with their processor set up for the input.

    Raises:
      UserError: a source can't be opened, lacks a weight although others have one, can't be shuffled as requested, or has
        `epochs` although it never ends (the message names the source); or all weights are 0 at some time.
    """
    given = {name: _entry(name, one) for name, one in mixture.sources.items()}
    entries = {name: (_named(name, mixture, bound, one), weight) for name, (one, weight) in given.items()}
    opened = {name: _named(name, mixture, open_one, documents) for name, (documents, _) in entries.items()}
    weights = _weights(mixture, {name: weight for name, (_, weight) in entries.items()}, opened)
    shares = _shares_of_phases(dict(zip(entries, weights, strict=True)), mixture)
    endless = is_training and mixture.stopping_strategy == REPEAT
    found = []
    for (name, (documents, _)), share in zip(entries.items(), shares, strict=True):
        wanted = documents.shuffle if shuffle else None
        resolved = _named(name, mixture, order.resolve_shuffle, opened[name], wanted)
        epochs = _epochs(name, documents, endless=endless)
        found.append(OpenSource(name, documents, opened[name], share, resolved, epochs))
    return found


class Schedule:
    """Chooses the source of the next document: the source with the earliest due time. Ties go to the first source."""

    def __init__(self, shares: Sequence[Share], taken: Sequence[int]):
        """Starts the schedule. `taken`: number of tokens or documents that each source has already given."""
        self._shares = shares
        self._ahead = [
            (due_time(count, share), index) for index, (count, share) in enumerate(zip(taken, shares, strict=True))
        ]
        heapq.heapify(self._ahead)

    @property
    def total(self) -> int | None:
        """The mixture's total at which the next document is due, as if ended sources continued. None if no document is due."""
        return int(self._ahead[0][0]) if self._ahead and math.isfinite(self._ahead[0][0]) else None

    @property
    def source(self) -> int | None:
        """Index of the source to read next; None if all have ended."""
        return self._ahead[0][1] if self._ahead else None

    def advance(self, taken: int) -> None:
        """Records that the current source has now given `taken` tokens or documents in total."""
        index = self._ahead[0][1]
        heapq.heapreplace(self._ahead, (due_time(taken, self._shares[index]), index))

    def drop(self) -> None:
        """Removes the current source."""
        heapq.heappop(self._ahead)


# Weights of a source, by the totals or steps from which they apply.
_Weights = dict[int, float]


def _entry(name: str, given: Any) -> tuple[Documents, _Weights | None]:
    pair = (given, None) if isinstance(given, Documents) else given
    if not isinstance(name, str) or not name:
        raise UserError(f"Mixture has a source named {name!r}; name it with a text")
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], Documents):
        raise UserError(f"source {name!r} of the mixture is {given!r}; give (Documents(...), weight)")
    documents, weight = pair
    if isinstance(weight, Mapping):
        return documents, _changing(name, weight)
    if weight is not None and not _is_positive(weight):
        raise UserError(f"source {name!r} of the mixture has weight {weight!r}; give a number above 0, or leave it out")
    return documents, None if weight is None else {0: float(weight)}


def _changing(name: str, weights: Mapping[Any, Any]) -> _Weights:
    if not all(isinstance(begin, int) and not isinstance(begin, bool) and begin >= 0 for begin in weights):
        raise UserError(
            f"source {name!r} of the mixture has weights from {list(weights)!r} on; give totals or steps, whole numbers from 0 on"
        )
    if 0 not in weights:
        raise UserError(f"source {name!r} of the mixture has no weight at the beginning; give {{0: weight, ...}}")
    bad = [weight for weight in weights.values() if weight != 0 and not _is_positive(weight)]
    if bad or not any(weights.values()):
        wrong = f"weight {bad[0]!r}" if bad else "no weight above 0"
        raise UserError(f"source {name!r} of the mixture has {wrong}; give numbers of 0 or more, one of them above 0")
    return {begin: float(weights[begin]) for begin in sorted(weights)}


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0


def _named(name: str, mixture: Mixture, call: Any, *args: Any) -> Any:
    """Returns `call(*args)`. If it raises UserError, adds the source's name to the message, unless there is only one source."""
    try:
        return call(*args)
    except UserError as error:
        if len(mixture.sources) == 1:
            raise
        raise UserError(f"source {name!r} of the mixture: {error}") from error


def _weights(
    mixture: Mixture, given: Mapping[str, _Weights | None], opened: Mapping[str, FileSource]
) -> list[_Weights]:
    missing = [name for name, weight in given.items() if weight is None]
    if not missing:
        return [weight for weight in given.values() if weight is not None]
    if len(missing) < len(given):
        raise UserError(
            f"source {missing[0]!r} of the mixture has no weight and others have one; give all a weight, or none"
        )
    weights = []
    for name, source in opened.items():
        sizes = source.chunk_sizes() if mixture.weigh_by == DOCUMENTS else None
        size = source.num_bytes if mixture.weigh_by == TOKENS else None if sizes is None else int(sizes.sum())
        if not size:
            raise UserError(
                f"source {name!r} of the mixture has no weight, and how many documents it has ({source.size_text}) is not known "
                "before it is read; give every source a weight"
            )
        weights.append({0: float(size)})
    return weights


def _shares_of_phases(weights: Mapping[str, _Weights], mixture: Mixture) -> list[Share]:
    """Returns each source's share over time. Raises UserError if a weight is too small, or all weights are 0 at some time."""
    begins = sorted({begin for of_source in weights.values() for begin in of_source})
    phases: list[list[float]] = []
    for begin in begins:
        now = [holding(of_source, begin) for of_source in weights.values()]
        if not any(now):
            raise UserError(f"no source of the mixture has a weight above 0 from {begin:,} on; give one at every time")
        phases.append(_shares(now, mixture.temperature))
        for name, weight, share in zip(weights, now, phases[-1], strict=True):
            if weight and not share:
                raise UserError(
                    f"source {name!r} of the mixture has a share of 0: its weight is too small "
                    f"beside the others, or temperature={mixture.temperature:g} is too low"
                )
    if len(begins) == 1:
        return list(phases[0])
    return [ChangingShare(tuple(begins), shares, mixture.change_by) for shares in zip(*phases, strict=True)]


def _shares(weights: Sequence[float], temperature: float) -> list[float]:
    tempered = [(weight / max(weights)) ** (1 / temperature) for weight in weights]
    # Rounded to 12 digits: the last bits of a power depend on the machine, and all processes must agree.
    return [float(f"{weight / math.fsum(tempered):.12g}") for weight in tempered]


def _epochs(name: str, documents: Documents, *, endless: bool) -> int | None:
    epochs = documents.epochs
    if epochs is None:
        return None if endless else 1
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 1:
        raise UserError(f"source {name!r} has epochs={epochs!r}; set it to a whole number, 1 or more, or to None")
    if endless:
        raise UserError(
            f"source {name!r} of the mixture has epochs={epochs}, and with stopping_strategy='repeat' no source ends; set "
            "stopping_strategy to 'drop' or 'stop', or leave out epochs"
        )
    return epochs
