"""Input pipelines: subclasses of praxis' `BaseInput` that save their position in the checkpoint.

| name | module | purpose |
|---|---|---|
| `TextInput`, `PromptInput` | `text` | text files for training and evaluation; prompts from text files for decoding |
| `ChatPromptInput` | `chat_text` | conversations as prompts for decoding, rendered by a chat template |
| `ChatInput`, `Chat` | `chat_text` | conversations for training, also mixed with text; the loss counts the assistant's text |
| `PreferenceInput` | `preferences` | preference pairs (a chosen and a rejected answer to one prompt) for DPO |
| `DocumentPrompts` | `text` | the beginnings of a corpus' documents as prompts for decoding |
| `PackedTextInput` | `text` | short documents packed into rows, each document a segment |
| `CorpusInput`, `Documents`, `Mixture` | `corpus` | text in JSON lines, Parquet, Arrow, ArrayRecord, ...; mixtures of sources |
| `ByteTokenizer`, `SentencePieceTokenizer` | `tokenizers` | tokenizers for the text inputs |
| `HuggingFaceTokenizer` | `huggingface_tokenizer` | a Hugging Face tokenizer, from its tokenizer.json or from a Python object |
| `stdlib_train_files`, `stdlib_heldout_files` | `stdlib_text` | source files of Python's standard library |
| `TfRecordInput`, `Feature` | `tfrecord` | TFRecord files of tf.train.Example |
| `TfdsInput` | `tfds_input` | prepared TensorFlow Datasets |
| `ImageInput`, `Images`, `RandomResizedCrop` | `images` | images in Parquet files and tar shards, and mixtures of them |
| `GrainInput`, `GrainStreamInput` | `grain_input` | Grain's MapDataset and IterDataset |
| `ArrayInput`, `ExamplesInput` | `examples` | arrays in memory; base class of the inputs over numbered examples |
| `SyntheticInput`, `SyntheticLmInput` | `synthetic` | random batches of any shape; a synthetic language that a model can learn |
| `IndexedInput`, `ExampleOrder` | `indexed` | base class of the inputs whose batch n is a pure function of n |
| `Prefetcher` | `prefetch` | a thread that keeps batches ready on the devices |
| `pad_batch` | `batches` | adds rows of weight 0 to a batch |
| `lm_input_specs`, `dataset_input_specs` | `batches` | shapes and dtypes of a batch |
| `DatasetSpecsProvider` | `batches` | shapes and dtypes of a batch, for experiments |

Importing this package doesn't import JAX, praxis or TensorFlow, because each name is imported when it is first used
(`__init__.pyi` lists the names). Only `TfRecordInput` and `ImageInput` need TensorFlow; they import it for their first batch.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
