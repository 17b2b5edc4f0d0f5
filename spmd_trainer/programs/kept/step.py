"""Finds a run's kept train step, and keeps one that was just compiled."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from absl import logging
from etils import epath
from jax.experimental import serialize_executable
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmd_trainer import multihost
from spmd_trainer.errors import first_paragraph
from spmd_trainer.metrics.packing import ScalarPacking
from spmd_trainer.partitioning.state_layout import KeptLayout, StateMetadata
from spmd_trainer.programs.kept import settings as settings_lib
from spmd_trainer.programs.kept.entries import Entries
from spmd_trainer.programs.kept.reads import Reads, Recorder
from spmd_trainer.programs.run_config import RunConfig
from spmd_trainer.sharding.messages import format_duration
from spmd_trainer.train_states import PyTree

# JAX's event for a program that its compilation cache has.
_CACHE_HIT = "/jax/compilation_cache/cache_hits"
_OPTION_OF_GPUS = "xla_gpu_memory_limit_slop_factor"


@dataclasses.dataclass(frozen=True)
class KeptStep:
    """A train step that was compiled by an earlier start.

    Attributes:
      fn: the compiled step, see `CompiledTrainStep`.
      key: returns the run's random key.
      packing: unpacks the step's scalars.
      attention: the kernels of the attention layers, a line each.
      layout: the layout of the train state, without its mesh.
      place: the mesh and the batch that it was compiled for, see `_place`.
    """

    fn: jax.stages.Compiled
    key: jax.stages.Compiled
    packing: ScalarPacking
    attention: Sequence[str]
    layout: KeptLayout
    place: str


@dataclasses.dataclass(frozen=True)
class NewStep:
    """A train step that was just compiled. Attributes: as of `KeptStep`; `metadata` is the layout on its mesh.

    `batch` has ShapeDtypeStructs of the global batch.
    """

    fn: jax.stages.Compiled
    packing: ScalarPacking
    attention: Sequence[str]
    metadata: StateMetadata
    batch: PyTree


class StepKeeper:
    """Keeps the train step of one run.

    Attributes:
      found: the step that an earlier start has kept; None if there is none, or something has changed since.
    """

    def __init__(self, config: RunConfig, root: epath.Path, recorder: Recorder):
        """Looks for the step. All processes of the job use theirs, or none does.

        Args:
          config: the run's.
          root: where steps are kept.
          recorder: what was read since the experiment was imported.
        """
        self._recorder = recorder
        self._config = config
        self._entries = Entries(root, config.experiment.name, jax.process_index())
        self._settings = settings_lib.settings_of(config)
        self._key = settings_lib.key_of(self._settings)
        self._from_cache = False
        began = time.monotonic()
        try:
            self.found, reason = self._find()
        except Exception as error:  # of the file system, of an entry that is no entry: the others wait for an answer
            self.found, reason = None, f"what was kept can't be read: {type(error).__name__}: {first_paragraph(error)}"
        took = format_duration(time.monotonic() - began)
        self._result = f"the compiled train step of an earlier start is used, read in {took}"
        self._agree(reason)

    def say(self) -> None:
        """Logs whether the kept step is used, or why the step is traced."""
        logging.info("%s", self._result)

    def check(self, mesh: Mesh, batch: PyTree) -> None:
        """Gives up the kept step if it was compiled for another mesh or batch, which something must decide that isn't compared.

        Args:
          mesh: the run's.
          batch: ShapeDtypeStructs of the global batch.
        """
        if self.found is not None:
            self._agree("" if self.found.place == _place(mesh, batch) else "its mesh or its batch is another one")

    def _agree(self, reason: str) -> None:
        """Gives up the kept step on all processes if one has a reason to."""
        reasons = multihost.gather("kept step", reason)
        problem = next((f"{text} (process {n})" if n else text for n, text in enumerate(reasons) if text), "")
        if problem:
            self.found = None
            self._result = f"the train step is traced: {problem}"

    @contextlib.contextmanager
    def tracing(self) -> Iterator[None]:
        """Context manager around tracing and compiling the step, on any thread: notes what it is made from."""

        def on_event(event: str, **kwargs: str | int) -> None:
            del kwargs
            if event == _CACHE_HIT and threading.get_ident() == thread:
                self._from_cache = True

        thread = threading.get_ident()
        jax.monitoring.register_event_listener(on_event)
        try:
            with self._recorder.recording():
                yield
        finally:
            jax.monitoring.unregister_event_listener(on_event)

    def keep(self, new: NewStep, lowered: jax.stages.Lowered, flags: Mapping[str, Any]) -> None:
        """Keeps a step, in the background. What goes wrong is logged: the next start traces then.

        Args:
          new: the step that was compiled within `tracing`.
          lowered: the program that it was compiled from.
          flags: the compiler's options.
        """
        reads, unsure = self._recorder.reads(without=str(self._config.job_log_dir))
        if unsure := unsure or self._entries.refusal():
            logging.info("the compiled train step is not kept: %s", unsure)
            return
        is_cpu = new.metadata.mesh.devices.flat[0].platform == "cpu"

        def work() -> None:
            try:
                # On CPU, XLA can't write the code of a program that was read from its cache.
                fn = _compiled_anew(lowered, flags) if self._from_cache and is_cpu else new.fn
                key = self._lowered_key(new.metadata.mesh)
                content = _saved(dataclasses.replace(new, fn=fn), _compiled_anew(key, {}) if is_cpu else key.compile())
                made_from = {"settings": self._settings, "reads": dataclasses.asdict(reads)}
                self._entries.write(self._key, made_from, content)
            except Exception as error:  # a backend that can't serialise, layers that can't be pickled, a full disk
                logging.info(
                    "the compiled train step is not kept: %s: %s", type(error).__name__, first_paragraph(error)
                )

        # Not a daemon: a short run ends when its step is on disk.
        threading.Thread(target=work, name="keep-step").start()

    def _find(self) -> tuple[KeptStep | None, str]:
        """Returns the step and why it can't be used; one of them is empty."""
        if reason := self._entries.refusal():
            return None, reason
        for made_from, read in self._entries.read(self._key):
            changed = Reads(**made_from["reads"]).changed()
            if not changed:
                try:
                    return _loaded(read()), ""
                except Exception as error:  # of pickle, of a library's class, of the runtime: any of them means tracing
                    changed = f"what was kept can't be read: {type(error).__name__}: {first_paragraph(error)}"
            reason = reason or changed
        if not reason:
            before = self._entries.newest()
            reason = (
                settings_lib.difference(before["settings"], self._settings)
                if before
                else "no earlier start has kept it"
            )
        return None, reason or "what was kept is damaged"

    def _lowered_key(self, mesh: Mesh) -> jax.stages.Lowered:
        """Returns the program that makes the run's random key: a restart must not trace that, either."""
        seed = self._config.experiment.task_p.train.random_seed
        replicated = NamedSharding(mesh, PartitionSpec())
        return jax.jit(lambda: jax.random.key(seed), out_shardings=replicated).lower()


def _compiled_anew(lowered: jax.stages.Lowered, flags: Mapping[str, Any]) -> jax.stages.Compiled:
    """Compiles a program for CPU without JAX's cache: an option of GPUs, with a value of its own, makes it a new one there."""
    options: dict[str, Any] = {**flags, _OPTION_OF_GPUS: time.time_ns() % 2**30}
    return lowered.compile(compiler_options=options)


def _saved(step: NewStep, key: jax.stages.Compiled) -> bytes:
    layout = KeptLayout(step.metadata.var_weight_hparams, step.metadata.variables)
    programs = [serialize_executable.serialize(program) for program in (step.fn, key)]
    return pickle.dumps((programs, step.packing, tuple(step.attention), layout, _place(step.metadata.mesh, step.batch)))


def _loaded(content: bytes) -> KeptStep:
    programs, packing, attention, layout, place = pickle.loads(content)
    fn, key = (serialize_executable.deserialize_and_load(*program) for program in programs)
    jax.block_until_ready(key())  # a program without its code fails here, not in the run
    return KeptStep(fn, key, packing, attention, layout, place)


def _place(mesh: Mesh, batch: PyTree) -> str:
    """Returns the mesh, with its devices in order, and the shapes and dtypes of the batch."""
    shapes = [
        f"{jax.tree_util.keystr(path)} {x.dtype} {x.shape}" for path, x in jax.tree_util.tree_leaves_with_path(batch)
    ]
    return f"{dict(mesh.shape)} {[device.id for device in mesh.devices.flat]} {shapes}"
