"""`--mode=tokenizer`: trains a tokenizer on a corpus, for `HuggingFaceTokenizer` or `SentencePieceTokenizer`.

Decoding restores every text byte for byte: text is not normalized, spaces are kept, and a character without a token is
encoded as bytes. There are two exceptions: decoding drops special tokens that are written out in a text, and with a
SentencePiece model, U+2581 (SentencePiece's mark for a space) becomes a space. The same files and settings give the same
tokenizer.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import io
import json
import os
import re
import string
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from absl import logging
from etils import epath

from spmd_trainer.errors import UserError, require_one_of, terminal
from spmd_trainer.errors.installation import imported
from spmd_trainer.inputs.chat_template import template_of
from spmd_trainer.inputs.corpus import encoding
from spmd_trainer.inputs.corpus.documents import BadRecord
from spmd_trainer.inputs.corpus.open_source import open_documents
from spmd_trainer.inputs.corpus.token_store import TokenStore
from spmd_trainer.inputs.files import listed
from spmd_trainer.inputs.huggingface_files import STATING_FILES, TEMPLATE_FILE, TOKENIZER_FILE
from spmd_trainer.inputs.huggingface_tokenizer import HuggingFaceTokenizer
from spmd_trainer.inputs.text_settings import MODEL_SUFFIX, TokenizerConfig
from spmd_trainer.inputs.tokenizers import SPACE_MARK, decode_utf8
from spmd_trainer.sharding.messages import count_text
from spmd_trainer.storage import access, files, is_remote, reading
from spmd_trainer.storage.paths import directory

if TYPE_CHECKING:
    import tokenizers as huggingface

_Made = TypeVar("_Made")

# SentencePiece skips longer sentences, so longer lines are split.
_MAX_LINE_CHARACTERS = 1024
# Maximum number of characters that the Hugging Face trainer gets at a time.
_BLOCK_CHARACTERS = 2**20
# Seconds between progress lines.
_LINE_EVERY = 10.0
# Score of tokens in a unigram model that are used only if no other tokens can encode the text.
_NEVER = -1e9
_EOS, _SENTENCEPIECE_EOS = "<|endoftext|>", "</s>"
# Names of tokens that SentencePiece makes itself.
_UNKNOWN_OR_NEWLINE, _BYTE = ("<unk>", "\n"), re.compile("<0x[0-9A-F]{2}>")


def train_tokenizer(config: TokenizerConfig) -> None:
    """Trains a tokenizer, writes it and prints a summary.

    Raises:
      UserError: the files, the output or the chat template can't be used, or the text is too small for `vocab_size`.
    """
    to_model = config.output.endswith(MODEL_SUFFIX)
    path = directory("--output", config.output)
    if to_model:
        if is_remote(path):
            raise UserError(f"--output={path} is in an object store; give a local file, and copy it there")
        files.check_target("--output", path, "words.model")
    access.check_writable("--output", path.parent if to_model else path)
    template = template_of(None, config.chat_template, has_tools=False).text if config.chat_template else None
    if not to_model:
        _refuse_other_files(path, has_template=template is not None)
    config = _with_special_tokens(config, _SENTENCEPIECE_EOS if to_model else _EOS)
    texts = Texts(config)
    try:
        if to_model:
            content = _in_thread(lambda: train_sentencepiece(texts, config))
            with files.replacing(path) as unfinished:
                unfinished.write_bytes(content)
        else:
            _write_folder(path, _in_thread(lambda: train_huggingface(texts, config)), config.eos or _EOS, template)
    except OSError as error:
        raise UserError(f"--output={path} can't be written: {reading.problem(os.fspath(path), error)}") from error
    terminal.write(f"{config.output}: {config.vocab_size:,} tokens of {config.algorithm} from {texts.counted()}\n")


def _with_special_tokens(config: TokenizerConfig, eos: str) -> TokenizerConfig:
    """Returns the settings after setting end-of-text to `eos` if it is unset, and removing end-of-text from `special_tokens`.

    Raises:
      UserError: a special token has the name of a token that SentencePiece makes itself.
    """
    eos = config.eos or eos
    special = tuple(dict.fromkeys(token for token in config.special_tokens if token != eos))
    if config.algorithm == "unigram" or config.output.endswith(MODEL_SUFFIX):
        for token in (eos, *special):
            if token in _UNKNOWN_OR_NEWLINE or _BYTE.fullmatch(token):
                raise UserError(
                    f"{token!r} can't be a special token: SentencePiece has a token of its own with this name"
                )
    return dataclasses.replace(config, eos=eos, special_tokens=special)


class Texts(Iterable[str]):
    """Iterates over the texts of a corpus, and logs how many documents it has read."""

    def __init__(self, config: TokenizerConfig):
        """Opens the corpus. Raises UserError if it can't be read, or consists of tokens instead of text."""
        require_one_of("bad_records", config.bad_records, encoding.BAD_RECORDS)
        self._skips = config.bad_records == encoding.SKIP
        source = open_documents(config.documents())
        if isinstance(source, TokenStore):
            raise UserError(f"{listed(config.files)} holds tokens, not text; give the files that it was made of")
        if source.kind == "text" and config.separator is None:
            source.max_record_bytes = source.num_bytes  # each file is one document, however large
        self._source = source
        self._documents = self._bytes = self._skipped = 0

    def __iter__(self) -> Iterator[str]:
        """Yields the texts. Raises UserError if a file can't be read, or a record is bad and `bad_records` is 'raise'."""
        self._documents = self._bytes = self._skipped = 0
        last = time.monotonic()
        for chunk in range(self._source.num_chunks):
            for record in self._source.read_chunk(chunk, 0):
                try:
                    if isinstance(record, BadRecord):
                        raise UserError(record.text)
                    assert isinstance(record.content, bytes)
                    text = decode_utf8(record.content, record.where)
                except UserError as error:
                    if not self._skips:
                        raise UserError(f"{error}. Or skip bad records: --bad_records=skip") from error
                    self._skipped += 1
                    continue
                self._documents += 1
                self._bytes += len(record.content)
                yield text
                if time.monotonic() - last > _LINE_EVERY:
                    last = time.monotonic()
                    logging.info("%s read", self.counted())
        if not self._documents:
            raise UserError(f"{self._source.size_text} hold no text; give at least one document")
        logging.info("%s read; the vocabulary is being made", self.counted())

    def counted(self) -> str:
        """Returns how much text has been read so far, as text: '21 documents, 15,000 bytes'."""
        left_out = f", {self._skipped:,} left out" if self._skipped else ""
        return f"{count_text(self._documents, 'document')}, {self._bytes:,} bytes{left_out}"


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """Yields the lines of texts. Lines of more than `_MAX_LINE_CHARACTERS` are split."""
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), _MAX_LINE_CHARACTERS):
                yield line[start : start + _MAX_LINE_CHARACTERS]


def _blocks(texts: Iterable[str]) -> Iterator[str]:
    """Yields texts. A text of more than `_BLOCK_CHARACTERS` is split into blocks, at ends of lines where possible."""
    for text in texts:
        start = 0
        while start < len(text):
            stop = start + _BLOCK_CHARACTERS
            if stop < len(text):
                stop = text.rfind("\n", start, stop) + 1 or stop
            yield text[start:stop]
            start = stop


def train_sentencepiece(texts: Iterable[str], config: TokenizerConfig, **more: Any) -> bytes:
    """Trains a SentencePiece model and returns the content of its `.model` file.

    The model's tokens are, in this order: unknown (0), end-of-text (1), a newline, the special tokens, one token for each of the
    256 bytes, and the learned tokens.

    Args:
      texts: the texts.
      config: algorithm, vocabulary size and special tokens.
      **more: further settings of SentencePiece's trainer.

    Raises:
      UserError: the text is too small for `vocab_size`.
    """
    import sentencepiece

    model = io.BytesIO()
    settings = {
        "character_coverage": 1.0,
        "eos_piece": config.eos or _SENTENCEPIECE_EOS,
        "num_threads": 1,  # more threads would change the last digits of a unigram model's scores
        **more,
    }
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts),
            model_writer=model,
            vocab_size=config.vocab_size,
            model_type=config.algorithm,
            byte_fallback=True,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            user_defined_symbols=["\n", *config.special_tokens],
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=8 * _MAX_LINE_CHARACTERS,
            minloglevel=2,
            **settings,
        )
    except (RuntimeError, OSError) as error:
        raise UserError(
            f"SentencePiece can't train {config.vocab_size} pieces of {config.algorithm} on these files: {error}"
        ) from error
    return model.getvalue()


def train_huggingface(texts: Iterable[str], config: TokenizerConfig) -> huggingface.Tokenizer:
    """Trains a tokenizer for Hugging Face's library. The tokenizer's first special token is end-of-text.

    Raises:
      UserError: the package tokenizers is missing, or the text is too small for `vocab_size`.
    """
    needed = "a tokenizer.json needs Hugging Face's tokenizers: pip install 'spmd-trainer[hf]'"
    huggingface = imported("tokenizers", needed)
    special = [config.eos or _EOS, *config.special_tokens]
    if config.algorithm == "unigram":
        made = _unigram(huggingface, texts, config)
    else:
        made = huggingface.Tokenizer(huggingface.models.BPE())
        made.pre_tokenizer = huggingface.pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = huggingface.decoders.ByteLevel()
        trainer = huggingface.trainers.BpeTrainer(
            vocab_size=config.vocab_size,
            special_tokens=special,
            initial_alphabet=sorted(huggingface.pre_tokenizers.ByteLevel.alphabet()),
            show_progress=sys.stderr.isatty(),
        )
        made.train_from_iterator(_blocks(texts), trainer)
    made.add_special_tokens(special)
    if (size := made.get_vocab_size()) != config.vocab_size:
        raise UserError(
            f"--vocab_size={config.vocab_size}: {config.algorithm} makes {size} tokens of these files, special tokens and 256 "
            f"bytes included; set --vocab_size={size}, or give more text"
        )
    return made


def _unigram(huggingface: ModuleType, texts: Iterable[str], config: TokenizerConfig) -> huggingface.Tokenizer:
    """Trains a unigram model with SentencePiece and converts it to a Hugging Face tokenizer.

    Hugging Face's own unigram trainer is not used, because its results differ from run to run.
    """
    import sentencepiece

    # A text with the characters '<0x0A>' must not become the token of a byte. So these characters need tokens of their own.
    required = f"<>x{string.digits}ABCDEF"
    content = train_sentencepiece(
        texts, config, eos_piece=config.eos or _EOS, required_chars=required, character_coverage=0.9995
    )
    model = sentencepiece.SentencePieceProcessor(model_proto=content)
    vocabulary = []
    for index in range(model.get_piece_size()):
        piece = model.id_to_piece(index)
        if piece in config.special_tokens or model.is_unknown(index) or model.is_control(index) or model.is_byte(index):
            vocabulary.append((piece, _NEVER))
        else:
            vocabulary.append((piece.replace(SPACE_MARK, " "), model.get_score(index)))
    made = huggingface.Tokenizer(huggingface.models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    made.decoder = huggingface.decoders.Sequence([huggingface.decoders.ByteFallback(), huggingface.decoders.Fuse()])
    return made


def _in_thread(train: Callable[[], _Made]) -> _Made:
    """Calls `train` in a separate thread and returns its result. Ctrl-C can then interrupt the main thread."""
    done: concurrent.futures.Future[_Made] = concurrent.futures.Future()

    def run() -> None:
        try:
            done.set_result(train())
        except BaseException as error:  # raised again by `done.result()`
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result()


def _refuse_other_files(folder: epath.Path, *, has_template: bool) -> None:
    """Raises UserError if a folder holds any files other than those of a tokenizer.

    In a model's folder, for example, the new tokenizer would replace the model's own tokenizer.
    """
    own = {TOKENIZER_FILE, STATING_FILES[0], *([TEMPLATE_FILE] if has_template else [])}
    held = reading.names(os.fspath(folder)) if folder.exists() else []
    if others := [name for name in held if name not in own]:
        raise UserError(f"--output={folder} holds other files ({listed(others)}); give a new folder")


def _write_folder(folder: epath.Path, made: huggingface.Tokenizer, eos: str, template: str | None) -> None:
    """Writes a tokenizer's files for `HuggingFaceTokenizer` and transformers. Raises OSError if they can't be written."""
    found = HuggingFaceTokenizer(made, eos=eos)
    usual = {"eos_token": found.eos_id, "bos_token": found.bos_id, "pad_token": found.pad_id}
    stated = {name: made.id_to_token(index) for name, index in usual.items() if index is not None}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **stated}
    # The larger file first: if the disk has no room for it, the files of an earlier tokenizer stay unchanged.
    contents = {TOKENIZER_FILE: made.to_str(), STATING_FILES[0]: json.dumps(settings, indent=2)}
    for name, content in (
        contents | ({} if template is None else {TEMPLATE_FILE: template.removesuffix("\n")})
    ).items():
        files.write_atomically(folder / name, [content])
