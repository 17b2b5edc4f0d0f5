"""An experiment on a packed mixture that writes down which rows each process has read; jobs read it through --exp_module."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

from praxis import pax_fiddle

from spmd_trainer import experiment_registry
from spmd_trainer.experiments.lm.stdlib import StdlibBytesTiny
from spmd_trainer.inputs import CorpusInput, Documents, Mixture


class Recorded(CorpusInput):
    """A corpus input that adds a line for every batch to $ROWS_READ/PROCESS.txt: a checksum of each of its rows."""

    def get_next(self):
        batch = super().get_next()
        rows = zip(batch.ids, batch.labels, batch.segment_ids, batch.weights, strict=True)
        checksums = [zlib.crc32(b"".join(leaf.tobytes() for leaf in row)) for row in rows]
        with open(Path(os.environ["ROWS_READ"]) / f"{self.infeed_host_index}.txt", "a") as file:
            file.write(" ".join(map(str, checksums)) + "\n")
        return batch


@experiment_registry.register
class PackedMixture(StdlibBytesTiny):
    """Trains on the documents in $DOCUMENTS: one source is read by number, the other in order."""

    def datasets(self):
        training, *others = super().datasets()
        folder = Path(os.environ["DOCUMENTS"])
        sources = {
            "web": (Documents(str(folder / "web.jsonl")), 2),
            "code": (Documents(str(folder / "code.jsonl.gz")), 1),
        }
        mixed = pax_fiddle.Config(
            Recorded,
            name=training.name,
            source=Mixture(sources),
            seq_len=training.seq_len,
            batch_size=training.batch_size,
            window_rows=20,
            is_training=True,
            input_random_seed=1,
        )
        return [mixed, *others]
