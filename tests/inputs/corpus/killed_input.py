"""Reads batches of a packed mixture and saves its position after each, until it is killed. Run by test_corpus_kills.py.

    python killed_input.py KIND POSITION_FILE BATCHES

KIND is "texts", or "conversations": these are among the texts, in a file beside POSITION_FILE. Prints the number of each batch
and a checksum of it.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import zlib

from chat_goldens import DATA, tokenizer_of
from memory_documents import documents, in_chunks, make, mixture, texts

from spmd_trainer.inputs import Chat, Documents

BATCH = 4


def build(kind, folder):
    """Returns the input of a kind, whose files are in a folder."""
    return {"texts": build_texts, "conversations": build_conversations}[kind](folder)


def build_texts(_):
    """Three sources with different shuffles, one of them with bad records."""
    web, books, code = (texts(count, seed=count, longest=90) for count in (3000, 400, 70))
    web[100:2000:100] = [None] * 19
    return make(
        mixture(
            web=(documents(in_chunks(web, 1000, 800)), 5),
            books=(documents(in_chunks(books, 130, 130), shuffle=50, by_number=False), 2),
            code=(documents(code, shuffle=None, sized=False), 1),
        ),
        batch_size=BATCH,
        window_rows=32,
        seq_len=128,
        bad_records="skip",
    )


def build_conversations(folder):
    """Conversations, some of them bad, among texts. Writes their file if there is none."""
    path = folder / "chats.jsonl"
    if not path.exists():
        lines = [json.dumps(conversation(number)) for number in range(500)]
        lines[10:400:40] = ["{broken"] * 10
        path.write_text("".join(f"{line}\n" for line in lines))
    return make(
        mixture(
            chats=(Documents(str(path), processor=chat()), 3),
            web=(documents(texts(300, longest=90)), 1),
        ),
        tokenizer=tokenizer_of("chatml"),
        batch_size=BATCH,
        window_rows=32,
        seq_len=128,
        bad_records="skip",
    )


def chat():
    """Returns what makes tokens of conversations."""
    return Chat(chat_template=str(DATA / "templates" / "chatml_marked.jinja"), too_long="cut")


def conversation(number):
    """Returns a conversation of one question and its answer."""
    said = (("user", f"{number}?"), ("assistant", "yes!" * (number % 9 + 1)))
    return {"messages": [{"role": role, "content": text} for role, text in said]}


def main() -> None:
    """Goes on from the position in the file, if there is one."""
    kind, position, count = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])
    source, first = build(kind, position.parent), 0
    if position.exists():
        head, _, state = position.read_bytes().partition(b"\n")
        first = int(head)
        source.set_state(state)
    for number in range(first, count):
        batch = source.get_next()
        checksum = zlib.crc32(b"".join(batch[name].tobytes() for name in sorted(batch)))
        sys.stdout.write(f"{number} {checksum}\n")
        sys.stdout.flush()
        new = position.with_suffix(".new")
        new.write_bytes(b"%d\n" % (number + 1) + source.get_state())
        os.replace(new, position)


if __name__ == "__main__":
    main()
