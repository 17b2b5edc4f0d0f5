"""Records how Hugging Face transformers tokenises conversations, and which tokens it attributes to the assistant.

Runs in a separate environment with transformers (`make interop` creates it), without this project:

    python tools/make_chat_goldens.py DIR

It reads DIR/conversations.jsonl and DIR/templates/*.jinja, trains two small tokenizers if missing (DIR/byte_level like
those of Llama 3 and of models with ChatML, DIR/byte_fallback like Gemma's), and writes DIR/expected.json: {template:
[{ids, mask} of each conversation]}, null where the template refuses it. A conversation with `templates` is only for
these templates.

Templates with `{% generation %}` have the mask of `return_assistant_tokens_mask`. For others, transformers has no
mask; theirs covers the characters that each message of the assistant adds to the generation prompt before it.

tests/inputs/data/chat holds the output.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import jinja2
import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

CHATML = ["<|im_start|>", "<|im_end|>"]
LLAMA_3 = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"]
GEMMA = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
# How Llama 3's tokenizer splits a text.
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TOKENIZERS = {"chatml": "byte_level", "llama_3": "byte_level", "gemma": "byte_fallback"}


def byte_level(texts: list[str]) -> Any:
    """Trains a byte-level BPE. Its post-processor takes spaces out of the offsets, like Llama 3's."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=360,
        special_tokens=[*CHATML, *LLAMA_3],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=LLAMA_3[0], eos_token=LLAMA_3[3])


def byte_fallback(texts: list[str]) -> Any:
    """Trains a BPE of characters, with byte tokens for unknown ones."""
    bpe = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    bpe.normalizer = normalizers.Replace(" ", "\u2581")
    bpe.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    bpe.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[*GEMMA, *(f"<0x{byte:02X}>" for byte in range(256))],
        limit_alphabet=70,
        show_progress=False,
    )
    bpe.train_from_iterator([text.replace(" ", "\u2581") for text in texts], trainer)
    described = json.loads(bpe.to_str())
    # Tokens of bytes are part of the vocabulary, not special: a text that spells one must not become one.
    described["added_tokens"] = [token for token in described["added_tokens"] if token["content"] in GEMMA]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(described)),
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
    )


def tokens_and_mask(tokenizer: Any, template: str, conversation: dict[str, Any]) -> dict[str, list[int]] | None:
    """Returns the tokens of a conversation and 1 for each of the assistant's; None if the template refuses it."""
    arguments = {
        "tools": conversation.get("tools"),
        "chat_template": template,
        **conversation.get("chat_template_kwargs", {}),
    }
    messages = conversation["messages"]
    try:
        if "generation %}" in template:
            found = tokenizer.apply_chat_template(
                messages, return_dict=True, return_assistant_tokens_mask=True, **arguments
            )
            return {"ids": found["input_ids"], "mask": found["assistant_masks"]}
        text = tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
    except (jinja2.TemplateError, TypeError):
        return None
    encoded = tokenizer(text, add_special_tokens=False)
    mask = [0] * len(encoded["input_ids"])
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = tokenizer.apply_chat_template(messages[:i], tokenize=False, add_generation_prompt=True, **arguments)
        through = tokenizer.apply_chat_template(messages[: i + 1], tokenize=False, **arguments)
        if not (through.startswith(prompt) and text.startswith(through)):
            raise ValueError(f"not a prefix: {messages}")
        own = {encoded.char_to_token(at) for at in range(len(prompt), len(through))} - {None}
        for token in range(min(own), max(own) + 1):
            mask[token] = 1
    return {"ids": encoded["input_ids"], "mask": mask}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=pathlib.Path)
    directory: pathlib.Path = parser.parse_args().directory
    # Not splitlines(): a text may have other line separators of Unicode.
    lines = (directory / "conversations.jsonl").read_text().strip().split("\n")
    conversations = [json.loads(line) for line in lines]
    made = {}
    for name, make in (("byte_level", byte_level), ("byte_fallback", byte_fallback)):
        folder = directory / name
        if not folder.exists():
            make(lines).save_pretrained(folder)
        made[name] = transformers.AutoTokenizer.from_pretrained(folder)
    expected = {}
    for path in sorted((directory / "templates").glob("*.jinja")):
        (kind,) = [tokenizer for family, tokenizer in TOKENIZERS.items() if path.stem.startswith(family)]
        template = path.read_text()
        expected[path.stem] = [
            tokens_and_mask(made[kind], template, conversation)
            if path.stem in conversation.get("templates", [path.stem])
            else None
            for conversation in conversations
        ]
    rows = ",\n".join(
        f" {json.dumps(name)}: [\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in found) + "\n ]"
        for name, found in expected.items()
    )
    (directory / "expected.json").write_text(f"{{\n{rows}\n}}\n")


if __name__ == "__main__":
    main()
