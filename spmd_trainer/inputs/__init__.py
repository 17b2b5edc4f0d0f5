"""Input pipelines: praxis `BaseInput`s whose position is part of the checkpoint.

| name | module | gives |
|---|---|---|
| `TextInput`, `PromptInput` | `text` | text files, to train and evaluate on; their beginnings, for decode |
| `PackedTextInput` | `packed_text` | short documents packed into rows, each a segment of its own |
| `ByteTokenizer`, `SentencePieceTokenizer` | `tokenizers` | what text inputs make tokens with |
| `HuggingFaceTokenizer` | `huggingface_tokenizer` | the same, of a tokenizer.json or an object of that library |
| `stdlib_train_files`, `stdlib_heldout_files` | `stdlib_text` | source files of the interpreter's standard library |
| `TfRecordInput`, `Feature` | `tfrecord` | TFRecord files of tf.train.Example |
| `TfdsInput` | `tfds_input` | prepared TensorFlow Datasets |
| `GrainInput`, `GrainStreamInput` | `grain_input` | Grain's MapDataset and IterDataset |
| `ArrayInput`, `ExamplesInput` | `examples` | arrays in memory; the base of inputs over examples read by number |
| `SyntheticInput`, `SyntheticLmInput` | `synthetic` | batches of any shape; a language to learn; numpy only |
| `IndexedInput`, `ExampleOrder` | `indexed` | the base of them all: batch n is a pure function of n |
| `Prefetcher` | `prefetch` | a thread that keeps batches ready on the devices |
| `pad_batch` | `batches` | rows of weight 0 added to a batch |
| `lm_input_specs`, `dataset_input_specs` | `batches` | what a batch will look like |
| `LmInputSpecsProvider`, `DatasetSpecsProvider` | `specs` | the same, for experiments |

The names are imported when they are first asked for: importing this package brings in neither JAX, praxis nor
TensorFlow. TensorFlow is imported when the fifth batch of a `TextInput` or the first of a `TfRecordInput` is read, and by
nothing else here. `ByteTextInput` is another name of `TextInput`, whose default is bytes.
"""

import importlib
from typing import Any

_MODULE_OF = {
    "ArrayInput": "examples",
    "ByteTextInput": "text",
    "ByteTokenizer": "tokenizers",
    "DatasetSpecsProvider": "specs",
    "ExampleOrder": "indexed",
    "ExamplesInput": "examples",
    "Feature": "tfrecord",
    "GrainInput": "grain_input",
    "GrainStreamInput": "grain_input",
    "HuggingFaceTokenizer": "huggingface_tokenizer",
    "IndexedInput": "indexed",
    "LmInputSpecsProvider": "specs",
    "PackedTextInput": "packed_text",
    "Prefetcher": "prefetch",
    "PromptInput": "text",
    "SentencePieceTokenizer": "tokenizers",
    "SyntheticInput": "synthetic",
    "SyntheticLmInput": "synthetic",
    "TextInput": "text",
    "TfRecordInput": "tfrecord",
    "TfdsInput": "tfds_input",
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
