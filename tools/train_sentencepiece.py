"""Trains a SentencePiece model from text files, for `inputs.SentencePieceTokenizer`.

    python tools/train_sentencepiece.py --output=runs/words.model --vocab_size=4096 corpus/*.txt

Decoding restores every text byte for byte: text is not normalized, spaces are kept, and a character without a piece is
encoded as bytes. (One exception: U+2581, SentencePiece's mark of a space, becomes a space.) The same files and
settings give the same model.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Iterator, Sequence

import spmd_trainer  # noqa: F401  (the bridge, before anything imports praxis)
from spmd_trainer import storage
from spmd_trainer.errors import UserError, terminal
from spmd_trainer.inputs import files as input_files
from spmd_trainer.inputs import tokenizers
from spmd_trainer.storage import files

# SentencePiece skips longer sentences, so longer lines are split.
_MAX_LINE_CHARACTERS = 1024


def read_lines(found: input_files.TextFiles) -> Iterator[str]:
    """Yields the lines of the files; long lines are split, empty ones are skipped.

    Raises:
      UserError: a file can't be read or isn't UTF-8.
    """
    for i, path in enumerate(found.paths):
        for line in tokenizers.decode_utf8(found.read(i), path).split("\n"):
            for start in range(0, len(line), _MAX_LINE_CHARACTERS):
                yield line[start : start + _MAX_LINE_CHARACTERS]


def train(paths: Sequence[str], *, vocab_size: int, model_type: str = "bpe", threads: int = 1) -> bytes:
    """Trains a model and returns the content of its `.model` file.

    Args:
      paths: text files, UTF-8.
      vocab_size: number of pieces, including 256 bytes, unknown (0), end-of-text (1) and newline.
      model_type: 'bpe' (Sennrich et al., 2016) or 'unigram' (Kudo, 2018).
      threads: number of threads. More than one may change the last digits of the scores of 'unigram'.

    Raises:
      UserError: there are no files, a file can't be read or isn't UTF-8, or the text is too small for `vocab_size`.
    """
    import sentencepiece

    found = input_files.find_files(paths)
    lines = read_lines(found)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
            vocab_size=vocab_size,
            model_type=model_type,
            num_threads=threads,
            character_coverage=1.0,
            byte_fallback=True,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            user_defined_symbols=["\n"],
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=8 * _MAX_LINE_CHARACTERS,
            minloglevel=2,
        )
    except (RuntimeError, OSError) as error:
        raise UserError(
            f"SentencePiece can't train {vocab_size} pieces of {model_type} on these files: {error}"
        ) from error
    return model.getvalue()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns 0, or 2 if the command or a file is invalid."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", help="text files, UTF-8")
    parser.add_argument("--output", required=True, help="path of the model to write, e.g. runs/words.model")
    parser.add_argument("--vocab_size", type=int, default=4096)
    parser.add_argument("--model_type", choices=("bpe", "unigram"), default="bpe")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    try:
        output = storage.directory("--output", args.output)
        if storage.is_remote(output):
            raise UserError(f"--output={output} is in an object store; give a local file, and copy it there")
        files.check_target("--output", output, "words.model")
        model = train(args.files, vocab_size=args.vocab_size, model_type=args.model_type, threads=args.threads)
    except UserError as error:
        terminal.write(f"{error}\n", sys.stderr)
        return 2
    partial = f"{output}.partial"
    with open(partial, "wb") as file:
        file.write(model)
    os.replace(partial, output)
    print(f"{args.output}: {args.vocab_size} pieces from {len(args.files)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
