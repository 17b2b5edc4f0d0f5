"""Input pipelines: praxis `BaseInput`s whose position is part of the checkpoint.

| name | module | gives |
|---|---|---|
| `ByteTextInput`, `PromptInput` | `text` | text files by byte, to train and evaluate on; their beginnings, for decode |
| `stdlib_train_files`, `stdlib_heldout_files` | `stdlib_text` | source files of the interpreter's standard library |
| `SyntheticInput`, `SyntheticLmInput` | `synthetic` | batches of any shape; a language to learn; numpy only |
| `IndexedInput`, `ExampleOrder` | `indexed` | the base of them all: batch n is a pure function of n |
| `Prefetcher` | `prefetch` | a thread that keeps batches ready on the devices |
| `pad_batch` | `batches` | rows of weight 0 added to a batch |
| `lm_input_specs`, `dataset_input_specs` | `batches` | what a batch will look like |
| `LmInputSpecsProvider`, `DatasetSpecsProvider` | `specs` | the same, for experiments |

The names are imported when they are first asked for: importing this package brings in neither JAX, praxis nor
TensorFlow. TensorFlow is imported when the fifth batch of a `ByteTextInput` is read, and by nothing else here.
"""

import importlib
from typing import Any

_MODULE_OF = {
    "ByteTextInput": "text",
    "DatasetSpecsProvider": "specs",
    "ExampleOrder": "indexed",
    "IndexedInput": "indexed",
    "LmInputSpecsProvider": "specs",
    "Prefetcher": "prefetch",
    "PromptInput": "text",
    "SyntheticInput": "synthetic",
    "SyntheticLmInput": "synthetic",
    "dataset_input_specs": "batches",
    "lm_input_specs": "batches",
    "pad_batch": "batches",
    "stdlib_heldout_files": "stdlib_text",
    "stdlib_train_files": "stdlib_text",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(sorted(_MODULE_OF))}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULE_OF])
