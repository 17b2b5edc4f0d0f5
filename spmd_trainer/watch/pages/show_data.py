"""`--mode=data`: prints the first rows of each dataset, and colors the labels that count in the loss."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from absl import logging
from praxis import pax_fiddle

from spmd_trainer.errors import UserError, terminal
from spmd_trainer.inputs.corpus.corpus_input import CorpusInput
from spmd_trainer.inputs.huggingface_tokenizer import HuggingFaceTokenizer
from spmd_trainer.sharding.messages import count_text, table_lines
from spmd_trainer.storage import files
from spmd_trainer.training import reference_files
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import RunConfig
from spmd_trainer.training.run_directory import report_directory
from spmd_trainer.watch.pages import corpus_summary

# Number of rows that are shown of each dataset, and maximum number of characters of a row's text.
_ROWS, _CHARACTERS = 4, 8000
# Maximum number of tokens in a batch: larger batches are refused.
_MOST_TOKENS = 2**25
_COUNTED, _HEADING, _PLAIN = "\x1b[30;42m", "\x1b[1m", "\x1b[0m"
_BRACKETS = ("\u27e6", "\u27e7")
_TOKEN_ARRAYS = ("ids", "labels", "weights")


@dataclasses.dataclass(frozen=True)
class _Row:
    """One row of a language-model batch. Each field is an array [tokens]."""

    ids: np.ndarray
    labels: np.ndarray
    weights: np.ndarray
    segments: np.ndarray

    @property
    def size(self) -> int:
        """Number of labels that aren't padding."""
        return int(np.count_nonzero(self.segments))

    @property
    def num_counted(self) -> int:
        """Number of labels that count in the loss."""
        return int(np.count_nonzero(self.weights))

    @property
    def lengths(self) -> list[int]:
        """Number of labels in each segment."""
        return [int(np.count_nonzero(self.segments == number)) for number in range(1, int(self.segments.max()) + 1)]


class Style:
    """Marks labels that count in the loss, and headings. Makes control characters of the text visible instead of active."""

    def __init__(self, *, colours: bool):
        """Uses terminal colors as marks if `colours` is True, otherwise brackets."""
        self._counted = (_COUNTED, _PLAIN) if colours else _BRACKETS
        self._heading = (_HEADING, _PLAIN) if colours else ("", "")

    def counted(self, text: str) -> str:
        """Returns `text` with the mark of labels that count in the loss."""
        return terminal.visible(text).join(self._counted)

    def heading(self, text: str) -> str:
        return terminal.visible(text).join(self._heading)


def build_job(config: RunConfig) -> Job:
    """Builds the job. Before that, rejects datasets whose batches are too large to be shown.

    Raises:
      UserError: a batch is too large to be shown; see also `Job.build`.
    """
    for input_p in _datasets(config):
        _refuse_large(input_p)
    return Job.build(config)


def show_data(job: Job) -> None:
    """Prints the first rows of the job's training and evaluation datasets. Only process 0 prints, and only its own rows.

    If the job has a directory for reports, also writes the measurements of its corpora to `data.html`.

    Raises:
      UserError: the experiment has no datasets, or one can't be read.
    """
    datasets = _datasets(job.config)
    if not datasets:
        raise UserError(
            f"experiment {job.config.experiment.label} has no datasets to show; return some from datasets()"
        )
    measured: dict[str, corpus_summary.CorpusSummary] = {}
    shown: dict[str, str] = {}
    style = Style(colours=sys.stdout.isatty() and not os.environ.get("NO_COLOR"))
    for input_p in datasets:
        source = reference_files.attach_zeros(job.build_input(input_p))
        if isinstance(source, CorpusInput):
            measured[source.name] = corpus_summary.measure(source)
        text = "\n".join(describe(source, style, measured.get(source.name)))
        if jax.process_index() == 0:
            terminal.write(f"{text}\n\n", styled=True)
        if source.name in measured:
            source.reset()
            shown[source.name] = "\n".join(list(describe(source, Style(colours=False)))[1:])
    if measured and job.config.writes_reports and jax.process_index() == 0:
        path = report_directory(job.config.job_log_dir) / corpus_summary.FILE
        files.write_atomically(path, corpus_summary.data_page(job.config.experiment.name, measured, shown).split("\n"))
        logging.info("wrote %s", path)


def _datasets(config: RunConfig) -> list[Any]:
    experiment = config.experiment.config
    return [*experiment.train_datasets, *experiment.eval_datasets]


def _refuse_large(input_p: Any) -> None:
    """Raises UserError if a dataset's batches are so large that reading one could take minutes or exhaust the memory."""
    # An experiment may give a config that computes the rows.
    rows = pax_fiddle.build(getattr(input_p, "batch_size", None))
    width = getattr(input_p, "seq_len", None) or getattr(input_p, "prefix_len", None) or 1
    if isinstance(rows, int) and isinstance(width, int) and rows * width > _MOST_TOKENS:
        raise UserError(
            f"dataset {getattr(input_p, 'name', '')} has batches of {rows:,} rows of {width:,} tokens, and --mode=data shows "
            f"batches of up to {_MOST_TOKENS:,} tokens; give a smaller batch_size or seq_len"
        )


def describe(source: Any, style: Style, measured: corpus_summary.CorpusSummary | None = None) -> Iterator[str]:
    """Yields the lines that show an input: a summary, a table of its first rows, and their text.

    Args:
      source: a built input. Its next batch is taken.
      style: how to mark labels that count in the loss.
      measured: the measurements of a corpus; None for other inputs.
    """
    try:
        batch = source.get_next()
    except StopIteration:
        raise UserError(f"dataset {source.name} is empty; give it at least one example") from None
    yield style.heading(f"{source.name}: {type(source).__name__}")
    if measured is not None:
        yield from map(terminal.visible, corpus_summary.lines(measured))
    rows = list(_rows(batch))
    if not rows:
        yield "a batch:"
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            name = terminal.visible(jax.tree_util.keystr(path, simple=True, separator="/"))
            yield f"  {name}: {leaf.dtype} {list(leaf.shape)}"
        return
    yield from _table(rows)
    for number, row in enumerate(rows):
        yield ""
        yield style.heading(f"row {number}")
        yield from _texts(row, source, style)


def _rows(batch: Any) -> Iterator[_Row]:
    """Yields the first rows of a language-model batch, or of a preference batch's answers. Yields nothing for other batches."""
    if "chosen" in batch and "rejected" in batch:
        for answer in ("chosen", "rejected"):
            yield from _rows(batch[answer])
        return
    if not all(name in batch and np.ndim(batch[name]) == 2 for name in _TOKEN_ARRAYS):
        return
    arrays = [np.asarray(batch[name])[:_ROWS] for name in _TOKEN_ARRAYS]
    whole = np.asarray(batch.get("paddings", np.zeros_like(arrays[2])))[:_ROWS] < 0.5
    segments = np.asarray(batch.get("segment_ids", whole))[:_ROWS] * whole
    for ids, labels, weights, numbers in zip(*arrays, segments.astype(np.int32), strict=True):
        if numbers.any():  # the last batch of an evaluation is filled up with empty rows
            yield _Row(ids, labels, weights, numbers)


def _table(rows: list[_Row]) -> list[str]:
    columns = ("row", "labels", "count", "share", "padding", "segments", "lengths")
    cells = [
        (
            str(number),
            str(row.size),
            str(row.num_counted),
            _percent(row.num_counted, row.size),
            _percent(len(row.ids) - row.size, len(row.ids)),
            str(len(row.lengths)),
            " ".join(map(str, row.lengths)),
        )
        for number, row in enumerate(rows)
    ]
    return table_lines([columns, *cells], right=range(len(columns) - 1))


def _texts(row: _Row, source: Any, style: Style) -> Iterator[str]:
    """Yields lines with the text of each segment of a row, up to `_CHARACTERS` characters in all."""
    left = _CHARACTERS
    for number, length in enumerate(row.lengths, 1):
        if left <= 0:
            yield f"({count_text(len(row.lengths) - number + 1, 'more segment')})"
            return
        here = row.segments == number
        counted = row.weights[here] > 0
        yield f"segment {number}: {length} labels, {np.count_nonzero(counted)} count"
        parts = []
        for text, counts in _parts(source, row.ids[here], row.labels[here], counted):
            shown = text[: max(left, 0)]
            left -= len(text)
            parts.append(style.counted(shown) if counts and shown else terminal.visible(shown))
        yield "".join(parts) + (f"... ({-left:,} more characters)" if left < 0 else "")


def _parts(source: Any, ids: np.ndarray, labels: np.ndarray, counted: np.ndarray) -> Iterator[tuple[str, bool]]:
    """Divides a segment's first id and labels into runs that do or don't count in the loss. Yields (text, True if it counts)."""
    tokens = np.append(ids[:1], labels)
    counts = np.append(False, counted)
    ends = [*np.flatnonzero(counts[1:] != counts[:-1]) + 1, len(tokens)]
    done, before = "", 0
    for end in ends:
        # Decoders treat the beginning of a text differently: decode all of it, and leave out what was shown.
        text = _spell(source, tokens[:end])
        same = next(
            (at for at, (a, b) in enumerate(zip(done, text, strict=False)) if a != b), min(len(done), len(text))
        )
        yield text[same:], bool(counts[before])
        done, before = text, int(end)


def _spell(source: Any, tokens: np.ndarray) -> str:
    tokenizer = getattr(source, "tokenizer", None)
    if isinstance(tokenizer, HuggingFaceTokenizer):
        return tokenizer.spell(tokens)
    if hasattr(source, "ids_to_strings"):
        (text,) = source.ids_to_strings(tokens[None], [len(tokens)])
        return str(text)
    return "".join(f"{token} " for token in tokens)


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"
