"""Runs requests on the mesh: scores given continuations, or generates continuations of prompts. All texts are token ids.

Equal requests run once, and answers on disk are reused. Only sums of log-probabilities, one bool per row and generated
tokens are copied from the devices to the host.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from etils import epath
from praxis.py_utils import NestedMap

from spmd_trainer import multihost
from spmd_trainer.decoder.generation.settings import GenerationSettings
from spmd_trainer.errors import UserError
from spmd_trainer.inputs.token_bytes import token_bytes
from spmd_trainer.inputs.tokenizers import Tokenizer
from spmd_trainer.lm_eval import steps
from spmd_trainer.lm_eval.steps import Shape, generate_step, score_step
from spmd_trainer.sharding.host_devices import finish_on_host_devices
from spmd_trainer.sharding.messages import short_hash
from spmd_trainer.step.compiled_step import CompiledStep
from spmd_trainer.step.partitioner import Partitioner
from spmd_trainer.storage import json_values
from spmd_trainer.storage.append import GrowingFile, open_append, read_joined
from spmd_trainer.tasks_lib import SingleTask
from spmd_trainer.train_states import TrainState

ANSWERS_FILE = "answers.jsonl"


def request_key(*parts: Any) -> str:
    """Returns the key of a request: a checksum of the JSON values that determine its answer, including the model's identity."""
    return short_hash(json.dumps(parts, sort_keys=True), 32)


class Answers:
    """The file with one model state's answers, as lines {"key": ..., "answer": ...}. Only one process may create the object."""

    def __init__(self, directory: epath.Path):
        """Reads the file in `directory`, ignoring incomplete lines. If the file does not exist, the first answer creates it."""
        path = directory / ANSWERS_FILE
        text = read_joined(path)
        self._known: dict[str, Any] = {}
        for line in text.splitlines():
            try:
                record = json_values.parse_object(line, finite=False)
                self._known[record["key"]] = record["answer"]
            except (ValueError, KeyError, TypeError):
                continue
        self._file: GrowingFile = open_append(path)
        self._ends_line = not text or text.endswith("\n")

    def known(self, keys: Iterable[str]) -> dict[str, Any]:
        """Returns the known answers among these keys."""
        return {key: self._known[key] for key in keys if key in self._known}

    def add(self, answers: Mapping[str, Any]) -> None:
        """Appends answers. `answers`: JSON values by key."""
        lines = "".join(json.dumps({"key": key, "answer": answer}) + "\n" for key, answer in answers.items())
        self._file.write((lines if self._ends_line else "\n" + lines).encode())
        self._ends_line = True
        self._known.update(answers)

    def flush(self) -> None:
        """Makes all answers visible to other programs if the file is in an object store."""
        self._file.flush()


# Bytes of answers per broadcast from process 0.
_MESSAGE_BYTES = 2**19

# (activity, number of batches) -> context manager that yields an object with `advance()`, called after each batch.
Progress = Callable[[str, int], Any]


def no_progress(what: str, total: int) -> Any:
    """A `Progress` that reports nothing."""
    del what, total
    return contextlib.nullcontext(types.SimpleNamespace(advance=lambda: None))


class Scored(NamedTuple):
    """A row to score.

    Attributes:
      tokens: the context, followed by the continuation.
      scored: number of tokens in the continuation.
    """

    tokens: tuple[int, ...]
    scored: int


class Prompt(NamedTuple):
    """A row to continue.

    Attributes:
      tokens: the prompt.
      occurrence: index among equal prompts; it gives each of them different random numbers.
    """

    tokens: tuple[int, ...]
    occurrence: int = 0


@dataclasses.dataclass(frozen=True)
class Source:
    """The model state that answers requests, and its stored answers.

    Attributes:
      state: a train state without optimizer states.
      identity: text that identifies the variables and settings of the model; it is part of the keys of `answers`.
      answers: the answers on disk, for process 0; None on the other processes, and if answers are not stored.
      progress: makes the context manager around a series of batches, see `Progress`.
    """

    state: TrainState
    identity: str
    answers: Answers | None
    progress: Progress


class Requests:
    """Runs requests to score or generate text, with the model of one `SingleTask`, on one mesh.

    Each batch shape is compiled once. The compiled step is used for every model state that is evaluated.

    Attributes:
      max_length: maximum number of tokens in a row.
      compiled: number of steps compiled so far: one for each batch shape in scoring, and one for each pair of batch shape and
        `GenerationSettings` in generation.
      computed: number of requests that ran on the devices so far.
    """

    def __init__(
        self,
        task: SingleTask,
        partitioner: Partitioner,
        *,
        tokens_per_batch: int,
        max_length: int,
        batch_size: int | None = None,
        tokenizer: Tokenizer | None = None,
    ):
        """Stores the arguments. Compiles nothing.

        Args:
          task: the task.
          partitioner: the partitioner, after setup.
          tokens_per_batch: number of tokens in a full batch.
          max_length: maximum number of tokens in a row.
          batch_size: rows of a full batch, whatever their length; None: as many as `tokens_per_batch` allows.
          tokenizer: the tokenizer, for stop strings.
        """
        self.max_length = max_length
        self.computed = 0
        self._task = task
        self._partitioner = partitioner
        self._tokens_per_batch = tokens_per_batch
        self._batch_size = batch_size
        self._tokenizer = tokenizer
        self._steps: dict[Any, CompiledStep] = {}

    @property
    def compiled(self) -> int:
        return len(self._steps)

    def scores(self, rows: Sequence[Scored], source: Source) -> list[tuple[float, bool]]:
        """Scores continuations.

        Args:
          rows: at most `max_length` + 1 tokens each; the first token is not scored.
          source: the model state.

        Returns:
          For each row, the sum of the log-probabilities of its continuation's tokens, and True if greedy decoding would give
            the continuation.
        """
        keys = [request_key(source.identity, "score", row.tokens, row.scored) for row in rows]
        distinct = dict(zip(keys, rows, strict=True))
        run = _Run(
            what="requests for a likelihood",
            lengths={key: len(row.tokens) - 1 for key, row in distinct.items()},
            arrays=lambda batch_keys, shape: _score_arrays([distinct[key] for key in batch_keys], shape),
            step=lambda arrays, shape: self._step(("score", shape), score_step, arrays),
            answer=lambda outputs, row: [float(outputs[0][row]), bool(outputs[1][row])],
            limit=self.max_length,
        )
        found = self._answers(run, source)
        return [(found[key][0], found[key][1]) for key in keys]

    def continuations(
        self, prompts: Sequence[Prompt], settings: GenerationSettings, source: Source, *, least_width: int = 0
    ) -> list[list[int]]:
        """Continues prompts, one sample each.

        Args:
          prompts: at most `max_length` - `settings.max_tokens` tokens each.
          settings: the generation settings.
          source: the model state.
          least_width: minimum width, in tokens, of the rows for which the step is compiled.

        Returns:
          The generated tokens of each prompt, including the token that ended the text.

        Raises:
          UserError: the model has no generation settings.
        """
        if not hasattr(self._task.model, "generation"):
            raise UserError(
                f"tasks of the kind generate_until set how text is generated, and a {type(self._task.model).__name__} has no "
                "settings for it, as a DecoderLanguageModel has; choose tasks with likelihoods (multiple_choice, "
                "loglikelihood, loglikelihood_rolling)"
            )
        settings = self._with_known_stops(settings)
        described = repr(settings)
        keys = [request_key(source.identity, described, prompt.tokens, prompt.occurrence) for prompt in prompts]
        distinct = dict(zip(keys, prompts, strict=True))
        step_fn = functools.partial(generate_step, settings=settings, tokenizer=self._tokenizer)
        run = _Run(
            what="requests to generate text",
            lengths={key: max(len(prompt.tokens), least_width) for key, prompt in distinct.items()},
            arrays=lambda batch_keys, shape: _prompt_arrays(batch_keys, [distinct[key] for key in batch_keys], shape),
            step=lambda arrays, shape: self._step((described, shape), step_fn, arrays),
            answer=lambda outputs, row: outputs[0][row, : outputs[1][row]].tolist(),
            limit=self.max_length - settings.max_tokens,
        )
        found = self._answers(run, source)
        return [found[key] for key in keys]

    def shapes(self, lengths: Sequence[int], limit: int | None = None) -> list[Shape]:
        """Chooses the batch shapes for rows of these lengths, each at most `limit` tokens (None: `max_length`)."""
        return steps.choose_shapes(
            lengths,
            limit=self.max_length if limit is None else limit,
            rows_of=self._rows_of,
            num_devices=self._partitioner.mesh.size,
        )

    def _rows_of(self, width: int) -> int:
        devices = self._partitioner.mesh.size
        wanted = self._batch_size or self._tokens_per_batch // width
        return max(devices, -(-wanted // devices) * devices if self._batch_size else wanted // devices * devices)

    def _with_known_stops(self, settings: GenerationSettings) -> GenerationSettings:
        """Removes the stop strings if generation can't detect them. Callers cut the text at stop strings anyway."""
        if not settings.stop or self._tokenizer is None:
            return dataclasses.replace(settings, stop=())
        try:
            token_bytes(self._tokenizer)
        except UserError as error:
            logging.log_first_n(logging.WARNING, "%s. Rows run to max_gen_toks and are cut afterwards", 1, error)
            return dataclasses.replace(settings, stop=())
        return settings

    def _step(self, name: tuple[Any, ...], step_fn: Callable[..., Any], arrays: NestedMap) -> CompiledStep:
        if name not in self._steps:
            declared = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays)
            self._steps[name] = self._partitioner.partition(step_fn, declared, is_eval=True)
        return self._steps[name]

    def _answers(self, run: _Run, source: Source) -> dict[str, Any]:
        """Returns {key: answer} for all requests. Reads answers that are on disk, and computes and stores the others."""
        multihost.agree(f"the {run.what}", request_key(list(run.lengths)))
        found = _from_process_0(None if source.answers is None else source.answers.known(run.lengths))
        # Shapes are chosen for all requests, so that a resumed job compiles the same ones.
        shapes = self.shapes(list(run.lengths.values()), run.limit)
        todo = [key for key in run.lengths if key not in found]
        batches = steps.batches([run.lengths[key] for key in todo], shapes)
        if found:
            logging.info("%s: %d of %d were already answered", run.what, len(found), len(run.lengths))
        waiting: tuple[list[str], Any] | None = None
        with source.progress(f"{len(todo):,} {run.what}", len(batches)) as progress:
            for batch in batches:
                keys = [todo[index] for index in batch.requests]
                dispatched = (keys, self._dispatch(run, keys, batch.shape, source.state))
                # The host reads a batch while accelerators run the next one.
                if waiting is not None:
                    found |= self._read(run, *waiting, source)
                    progress.advance()
                waiting = dispatched
            if waiting is not None:
                found |= self._read(run, *waiting, source)
                progress.advance()
        if source.answers is not None:
            source.answers.flush()
        return found

    def _dispatch(self, run: _Run, keys: list[str], shape: Shape, state: TrainState) -> Any:
        arrays = run.arrays(keys, shape)
        step = run.step(arrays, shape)
        own = shape.rows // jax.process_count()
        rows = slice(jax.process_index() * own, (jax.process_index() + 1) * own)
        placed = self._partitioner.layout.put(jax.tree.map(lambda x: x[rows], arrays))
        outputs = step(state, jax.random.key(self._task.decode.random_seed), placed)[1]
        return finish_on_host_devices(outputs)

    def _read(self, run: _Run, keys: list[str], outputs: Any, source: Source) -> dict[str, Any]:
        *values, row_index = jax.device_get(outputs)
        # With several processes, rows come back in the order of the devices.
        place = {int(index): row for row, index in enumerate(row_index)}
        answers = {key: run.answer(values, place[number]) for number, key in enumerate(keys)}
        self.computed += len(answers)
        if source.answers is not None:
            source.answers.add(answers)
        return answers


@dataclasses.dataclass(frozen=True)
class _Run:
    """The requests of one call to `Requests`, and how to run them.

    Attributes:
      what: description of the requests, for the log.
      lengths: {key: number of tokens} of the distinct requests.
      arrays: function (keys, shape) -> a batch of numpy arrays.
      step: function (batch, shape) -> the compiled step.
      answer: function (outputs on the host, row) -> the row's answer, a JSON value.
      limit: maximum number of tokens in a row.
    """

    what: str
    lengths: Mapping[str, int]
    arrays: Callable[[list[str], Shape], NestedMap]
    step: Callable[[NestedMap, Shape], CompiledStep]
    answer: Callable[[Sequence[np.ndarray], int], Any]
    limit: int


def _score_arrays(rows: Sequence[Scored], shape: Shape) -> NestedMap:
    """Makes a batch in the format of `TextInput`. Padding rows have weight 0."""
    size = (shape.rows, shape.width)
    batch = NestedMap(
        ids=np.zeros(size, np.int32),
        labels=np.zeros(size, np.int32),
        paddings=np.ones(size, np.float32),
        weights=np.zeros(size, np.float32),
        segment_ids=np.zeros(size, np.int32),
        segment_pos=np.tile(np.arange(shape.width, dtype=np.int32), (shape.rows, 1)),
        eval_sample_weights=(np.arange(shape.rows) < len(rows)).astype(np.float32),
        row_index=np.arange(shape.rows, dtype=np.int32),
    )
    for index, (tokens, scored) in enumerate(rows):
        length = len(tokens) - 1
        batch.ids[index, :length], batch.labels[index, :length] = tokens[:-1], tokens[1:]
        batch.paddings[index, :length], batch.segment_ids[index, :length] = 0, 1
        batch.weights[index, length - scored : length] = 1
    return batch


def _prompt_arrays(keys: Sequence[str], prompts: Sequence[Prompt], shape: Shape) -> NestedMap:
    """Makes a batch in the format of `PromptInput`. Random numbers depend on the request's key, not on its row."""
    batch = NestedMap(
        ids=np.zeros((shape.rows, shape.width), np.int32),
        prefix_lengths=np.ones(shape.rows, np.int32),
        eval_sample_weights=(np.arange(shape.rows) < len(prompts)).astype(np.float32),
        prompt_index=np.zeros(shape.rows, np.int32),
        row_index=np.arange(shape.rows, dtype=np.int32),
    )
    for index, (key, prompt) in enumerate(zip(keys, prompts, strict=True)):
        batch.ids[index, : len(prompt.tokens)] = prompt.tokens
        batch.prefix_lengths[index] = len(prompt.tokens)
        batch.prompt_index[index] = int(key[:7], 16)
    return batch


def _from_process_0(answers: dict[str, Any] | None) -> dict[str, Any]:
    if jax.process_count() == 1:
        return dict(answers or {})
    parts: list[dict[str, Any]] = [{}]
    size = 0
    for key, answer in (answers or {}).items():
        size += len(json.dumps([key, answer]))
        if size > _MESSAGE_BYTES:
            parts.append({})
            size = 0
        parts[-1][key] = answer
    found: dict[str, Any] = {}
    for index in range(multihost.broadcast(len(parts))):
        found |= multihost.broadcast(parts[index] if index < len(parts) else {}, name="answers")
    return found
