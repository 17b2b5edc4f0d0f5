"""Makes a Hugging Face folder for test runs: a tiny Llama of random weights, with a tokenizer and a chat template.

    python -m spmd_trainer.experiments.lm.tiny_llama --text 'text/*.txt' models/tiny

Needs the extra `hf`. The tokenizer, a byte-level BPE trained on the text files, encodes any text.
"""

from __future__ import annotations

import argparse
import glob
import json
import pathlib
import sys

import numpy as np

from spmd_trainer.errors import terminal
from spmd_trainer.hf import config_json, tensor_names
from spmd_trainer.hf.families import FAMILIES
from spmd_trainer.models.decoder_spec import DecoderSpec

ARCHITECTURE = "LlamaForCausalLM"
BOS, EOS = "<s>", "</s>"
# The marks delimit the assistant's text, on which fine-tuning computes the loss.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}"
)
STDDEV = 0.05


def make_tokenizer(texts: list[str], vocab_size: int, folder: pathlib.Path) -> tuple[int, int, int]:
    """Trains a tokenizer on the text files `texts` and writes it. Returns its vocabulary size and the ids of BOS and EOS."""
    from tokenizers import ByteLevelBPETokenizer, processors

    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train(texts, vocab_size=vocab_size, special_tokens=[BOS, EOS], show_progress=False)
    bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
    tokenizer._tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos)])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": BOS, "eos_token": EOS}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **names, "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    return tokenizer.get_vocab_size(), bos, eos


def make_folder(folder: pathlib.Path, texts: list[str], seed: int) -> None:
    """Writes config, random weights and tokenizer to `folder`. `texts`: paths of the text files that train the tokenizer."""
    from safetensors.numpy import save_file

    vocab_size, bos, eos = make_tokenizer(texts, 512, folder)
    spec = DecoderSpec(
        vocab_size=vocab_size,
        model_dims=96,
        hidden_dims=256,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dims=16,
        max_positions=512,
    )
    rng = np.random.default_rng(seed)
    tensors = {}
    for variable in tensor_names.variables_of(spec, FAMILIES[ARCHITECTURE]).values():
        for piece in variable.pieces:
            is_norm = variable.path.endswith("/scale")
            values = np.ones(piece.shape) if is_norm else rng.normal(scale=STDDEV, size=piece.shape)
            tensors[piece.name] = values.astype(np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ids = {"bos_token_id": bos, "eos_token_id": eos}
    config = {**config_json.config_of(spec, ARCHITECTURE), **ids, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps(ids))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", required=True, help="pattern of the text files that the tokenizer is trained on")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    parser.add_argument("folder", type=pathlib.Path, help="the folder to write; new or empty")
    args = parser.parse_args()
    texts = sorted(glob.glob(args.text, recursive=True))
    if not texts:
        parser.error(f"--text: no file matches {args.text}")
    if args.folder.exists() and any(args.folder.iterdir()):
        parser.error(f"{args.folder} is not empty; give a new folder")
    args.folder.mkdir(parents=True, exist_ok=True)
    make_folder(args.folder, texts, args.seed)
    terminal.write(f"wrote {args.folder}: a Llama with random weights, a tokenizer and a chat template\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
