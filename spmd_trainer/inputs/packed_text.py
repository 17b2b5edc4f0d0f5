"""Short documents packed into rows, each document a segment.

A document's tokens and one end-of-text are cut into pieces of at most T tokens. Each piece is one segment of one row:
attention stays within the segment, and positions in it count from 0. A segment's first id is the token before its
first label: end-of-text at a document's beginning (beginning-of-text with `start='bos'`). Every token is therefore
predicted exactly once.

Example, T = 8, documents b"hello", b"a":
    ids         EOS h e l l o EOS a
    labels        h e l l o EOS a EOS
    segment_ids   1 1 1 1 1 1 2 2
    segment_pos   0 1 2 3 4 5 0 1
"""

from __future__ import annotations

from typing import Any

from spmd_trainer.inputs import files, text_base
from spmd_trainer.inputs.corpus.corpus_input import CorpusInput
from spmd_trainer.inputs.corpus.documents import Documents


class PackedTextInput(CorpusInput):
    """Language-model input over the documents in text files, packed into rows (see the module docstring, and `CorpusInput`).

    Attributes:
      files, allow_binary: see `text_base.TokenizedFiles`.
      tokenizer, eos_id, start: see `text_base.TokenizedInput`.
      seq_len, packing, shuffle, window_rows, bad_records: see `CorpusInput`.
      separator: text between the documents of a file, e.g. a newline, not part of them; None makes each file one
        document. Empty documents are left out.
    """

    files: Any = None
    separator: str | None = None
    allow_binary: bool = False

    def __post_init__(self) -> None:
        # Whether a file is text depends on the tokenizer, see `_bound`.
        self.source = Documents(self.files, kind="text", separator=self.separator, allow_binary=True)
        super().__post_init__()

    def _bound(self, documents: Documents) -> Documents:
        found = files.find_files(documents.files)
        if not self.allow_binary:
            for index, path in enumerate(found.paths):
                text_base.refuse_unless_text(path, found.read(index, limit=text_base.HEAD_BYTES), self.tokenizer)
        return super()._bound(documents)
