"""Writes the outputs of a decode: a file with one JSON record per example, and log lines with some examples.

The records are saved batch by batch, so a decode that was killed can continue. The file itself appears only once it is complete.
`check_prompts` makes sure beforehand that no prompt is too long for the model to continue.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from absl import logging
from etils import epath
from praxis import decoder_hparams
from praxis.layers import embedding_softmax

from spmd_trainer.errors import UserError, terminal
from spmd_trainer.sharding.messages import count_text
from spmd_trainer.step.packing import WeightedMean
from spmd_trainer.storage import json_values
from spmd_trainer.storage.files import write_atomically
from spmd_trainer.training.live_status import SHOWN_LIVE, live

# The value of praxis' `logprobs` at positions where nothing was decoded; real log-probabilities are at most 0.
_NOT_DECODED = 1.0
# Longer texts are cut to this size in the log; the file has them in full.
_MOST_LINES = 24
_MOST_CHARACTERS = 2000
# Terminal colors.
_STYLES = {"prompt": "", "output": "bold green"}


def records(
    data: Any,
    outputs: Any,
    inputs: dict[str, np.ndarray],
    *,
    first: int,
    text_of: Callable[[np.ndarray], str] | None = None,
) -> Iterator[dict[str, Any]]:
    """Yields one record for each example whose weight is not 0.

    Args:
      data: the built input; its `ids_to_strings` converts ids to text.
      outputs: `per_example_out` of the model's decode, numpy arrays with the batch as dimension 0. praxis' language
        models return `output_ids` [batch, samples, length], the best sample first; other models' arrays are written by name.
      inputs: the batch's arrays among `ids`, `eval_sample_weights`, `prompt_index` and `prefix_lengths`.
      first: index of the batch's row 0 in the dataset.
      text_of: converts a sample's decoded ids [length] to text, e.g. to cut it at a stop string; None: `data` converts them.

    Yields:
      For a language model: `index`, `prompt`, the best sample's `output` and `score`, and the `outputs`, `scores` and `ids` of
      all samples. For other models: `index` and the arrays by name.
    """
    rows = len(jax.tree.leaves(outputs)[0])
    counts = inputs.get("eval_sample_weights", np.ones(rows))
    for row in np.flatnonzero(counts).tolist():
        index = int(inputs["prompt_index"][row]) if "prompt_index" in inputs else first + row
        if "output_ids" in outputs:
            yield {**_text_record(data, outputs, inputs, row, text_of), "index": index}
        else:
            yield {"index": index, **arrays_of_row(outputs, row)}


def arrays_of_row(outputs: Any, row: int) -> dict[str, Any]:
    """Returns {path: value or nested list} with one row of each per-example array in `outputs`."""
    leaves = jax.tree_util.tree_leaves_with_path(outputs)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): _json(leaf[row].tolist()) for path, leaf in leaves}


def may_be_too_long(task: Any, dataset: str, shapes: Any) -> bool:
    """Returns True if a prompt in a batch of these shapes could be too long for the model to continue.

    Raises:
      UserError: batches are wider than the longest sequence that the model decodes. The message names both sizes and the fix.
    """
    limit = _longest_prompt(task)
    if limit is None or "ids" not in shapes:
        return False
    width, seqlen = shapes["ids"].shape[1], task.model.decoder_tpl.seqlen
    if width > seqlen:
        raise UserError(
            f"decode dataset {dataset} has prompts of up to {width} tokens, more than task.model.decoder_tpl.seqlen="
            f"{seqlen}; shorten the prompts or raise seqlen"
        )
    return width > limit


def check_prompts(task: Any, dataset: str, batch: Any, first: int) -> None:
    """Checks that every prompt of a batch is short enough for the model to continue.

    Raises:
      UserError: a prompt is too long. The message names the prompt, its length, the limit and the fix.
    """
    limit = _longest_prompt(task)
    if limit is None:
        return
    lengths = np.asarray(batch["prefix_lengths"] if "prefix_lengths" in batch else (1 - batch["paddings"]).sum(-1))
    too_long = np.flatnonzero(lengths > limit)
    if len(too_long):
        row = int(too_long[0])
        index = int(batch["prompt_index"][row]) if "prompt_index" in batch else first + row
        raise UserError(
            f"prompt {index} of decode dataset {dataset} has {int(lengths[row])} tokens; {_limit_text(task, limit)}; "
            "shorten the prompt or raise the limit"
        )


def _longest_prompt(task: Any) -> int | None:
    """Returns the maximum prompt length, in tokens, with which the model can decode a token; None if there is no limit."""
    hparams = getattr(task.model, "decoder_tpl", None)
    length = getattr(hparams, "seqlen", 0)
    if hparams is None or not length:
        return None
    limits, positions = [length - 1], _positions(task)
    if _counts_prompts(hparams):
        limits.append(_most_steps(hparams))
    if positions is not None:
        limits.append(positions - _most_steps(hparams))
    return min(limits)


def _most_steps(hparams: Any) -> int:
    steps = hparams.max_decode_steps or 1
    return max(steps) if isinstance(steps, list | tuple) else int(steps)


def _counts_prompts(hparams: Any) -> bool:
    """Returns True if the prompt's tokens count towards `max_decode_steps`, because praxis' decode loop processes them too."""
    one_by_one = (decoder_hparams.GreedyDecoderHParams, decoder_hparams.SampleDecoderHParams)
    return isinstance(hparams, one_by_one) and not hparams.fprop_for_prefix and bool(hparams.max_decode_steps)


def _positions(task: Any) -> int | None:
    """Returns the number of positions of a model with learned position embeddings, or None for other models."""
    position_p = getattr(getattr(task.model, "lm_tpl", None), "position_emb_tpl", None)
    if position_p is None or not issubclass(position_p.cls, embedding_softmax.TrainablePositionalEmbedding):
        return None
    return position_p.max_seq_length


def _limit_text(task: Any, limit: int) -> str:
    hparams = task.model.decoder_tpl
    if limit == hparams.seqlen - 1:
        return f"task.model.decoder_tpl.seqlen={hparams.seqlen} allows {limit}"
    if _counts_prompts(hparams) and limit == _most_steps(hparams):
        return (
            f"task.model.decoder_tpl.max_decode_steps={hparams.max_decode_steps!r} counts the prompt's tokens too, unless "
            f"fprop_for_prefix is True, and allows {limit}"
        )
    return (
        f"task.model.lm_tpl.position_emb_tpl.max_seq_length={_positions(task)} minus {hparams.max_decode_steps} decode steps "
        f"allows {limit}"
    )


def _text_record(
    data: Any, outputs: Any, inputs: dict[str, np.ndarray], row: int, text_of: Callable[[np.ndarray], str] | None
) -> dict[str, Any]:
    prefix = int(np.atleast_1d(outputs["prefix_lengths"][row])[0])
    lengths = _lengths(outputs, row, prefix)
    pairs = zip(np.atleast_2d(outputs["output_ids"][row]), lengths, strict=True)
    samples = [sample[prefix:length] for sample, length in pairs]
    texts = _texts(data, samples) if text_of is None else [text_of(sample) for sample in samples]
    scores = _scores(outputs, row, prefix, lengths)
    return {
        "prompt": _texts(data, [inputs["ids"][row, :prefix]])[0],
        "output": texts[0],
        "outputs": texts,
        "score": scores[0],
        "scores": scores,
        "ids": [sample.tolist() for sample in samples],
    }


def _texts(data: Any, rows: list[np.ndarray]) -> list[str]:
    longest = max(1, max(len(row) for row in rows))
    padded = np.zeros((len(rows), longest), np.int32)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return list(data.ids_to_strings(padded, np.asarray([len(row) for row in rows], np.int32)))


def _lengths(outputs: Any, row: int, prefix: int) -> list[int]:
    """Returns the length, in tokens, of each of a row's samples, including the prompt, whose length is `prefix`.

    If praxis' decode loop ends before a sample does, which is possible without `fprop_for_prefix`, praxis sets the sample's
    `decode_lengths` to `seqlen`. Therefore the length is read from `logprobs`, which show how many positions were decoded.
    """
    lengths = [int(length) for length in np.atleast_1d(outputs["decode_lengths"][row])]
    if "logprobs" not in outputs:
        return lengths
    pairs = zip(np.atleast_2d(outputs["logprobs"][row]), lengths, strict=True)
    blank = [np.flatnonzero(logprobs[prefix:length] >= _NOT_DECODED) for logprobs, length in pairs]
    return [prefix + int(found[0]) if len(found) else length for found, length in zip(blank, lengths, strict=True)]


def _scores(outputs: Any, row: int, prefix: int, lengths: list[int]) -> list[float | None]:
    """Returns each sample's log-probability: beam search's `scores`, else the sum of `logprobs` over decoded tokens.

    A score is None if it isn't finite, or if the outputs have neither array.
    """
    if "scores" in outputs:
        return [_json(float(score)) for score in np.atleast_1d(outputs["scores"][row])]
    if "logprobs" not in outputs:
        return [None] * len(lengths)
    pairs = zip(np.atleast_2d(outputs["logprobs"][row]), lengths, strict=True)
    return [_json(float(np.sum(logprobs[prefix:length], dtype=np.float64))) for logprobs, length in pairs]


def _json(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON can't represent, with None."""
    if isinstance(value, list):
        return [_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class DecodeOutput:
    """The decoded examples of one dataset at one step.

    While a decode runs, each batch is written atomically to its own file in `step_N.parts/`. At the end `step_N.jsonl` is
    assembled from these files, then `step_N.json` records the decode's identity and metrics, and then these files are deleted.
    Only one process may create and use this object.
    """

    def __init__(self, directory: epath.Path, step: int, identity: str):
        """Derives the paths of the files. Reads and writes no file.

        Args:
          directory: `decode_out/DATASET`.
          step: the step of the variables.
          identity: fingerprint of variables, data and settings. Files with a different identity are not used.
        """
        self.path = directory / f"step_{step}.jsonl"
        self._summary = directory / f"step_{step}.json"
        self._parts = directory / f"step_{step}.parts"
        self._identity = identity

    def finished_metrics(self) -> dict[str, float] | None:
        """Returns the metrics of a finished decode with the same identity, or None."""
        summary = _read_json(self._summary)
        if summary is None or summary.get("identity") != self._identity or not self.path.exists():
            return None
        if self._parts.exists():
            self._parts.rmtree()
        return summary["metrics"]

    def batches_done(self) -> int:
        """Returns how many batches in a row, from batch 0, have a file with this identity. If none, deletes the batch files."""
        done = 0
        while (part := _read_json(self._part(done))) is not None and part["identity"] == self._identity:
            done += 1
        if not done and self._parts.exists():
            self._parts.rmtree()
        return done

    def add(
        self, batch: int, records: list[dict[str, Any]], values: Mapping[str, float], weights: Mapping[str, float]
    ) -> None:
        """Writes a batch's file: its examples, and its scalars with their weights. `batch` is the batch's index."""
        self._parts.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(record, ensure_ascii=False) for record in records]
        part = {"identity": self._identity, "values": dict(values), "weights": dict(weights), "lines": lines}
        write_atomically(self._part(batch), [json.dumps(part)])

    def finish(self, batches: int) -> tuple[dict[str, float], int]:
        """Assembles `step_N.jsonl` from all batches. Returns the metrics over all examples, and the number of examples."""
        mean, examples = WeightedMean(), 0

        def lines() -> Iterable[str]:
            nonlocal examples
            for batch in range(batches):
                part = json_values.parse_object(json_values.content_of(self._part(batch)), finite=False)
                mean.add(part["values"], part["weights"])
                examples += len(part["lines"])
                yield from part["lines"]

        write_atomically(self.path, lines())
        metrics = mean.result()
        summary = {"identity": self._identity, "examples": examples, "metrics": metrics}
        write_atomically(self._summary, [json.dumps(summary)])
        self._parts.rmtree()
        return metrics, examples

    def _part(self, batch: int) -> epath.Path:
        return self._parts / f"{batch:06}.json"


def _read_json(path: epath.Path) -> dict[str, Any] | None:
    """Returns a file's content, or None if it is missing or, after a power cut, not valid JSON."""
    try:
        return json_values.parse_object(json_values.content_of(path), finite=False)
    except (FileNotFoundError, ValueError):
        return None


def say(dataset: str, step: int, record: Mapping[str, object], file: epath.Path) -> None:
    """Logs one decoded example, and prints it in color if there is a live display."""
    head = f"decoded {dataset} at step {step}, example {record['index']}:"
    parts = {name: shown(str(record[name]), file) for name in _STYLES if name in record}
    if "output" not in parts:
        parts = {"output": shown(json.dumps(record, ensure_ascii=False), file)}
    # Only the first line of each text is preceded by its name.
    rows = [
        (name, f"  {'' if number else name:6} | ", line)
        for name, lines in parts.items()
        for number, line in enumerate(lines)
    ]
    if live.display is not None:
        from rich.text import Text  # only terminals need it

        text = Text().append(head, "cyan")
        for name, label, line in rows:
            text.append(f"\n{label}", "dim").append(line, _STYLES[name])
        live.display.print(text)
    logging.info("%s", "\n".join([head, *(label + line for _, label, line in rows)]), extra=SHOWN_LIVE)


def shown(text: str, file: epath.Path) -> list[str]:
    """Returns a text's lines for a terminal, with control characters escaped. A long text is cut, and a last line names `file`.

    If the text has only white space, returns its repr.
    """
    lines = text[:_MOST_CHARACTERS].split("\n")[:_MOST_LINES]
    begin = "\n".join(lines)
    left = len(text) - len(begin)
    note = [f"[{count_text(left, 'more character')} in {file}]"] if left else []
    if not begin.strip():
        return [repr(begin), *note]
    return [terminal.visible(line) for line in lines] + note
