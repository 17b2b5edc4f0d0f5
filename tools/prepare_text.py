"""Tokenises text or conversations ahead of training, for `inputs.CorpusInput` and `inputs.ChatInput`.

    python tools/prepare_text.py --output=runs/tokens --tokenizer=tokenizer.json --workers=8 'web/*.parquet'
    python tools/prepare_text.py --output=gs://bucket/tokens --column=content --bad_records=skip gs://bucket/code
    python tools/prepare_text.py --output=runs/chats --tokenizer=models/llama --conversations --seq_len=4096 chats.jsonl

The files may be JSON lines (also .gz, .zst), Parquet, Arrow, ArrayRecord, TFRecord, tar shards or text. The input
reads the output folder: `Documents("runs/tokens")`; of conversations, `files="runs/chats"` with the same `seq_len`,
template and `turns`. After an interruption, run the command again: it keeps finished parts.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence

from etils import epath

import spmd_trainer  # noqa: F401  (the bridge, before anything imports praxis)
from spmd_trainer.cli import log_lines
from spmd_trainer.errors import UserError, terminal
from spmd_trainer.inputs import Chat
from spmd_trainer.inputs.corpus import encoding, prepare
from spmd_trainer.inputs.corpus.documents import Documents
from spmd_trainer.inputs.corpus.token_store import Description
from spmd_trainer.storage import access


def summary(output: str, found: Description) -> str:
    counts = found.statistics
    per_document = counts["tokens"] / max(1, counts["documents"])
    lines = [
        f"{output}: {counts['documents']:,} documents, {counts['tokens']:,} tokens ({per_document:.1f} per document, "
        f"{counts['bytes'] / max(1, counts['tokens']):.2f} bytes per token), {counts['empty']:,} empty, "
        f"{counts['skipped']:,} left out"
    ]
    lines += [f"  left out: {text}" for text in counts["named"]]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns 0; 2 if the command, a file or a record is invalid; 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", help="paths, globs or directories; local, gs:// or s3://")
    parser.add_argument("--output", required=True, help="folder to write")
    parser.add_argument("--tokenizer", help="a SentencePiece .model, a tokenizer.json or its folder; default: bytes")
    parser.add_argument("--column", default="text", help="column or key with the text; 'a.b' reaches into objects")
    parser.add_argument("--kind", help="kind of the files, if their names don't say it: jsonl, parquet, arrow, ...")
    parser.add_argument(
        "--separator", help="text between the documents of a text file; default: a file is one document"
    )
    parser.add_argument("--bad_records", choices=(encoding.RAISE, encoding.SKIP), default=encoding.RAISE)
    parser.add_argument("--conversations", action="store_true", help="the records are conversations")
    parser.add_argument("--seq_len", type=int, help="of conversations: tokens per row of the input")
    parser.add_argument("--chat_template", help="of conversations: name, path or text; default: the tokenizer's own")
    parser.add_argument(
        "--turns", default="all", help="of conversations: the assistant's messages that count, all or last"
    )
    parser.add_argument("--too_long", default="error", help="of conversations: error, drop or cut")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    args = parser.parse_args(argv)
    if args.conversations and not args.seq_len:
        parser.error("--conversations needs --seq_len: conversations that are too long are refused, dropped or cut")
    chat = Chat(chat_template=args.chat_template, turns=args.turns, too_long=args.too_long, seq_len=args.seq_len or 0)
    documents = Documents(tuple(args.files), column=args.column, kind=args.kind, separator=args.separator)
    documents = dataclasses.replace(documents, processor=chat if args.conversations else None)
    task = prepare.Preparation(documents, args.tokenizer, args.output, args.bad_records)
    try:
        with log_lines.shown(), access.outages_explained(epath.Path(args.output)):
            found = prepare.prepare(task, workers=max(1, args.workers))
    except UserError as error:
        terminal.write(f"{error}\n", sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; run the same command again to resume: finished parts are kept", file=sys.stderr)
        return 130
    terminal.write(f"{summary(args.output, found)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
