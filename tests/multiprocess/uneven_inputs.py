"""Experiments whose inputs differ between processes; jobs read them through --exp_module."""

from __future__ import annotations

import json
import os
import time

from praxis import base_input, layers, pax_fiddle

from spmd_trainer import experiment_registry
from spmd_trainer.experiments.lm.stdlib import StdlibBytesTiny
from spmd_trainer.step.pjit import PjitPartitioner


class Stream(base_input.BaseInput):
    """Batches of another input, one after the other; ends after `ends_after[process]` batches, each later than `seconds`."""

    source: pax_fiddle.Config | None = None
    ends_after: tuple[int | None, ...] = (None,)
    seconds: tuple[float, ...] = (0.0,)

    def __post_init__(self):
        super().__post_init__()
        index = self.infeed_host_index
        self._source = pax_fiddle.build(
            self.source.clone().set(
                num_infeed_hosts=self.num_infeed_hosts, infeed_host_index=index, batch_size=self.batch_size
            )
        )
        self._end = self.ends_after[index % len(self.ends_after)]
        self._seconds = self.seconds[index % len(self.seconds)]
        self._taken = 0

    def get_next(self):
        if self._end is not None and self._taken >= self._end:
            raise StopIteration
        time.sleep(self._seconds)
        self._taken += 1
        return self._source.get_next()

    def get_state(self):
        return json.dumps({"taken": self._taken, "process": self.infeed_host_index}).encode()

    def set_state(self, state):
        saved = json.loads(state)
        assert saved["process"] == self.infeed_host_index, saved
        self.reset()
        for _ in range(saved["taken"]):
            self._source.get_next()
        self._taken = saved["taken"]

    def reset(self):
        self._source.reset()
        self._taken = 0


@experiment_registry.register
class Streams(StdlibBytesTiny):
    """The training input is a stream of its own on each process."""

    ENDS_AFTER: tuple[int | None, ...] = (None,)
    SECONDS: tuple[float, ...] = (0.0,)

    def datasets(self):
        (training, *others) = super().datasets()
        stream = pax_fiddle.Config(
            Stream,
            name="stream",
            is_training=True,
            batch_size=training.batch_size,
            source=training,
            ends_after=self.ENDS_AFTER,
            seconds=self.SECONDS,
        )
        return [stream, *others]


@experiment_registry.register
class EndsEarlyOnProcess1(Streams):
    ENDS_AFTER = (None, 5)


@experiment_registry.register
class SlowOnProcess1(Streams):
    SECONDS = (0.0, 0.3)


@experiment_registry.register
class UnevenEvaluation(StdlibBytesTiny):
    """The evaluation dataset has two batches on process 0 and one on process 1."""

    def datasets(self):
        training, evaluation = super().datasets()
        stream = pax_fiddle.Config(
            Stream, name="uneven", is_training=False, batch_size=4, source=evaluation, ends_after=(2, 1)
        )
        return [training, stream.set(reset_for_eval=True)]


@experiment_registry.register
class Elastic(StdlibBytesTiny):
    """An elastic run whose devices never change."""

    def partitioner(self):
        return PjitPartitioner(elastic=True)


@experiment_registry.register
class OwnPositions(Streams):
    """Streams that are slow, so that a test can kill the job between two saves."""

    SECONDS = (0.1, 0.3)


class HelpedModel(layers.LanguageModel):
    """Imports a module of the user's while the step is traced, and reads a variable of the environment there."""

    def compute_loss(self, predictions, input_batch):
        import loss_helper

        metrics, per_example = super().compute_loss(predictions, input_batch)
        total, weight = metrics["total_loss"]
        scale = loss_helper.SCALE * float(os.environ.get("UNEVEN_INPUTS_SCALE", "1"))
        return metrics | {"total_loss": (scale * total, weight)}, per_example


@experiment_registry.register
class HelpedLoss(Streams):
    """The loss comes from `loss_helper`, a module beside this one that hosts may have in different versions."""

    def _model(self):
        model_p = super()._model()
        pax_fiddle.update_callable(model_p, HelpedModel)
        return model_p


def files_of_this_process() -> list[str]:
    """Returns what is at one path on several hosts: one name, but perhaps not the same text."""
    return [os.environ["TEXT"]]


@experiment_registry.register
class OtherData(StdlibBytesTiny):
    """The training text may differ between processes, and no setting shows it."""

    def datasets(self):
        training, *others = super().datasets()
        return [training.set(files=files_of_this_process), *others]
