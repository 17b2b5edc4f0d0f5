"""Folders of a tokenizer with a chat template, for the inputs of conversations."""

import json

from chat_templates import CHATML, SPECIAL_TOKENS
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def tokenizer():
    """Every byte is a token, and so is every special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens(SPECIAL)
    return found


def chat_folder(directory):
    """Writes the tokenizer and the template ChatML to a new directory; returns it."""
    directory.mkdir()
    tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({**SPECIAL_TOKENS, "chat_template": CHATML}))
    return directory
