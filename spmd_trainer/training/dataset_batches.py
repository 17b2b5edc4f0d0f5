"""Iterates over the batches of a finite dataset, for evaluation and decode."""

from __future__ import annotations

import contextlib
import itertools
import json
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from spmd_trainer.checkpointing.checksums import checksum
from spmd_trainer.errors import UserError
from spmd_trainer.inputs.batch_checks import check_values
from spmd_trainer.inputs.batches import dataset_input_specs
from spmd_trainer.inputs.prefetch import is_end
from spmd_trainer.models.config_lines import lines_of
from spmd_trainer.sharding.messages import short_hash
from spmd_trainer.sharding.variables import path_str
from spmd_trainer.step.compiled_step import CompiledStep
from spmd_trainer.train_states import PyTree, TrainState
from spmd_trainer.training import same_settings
from spmd_trainer.training.agreed_input import agree_on_input
from spmd_trainer.training.corpus_stores import tokenised_ahead
from spmd_trainer.training.job import Job, vocabulary_size
from spmd_trainer.training.phases import Phase

# Maximum number of differences that an error message lists.
_LISTED = 5


def no_op() -> None:
    """Does nothing. Evaluation and decode call it between two batches if nothing can interrupt them."""


class FiniteDataset:
    """One evaluation or decode dataset of a job, read from beginning to end.

    Attributes:
      shapes: ShapeDtypeStructs of the global batch.
      put: function that moves this process's rows of a batch to the devices, as part of the global batch.
    """

    def __init__(self, job: Job, input_p: Any, kind: str, index: int):
        """Builds the input.

        Args:
          kind: 'eval' or 'decode'.
          index: index of the dataset in `eval_datasets` or `decode_datasets`.

        Raises:
          UserError: the input's settings contradict each other or its files.
        """
        self.name = str(input_p.name)
        self._job = job
        self._kind = kind
        self._activity = "evaluation" if kind == "eval" else kind
        self._index = index
        built = job.build_input(input_p)
        self._input = agree_on_input(built, self._activity, count=jax.process_count(), must_end_together=True)
        tokenising = contextlib.ExitStack()
        tokenising.enter_context(tokenised_ahead(built, job.config))
        weakref.finalize(self, tokenising.close)
        self._specs = dataset_input_specs(input_p)
        self.put = job.partitioner.layout.put
        self.shapes = job.global_shape_dtype(self._specs)
        self.num_rows = int(jax.tree.leaves(self.shapes)[0].shape[0])

    def fingerprint(self, state: TrainState) -> str:
        """Returns a hash of the step, variables, data, settings and number of processes. It doesn't depend on the mesh.

        Work that was finished with the same fingerprint is not repeated.

        Args:
          state: the train state, padded or not. A change of any bit in the variables changes the hash.
        """
        self._input.reset()
        config = self._job.config
        settings = "evaluate" if self._kind == "eval" else "decode"
        seeds = ("task.infer",) if config.mode == "infer" else ()
        dataset = f"{self._kind}_datasets[{self._index}]"
        parts = [
            *lines_of(
                config.experiment.lines(),
                ("task.model", "task.lora", "task.metrics", f"task.{settings}", dataset, *seeds),
            ),
            _state_of(self._input),
            f"processes {jax.process_count()}",
            f"step {int(state.step)}",
            f"variables {checksum(state.mdl_vars)}",
        ]
        return short_hash(json.dumps(parts))

    def each_batch(
        self, activity: str, between_batches: Callable[[], None], *, done: int = 0
    ) -> Iterator[tuple[int, PyTree]]:
        """Yields (index, batch) from the beginning of the dataset, and logs the progress.

        Args:
          activity: names the work in the log, e.g. 'evaluating heldout at step 5'.
          between_batches: called before each batch. If it raises, the iteration ends with that exception.
          done: number of batches at the beginning that were processed before; they are read and skipped.

        Raises:
          UserError: the dataset is empty, or its first batch differs from its declared specs.
        """
        self._input.reset()
        total, number = _num_batches(self._input), -1
        left = None if total is None else total - done
        with Phase(activity, announce_after=2.0, total=left) as phase:
            for number, batch in enumerate(self._batches()):
                if number < done:
                    continue
                between_batches()
                yield number, batch
                phase.advance()
        if number < 0:
            raise _empty(self._activity, self.name)

    def _batches(self) -> Iterator[PyTree]:
        """Yields and checks the input's batches until the input ends. Compares the first batch with the declared specs."""
        check = _padded_batch_checker(self._job, self.name, self._input, self._specs)
        limit = _limit(self._input)
        for _ in itertools.count() if limit is None else range(limit):
            try:
                batch = self._input.get_next_padded()
            except StopIteration:
                return
            check(batch)
            yield batch


def log_first_call(fn: CompiledStep, activity: str) -> Callable[..., tuple[Any, Any]]:
    """Returns a function that calls `fn` and logs its first call, which compiles it.

    With several processes, the first call waits until all have compiled, because a collective would time out after 30 s.
    """
    step: CompiledStep | jax.stages.Compiled | None = None

    def call(*args: Any) -> tuple[Any, Any]:
        nonlocal step
        if step is not None:
            return step(*args)
        with Phase(activity, announce_after=2.0):
            compiled = fn.lower(args[1]).compile() if jax.process_count() > 1 else fn
            same_settings.check_same_code()
            result = compiled(*args)
        step = compiled
        return result

    return call


def _state_of(data: Any) -> str:
    """Returns an input's state (its position and its data's identity) as text; '' if it has no `get_state` of its own."""
    try:
        return repr(data.get_state())
    except NotImplementedError:
        return ""


def _num_batches(data: Any) -> int | None:
    number = getattr(data, "num_batches", None)
    return number if isinstance(number, int) and number > 0 else _limit(data)


def _limit(data: Any) -> int | None:
    """Returns how many batches to take from an endless input; None for an input that ends.

    An endless Pax input, such as praxis' LingvoInputAdaptor around random data, has no positive `num_batches`. Its
    `eval_loop_num_batches` is the number of batches to take.
    """
    number = getattr(data, "num_batches", 1)
    if (isinstance(number, int) and number > 0) or getattr(data, "reset_for_eval", True):
        return None
    limit: int | None = getattr(data, "eval_loop_num_batches", None)
    return limit or None


def batch_checker(job: Job, name: str, declared: PyTree) -> Callable[[PyTree], None]:
    """Returns a function that checks the values of a batch. Call the function with each batch of an input.

    With `task.train.enforce_input_specs`, the function also compares the first batch with the specs in `declared`.
    """
    unchecked, vocabulary = job.task.train.enforce_input_specs, vocabulary_size(job.task)

    def check(batch: PyTree) -> None:
        nonlocal unchecked
        if unchecked:
            check_specs(name, batch, declared)
            unchecked = False
        check_values(name, batch, vocabulary)

    return check


def _padded_batch_checker(job: Job, name: str, data: Any, specs: PyTree) -> Callable[[PyTree], None]:
    """Returns a `batch_checker` for a built input, whose batches have `batch_padding_size` more rows than `specs`."""
    added = getattr(data, "batch_padding_size", 0)
    padded = jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0] + added, *x.shape[1:]), x.dtype), specs)
    return batch_checker(job, name, padded)


def check_first_batch(job: Job, input_p: Any, kind: str) -> Any:
    """Reads this process's first batch of a dataset, and checks it as evaluation and decode do later.

    Args:
      kind: 'evaluation' or 'decode'.

    Returns:
      The built input, reset to its beginning, for `Job.keep_input`. None if it isn't certain that the reset worked, e.g.
      because the input (a Pax stream, for instance) doesn't report its position.

    Raises:
      UserError: the input can't be built or read, it is empty, or the batch differs from its declared specs.
    """
    built, name = job.build_input(input_p), str(input_p.name)
    beginning = _state_of(built)
    try:
        batch = built.get_next_padded()
    except Exception as error:
        if is_end(error):
            raise _empty(kind, name) from error
        raise
    _padded_batch_checker(job, name, built, dataset_input_specs(input_p))(batch)
    if not beginning:
        return None
    built.reset()
    return built if _state_of(built) == beginning else None


def _empty(kind: str, name: str) -> UserError:
    return UserError(f"{kind} dataset {name} is empty; give it at least one example")


def check_specs(name: str, batch: Any, declared: Any) -> None:
    """Checks that a batch has the declared structure, shapes and dtypes.

    Raises:
      UserError: the batch differs. The message names the input and, for up to 5 differing leaves, the path, shapes and dtypes.
    """
    given, wanted = _leaves(batch), _leaves(declared)
    problems = list(_differences(given, wanted))
    if not problems:
        return
    more = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
    raise UserError(
        f"the first batch of input {name!r} differs from its declared specs: {'; '.join(problems[:_LISTED])}{more}. Change "
        "the input's batches or its specs (get_input_specs_provider_params() for training, the input's input_specs() for "
        "evaluation and decode). task.train.enforce_input_specs=False skips this check"
    )


def _differences(given: dict[str, str], wanted: dict[str, str]) -> Iterator[str]:
    for path, declared in wanted.items():
        if path not in given:
            yield f"{path} is missing, declared as {declared}"
        elif given[path] != declared:
            yield f"{path} is {given[path]}, declared as {declared}"
    for path in given.keys() - wanted.keys():
        yield f"{path} ({given[path]}) is not declared"


def _leaves(tree: Any) -> dict[str, str]:
    """Returns {path: dtype and shape}, e.g. {'image/pixels': 'float32 [8, 28, 28]'}."""
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        dtype = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
        found[path_str(path)] = f"{dtype} {list(np.shape(leaf))}"
    return found
