"""Reads batches of a packed mixture and saves its position after each, until it is killed. Run by test_corpus_kills.py.

    python killed_input.py POSITION_FILE BATCHES

Prints the number of each batch and a checksum of it.
"""

from __future__ import annotations

import os
import pathlib
import sys
import zlib

from memory_documents import documents, in_chunks, make, mixture, texts

BATCH = 4


def build():
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


def main() -> None:
    """Goes on from the position in the file, if there is one."""
    position, count = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    source, first = build(), 0
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
