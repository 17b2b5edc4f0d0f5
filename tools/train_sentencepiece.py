"""Trains a SentencePiece model from text files, for `inputs.SentencePieceTokenizer`.

    python tools/train_sentencepiece.py --output=runs/words.model --vocab_size=4096 corpus/*.txt

The model gives every text back byte for byte: nothing is normalized, no space is added or dropped, and a character that it
has no piece for is spelled in bytes. (One exception: U+2581, SentencePiece's own mark of a space, becomes a space.) The same
files and settings give the same model.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Iterator, Sequence

import spmd_trainer  # noqa: F401  (the bridge, before anything imports praxis)
from spmd_trainer.errors import UserError
from spmd_trainer.inputs import files as input_files
from spmd_trainer.inputs import tokenizers

# SentencePiece leaves out longer sentences; a line without an end is cut here instead.
_MAX_LINE_CHARACTERS = 1024


def read_lines(found: input_files.TextFiles) -> Iterator[str]:
    """Lines of the files, long ones in parts, empty ones left out.

    Raises:
      UserError: a file can't be read or isn't UTF-8.
    """
    for i, path in enumerate(found.paths):
        for line in tokenizers.decode_utf8(found.read(i), path).split("\n"):
            for start in range(0, len(line), _MAX_LINE_CHARACTERS):
                yield line[start : start + _MAX_LINE_CHARACTERS]


def train(paths: Sequence[str], *, vocab_size: int, model_type: str = "bpe", threads: int = 1) -> bytes:
    """Trains a model.

    Args:
      paths: text files, UTF-8.
      vocab_size: pieces: 256 bytes, unknown (0), end-of-text (1) and newline among them.
      model_type: 'bpe' (Sennrich et al., 2016) or 'unigram' (Kudo, 2018).
      threads: for 'unigram', more than one may change the last digits of scores.

    Returns:
      The content of a `.model` file.

    Raises:
      UserError: no files, a file that can't be read or isn't UTF-8, or a `vocab_size` that the text doesn't carry.
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
    """The command line. Returns 0, or 2 where something in it or in the files is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", help="text files, UTF-8")
    parser.add_argument("--output", required=True, help="where the model goes, e.g. runs/words.model")
    parser.add_argument("--vocab_size", type=int, default=4096)
    parser.add_argument("--model_type", choices=("bpe", "unigram"), default="bpe")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(argv)
    try:
        model = train(args.files, vocab_size=args.vocab_size, model_type=args.model_type, threads=args.threads)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    os.makedirs(os.path.dirname(os.path.abspath(args.output)), exist_ok=True)
    partial = f"{args.output}.partial"
    with open(partial, "wb") as file:
        file.write(model)
    os.replace(partial, args.output)
    print(f"{args.output}: {args.vocab_size} pieces from {len(args.files)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
