"""Wraps Hugging Face tokenizers for the text inputs. Needs the package tokenizers (pip extra `hf`)."""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.errors.installation import imported
from spmd_trainer.inputs import files, tokenizers
from spmd_trainer.inputs.huggingface_files import ADDED_TOKENS, STATING_FILES, content_of, read_source
from spmd_trainer.storage import json_values

if TYPE_CHECKING:
    import tokenizers as huggingface

# Common texts of the end-of-text, beginning-of-text and padding tokens, for tokenizers whose files do not name these tokens.
_USUAL = {
    "eos": (
        "</s>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<eos>",
        "<EOS>",
        "[EOS]",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    ),
    "bos": (
        "<s>",
        "<|begin_of_text|>",
        "<|startoftext|>",
        "<bos>",
        "<BOS>",
        "[BOS]",
        "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    ),
    "pad": ("<pad>", "<|pad|>", "<PAD>", "[PAD]"),
}
# Names of special tokens in transformers.
_NAMED_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
# Parts of a tokenizer.json that do not change the tokens: the post-processor only adds special tokens, and is off.
_WITHOUT_EFFECT = ("version", "truncation", "padding", "post_processor")
# Characters whose UTF-8 has every possible byte: all characters of one and two bytes, and at least one character for each
# possible first byte of a longer character.
_EVERY_BYTE = "".join(map(chr, [*range(0x801), *range(0x1000, 0x110000, 0x1000)]))
# Encoding takes about 130 bytes of memory per byte of text.
_MAX_TEXT_BYTES = 2**28


class HuggingFaceTokenizer:
    """Wraps a Hugging Face tokenizer. Texts are UTF-8.

    A text's tokens are those of `encode(text, add_special_tokens=False)`, because the inputs add end-of-text themselves.
    Padding and truncation settings of the tokenizer are ignored. As in Hugging Face's own library, a special token that
    occurs in a text as characters ('<|endoftext|>') is encoded as that token, unless `encode_special_tokens` is set. A
    character without a symbol in a BPE's vocabulary is an error, whereas Hugging Face's library would drop it.

    Attributes:
      eos_id: id of the end-of-text token.
      bos_id: id of the beginning-of-text token; None if there is none.
      pad_id: id of the padding token; None if there is none.
    """

    def __init__(
        self,
        source: Any = "",
        *,
        eos: str | int | None = None,
        bos: str | int | None = None,
        pad: str | int | None = None,
        encode_special_tokens: bool = False,
    ):
        """Reads the tokenizer.

        Args:
          source: path of a tokenizer.json or of a folder that holds one, with special tokens named in
            tokenizer_config.json and special_tokens_map.json in the same folder; a `tokenizers.Tokenizer`; or a fast
            tokenizer of transformers. A tokenizer object is copied.
          eos: the end-of-text token or its id. None takes the token that the files or the transformers tokenizer name, or
            else the only token in the vocabulary that is a common end-of-text token, such as '</s>'.
          bos: the beginning-of-text token, given or found as for `eos`. Inputs put it before each text if their setting
            `start` selects it.
          pad: the padding token, given or found as for `eos`. Inputs don't use it.
          encode_special_tokens: True encodes special tokens that occur in a text like any other text. Set it in this
            argument, because a `tokenizers.Tokenizer` loses its own setting when a config is cloned.

        Raises:
          UserError: the package tokenizers is missing; `source` can't be read or is not a tokenizer; end-of-text is unknown;
            or the vocabulary lacks a special token that an argument or the files name.
        """
        self.name, self._content, stated, self.chat_templates = read_source(source)
        backend = getattr(source, "backend_tokenizer", source)
        self.encodes_special_tokens = encode_special_tokens or bool(getattr(backend, "encode_special_tokens", False))
        self._stated = stated
        self._check_added(stated)
        eos_id = self._special("eos", eos, stated)
        if eos_id is None:
            raise UserError(self._no_end())
        self.eos_id = eos_id
        self.bos_id = self._special("bos", bos, stated)
        self.pad_id = self._special("pad", pad, stated)

    @functools.cached_property
    def _tokenizer(self) -> huggingface.Tokenizer:
        return _load(self._content, self.encodes_special_tokens, self.name)

    @functools.cached_property
    def _exact_tokenizer(self) -> huggingface.Tokenizer:
        """The tokenizer without its post-processor, which could leave spaces out of the tokens' character positions."""
        import tokenizers as huggingface

        found = huggingface.Tokenizer.from_str(self._tokenizer.to_str())
        found.post_processor = None
        found.encode_special_tokens = self.encodes_special_tokens
        return found

    def __getstate__(self) -> dict[str, Any]:
        # A copied or pickled `tokenizers.Tokenizer` forgets encode_special_tokens.
        return {name: value for name, value in self.__dict__.items() if name not in ("_tokenizer", "_exact_tokenizer")}

    def __repr__(self) -> str:
        return f"HuggingFaceTokenizer({self.name}, vocab_size={self.vocab_size}, eos_id={self.eos_id})"

    @functools.cached_property
    def vocab_size(self) -> int:
        """Highest token id (added tokens included) + 1. Some lower ids may be unused."""
        return max(self.vocabulary.values()) + 1

    @functools.cached_property
    def encoded_vocab_size(self) -> int:
        """One more than the highest id among end-of-text and the tokens of ordinary texts; at most `vocab_size`.

        Excludes special tokens that were added to the model's own vocabulary, because ordinary texts don't contain them.
        """
        added = self._tokenizer.get_added_tokens_decoder()
        in_text = {index for index, token in added.items() if not token.special}
        own = self._tokenizer.get_vocab(with_added_tokens=False).values()
        return max(self.eos_id, *own, *in_text) + 1

    @functools.cached_property
    def adds_bos(self) -> bool:
        """True if the tokenizer's post-processor puts beginning-of-text before a text.

        As in transformers 5, the setting add_bos_token in tokenizer_config.json is ignored, because tokenizer.json decides.
        """
        return self.bos_id is not None and self._tokenizer.encode("").ids[:1] == [self.bos_id]

    @functools.cached_property
    def special_tokens(self) -> dict[str, str]:
        """{name in chat templates: token} for the special tokens in the tokenizer's files: {'bos_token': '<s>', ...}."""
        stated = {name: content_of(self._stated.get(name)) for name in _NAMED_TOKENS}
        return {name: token for name, token in stated.items() if token is not None}

    @property
    def vocabulary(self) -> dict[str, int]:
        """{token as written in the vocabulary: its id} for all tokens, including added ones."""
        return self._tokenizer.get_vocab(with_added_tokens=True)

    @property
    def description(self) -> dict[str, Any]:
        """The parsed content of the tokenizer.json."""
        return json_values.parse_object(self._content)

    @functools.cached_property
    def bytes_per_token(self) -> int:
        """Byte length of the longest token as written in the vocabulary, at least 2."""
        return max(2, max(len(token.encode()) for token in self.vocabulary))

    def encode(self, text: bytes, path: str, *, cut: bool = False) -> np.ndarray:
        """Returns the tokens of a text, int32 [n]. If `cut` is True, ignores an incomplete last character.

        Raises:
          UserError: the text isn't UTF-8, is too large to be encoded at once, or has a character without a token. The
            message names the file `path`.
        """
        return self._encode([self._checked(text, path, cut=cut)], [path])[0]

    def encode_batch(self, texts: Sequence[bytes], wheres: Sequence[str]) -> list[np.ndarray]:
        """Returns a list with the tokens of each text, int32 [n]. Uses all cores.

        Raises UserError as `encode` does. `wheres` has the name of each text for error messages.
        """
        return self._encode([self._checked(text, where) for text, where in zip(texts, wheres, strict=True)], wheres)

    def _checked(self, text: bytes, path: str, *, cut: bool = False) -> str:
        decoded = tokenizers.decode_utf8(text, path, cut=cut)
        if len(text) > _MAX_TEXT_BYTES:
            raise UserError(
                f"{path}: a text of {len(text)} bytes is too large for a Hugging Face tokenizer, which needs 130 times as "
                f"much memory; split the file, e.g. with `split -C {_MAX_TEXT_BYTES // 2}`, or let PackedTextInput cut it "
                "into documents by its `separator`"
            )
        self._refuse_lost_characters(decoded, path)
        return decoded

    def _encode(self, texts: Sequence[str], wheres: Sequence[str]) -> list[np.ndarray]:
        try:
            # `encode_batch` also keeps each token's offsets and spelling, and takes twice as long.
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises bare Exception
            if len(texts) > 1:  # raises the error of one text
                return [self._encode([text], [where])[0] for text, where in zip(texts, wheres, strict=True)]
            raise UserError(
                f"{wheres[0]}: {self.name} can't encode this text: {error}. Use a tokenizer with a token for unknown text, or "
                "leave the file out of `files`"
            ) from error
        return [np.asarray(found.ids, np.int32) for found in encodings]

    def encode_with_offsets(self, texts: Sequence[str], wheres: Sequence[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns for each text its tokens, int32 [n], and each token's (start, end) character positions, int64 [n, 2].

        One character may consist of several tokens. `wheres` has the name of each text for error messages.

        Raises:
          UserError: as in `encode`.
        """
        for text, where in zip(texts, wheres, strict=True):
            self._refuse_lost_characters(text, where)
        try:
            encodings = self._exact_tokenizer.encode_batch(list(texts), add_special_tokens=False)
        except Exception:  # the library raises bare Exception
            for text, where in zip(texts, wheres, strict=True):
                self.encode(text.encode(), where)  # raises the error of one text
            raise
        return [
            (np.asarray(found.ids, np.int32), np.asarray(found.offsets, np.int64).reshape(-1, 2)) for found in encodings
        ]

    def spell(self, ids: Any) -> str:
        """Decodes tokens to text, including special tokens. `ids`: integers [n]."""
        return self._tokenizer.decode(np.asarray(ids).tolist(), skip_special_tokens=False)

    def _refuse_lost_characters(self, text: str, path: str) -> None:
        """Raises UserError if Hugging Face's library would drop characters of the text. The message names the file `path`."""
        symbols = self._symbols_of_lossy_bpe
        if symbols is None:
            return
        for token in self._tokenizer.get_added_tokens_decoder().values():
            if not (token.special and self.encodes_special_tokens):
                text = text.replace(token.content, " ")  # found before the model sees its characters
        if self._tokenizer.normalizer is not None:
            text = self._tokenizer.normalizer.normalize_str(text)
        space = self._symbols(" ")
        for character in sorted(set(text)):
            # Pre-tokenizers may put a space before a text.
            needed = self._symbols(character) - (set() if character == " " else space)
            if not needed <= symbols:
                raise UserError(
                    f"{path}: {self.name} has no token for {character!r} (U+{ord(character):04X}), and would leave it out. "
                    "Train the tokenizer with an initial_alphabet of pre_tokenizers.ByteLevel.alphabet() or with an "
                    "unk_token, or leave the file out of `files`"
                )

    @functools.cached_property
    def _symbols_of_lossy_bpe(self) -> frozenset[str] | None:
        """The vocabulary of a BPE tokenizer that silently drops unknown characters; None for other tokenizers."""
        import tokenizers as huggingface

        model = self._tokenizer.model
        # Other models have a token for unknown text, or raise. With prefixes or suffixes, a character has several symbols.
        if not isinstance(model, huggingface.models.BPE) or model.unk_token or model.byte_fallback:
            return None
        if model.continuing_subword_prefix or model.end_of_word_suffix:
            return None
        symbols = frozenset(self._tokenizer.get_vocab(with_added_tokens=False))
        by_byte = symbols.intersection(huggingface.pre_tokenizers.ByteLevel.alphabet())
        return None if self._symbols(_EVERY_BYTE) <= by_byte else symbols

    def _symbols(self, text: str) -> set[str]:
        """Returns the symbols of a text after pre-tokenization: its characters, or symbols that stand for its bytes."""
        splitter = self._tokenizer.pre_tokenizer
        pieces = [(text, ())] if splitter is None else splitter.pre_tokenize_str(text)
        return {symbol for piece, _ in pieces for symbol in piece}

    def decode(self, ids: Any, lengths: Any) -> list[str]:
        """Decodes the first lengths[b] ids of each row b of `ids` [B, T]. Drops special tokens and ids out of range."""
        rows = tokenizers.ids_of_text(ids, lengths, self.vocab_size, self.eos_id)
        return [self._tokenizer.decode(row.tolist(), skip_special_tokens=True) for row in rows]

    def fingerprint(self) -> dict[str, Any]:
        """Returns everything on which the tokens depend: a checksum of the tokenizer's content, and the end-of-text id."""
        return {"huggingface_tokenizer": self._checksum, "eos_id": self.eos_id}

    @functools.cached_property
    def _checksum(self) -> int:
        relevant = {key: value for key, value in self.description.items() if key not in _WITHOUT_EFFECT}
        text = json.dumps([relevant, self.encodes_special_tokens], sort_keys=True)
        return zlib.crc32(text.encode())

    def _special(self, kind: str, given: str | int | None, stated: Mapping[str, Any]) -> int | None:
        if given is not None:
            return self._id_of(given, f"{kind}={given!r}")
        token = content_of(stated.get(f"{kind}_token"))
        if token is not None:
            return self._id_of(token, f"{kind}_token={token!r} of {' and '.join(STATING_FILES)}")
        known = self._usual(kind)
        return self._tokenizer.token_to_id(known[0]) if len(known) == 1 else None

    def _usual(self, kind: str) -> list[str]:
        return [spelling for spelling in _USUAL[kind] if self._tokenizer.token_to_id(spelling) is not None]

    def _no_end(self) -> str:
        candidates = self._usual("eos")
        why = (
            f"several of its tokens could be it: {', '.join(candidates)}"
            if candidates
            else "none of its tokens is spelled like one"
        )
        special = files.listed(self._special_tokens())
        return (
            f"{self.name} names no end-of-text token, and {why}; set eos_id (in HuggingFaceTokenizer: eos). Its special "
            f"tokens are: {special}"
        )

    def _id_of(self, token: str | int, setting: str) -> int:
        if isinstance(token, str):
            found = self._tokenizer.token_to_id(token)
            if found is None:
                known = self.vocabulary
                near = did_you_mean(token, self._special_tokens() or sorted(known, key=known.__getitem__)[:20])
                raise UserError(f"{setting} is not a token of {self.name}{near}")
            return found
        is_id = isinstance(token, int | np.integer) and not isinstance(token, bool) and token >= 0
        if not is_id or self._tokenizer.id_to_token(int(token)) is None:
            raise UserError(f"{setting} is not a token of {self.name}, whose ids go from 0 to {self.vocab_size - 1}")
        return int(token)

    def _special_tokens(self) -> list[str]:
        added = self._tokenizer.get_added_tokens_decoder()
        return [added[index].content for index in sorted(added)]

    def _check_added(self, stated: Mapping[str, Any]) -> None:
        """Raises UserError if tokenizer.json lacks tokens that tokenizer_config.json adds."""
        for index, token in stated.get(ADDED_TOKENS, {}).items():
            if self._tokenizer.id_to_token(int(index)) != content_of(token):
                raise UserError(
                    f"the tokenizer_config.json beside {self.name} adds the token {content_of(token)!r} as id {index}, and "
                    f"{self.name} has {self._tokenizer.id_to_token(int(index))!r} there; save the tokenizer again, with "
                    "save_pretrained of transformers' fast tokenizers"
                )


# Cached: a job builds an input several times, and a large tokenizer takes a second to load.
@functools.lru_cache(maxsize=4)
def _load(content: str, encode_special_tokens: bool, name: str) -> huggingface.Tokenizer:
    huggingface = imported("tokenizers", f"{name} needs Hugging Face's tokenizers: pip install 'spmd-trainer[hf]'")
    try:
        tokenizer = huggingface.Tokenizer.from_str(content)
    except Exception as error:  # the library raises bare Exception
        raise UserError(
            f"{name} is not a tokenizer that tokenizers {huggingface.__version__} reads: {error}. A newer version may"
        ) from error
    dropout = getattr(tokenizer.model, "dropout", None)
    if dropout:
        raise UserError(
            f"{name} has a BPE dropout of {dropout}, so that a text's tokens differ each time; set its model.dropout to None"
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = encode_special_tokens
    return tokenizer
