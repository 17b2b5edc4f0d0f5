"""Makes random tiny models with Hugging Face transformers, and records their outputs.

Runs in a separate environment with torch and transformers (`make interop` creates it), without this project:

    python tools/make_hf_goldens.py DIR [NAME ...]

For each model it writes DIR/NAME with the files of `save_pretrained`, and beside them expected.npz:
  ids [rows, length] int32, logits [rows, length, vocab] float32, loss: the mean cross entropy of the next token.
  prompts [rows, prompt] int32, padded on the left; prompt_lengths [rows]; tokens [rows, 64]: the greedy continuation.
  eos_id: a token of the first row's continuation; tokens_to_eos [rows, 64]: the continuation with it as end-of-text,
    then -1.
Folders with a tokenizer also have stop_strings, and tokens_to_stop [rows, 64]: the continuation up to the first of
them, then -1.

tests/interop/data/hf holds the output for all names. Remake it with the versions of torch and transformers that its
README names.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from typing import Any

import numpy as np
import safetensors.torch
import tokenizers
import torch
import transformers
from hf_dense_cases import DENSE, Case
from hf_expert_cases import OTHERS
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

ROWS, LENGTH, NEW_TOKENS = 3, 11, 64
PROMPT_LENGTHS = (7, 4, 2)
# Greedy tokens must not depend on the last bits of a logit, and a model that repeats one token proves little.
MIN_GAP, MIN_DISTINCT = 2e-3, 10
CASES = (*DENSE, *OTHERS)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT = (
    "The trainer pads variables whose dimensions the mesh does not divide, and slices the padding off inside the step.\n"
    "A model never sees padding. Tensors are read slice by slice, straight to the devices that hold them.\n"
)


def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Randomises every parameter, so that a wrong or missing one changes the logits."""
    # Layers that are weak beside the embeddings give models that repeat one token.
    weak = isinstance(
        model, transformers.Gemma2ForCausalLM | transformers.Gemma3ForCausalLM | transformers.GPT2LMHeadModel
    )
    embedding = 0.4 if weak else 0.8
    for name, parameter in model.named_parameters():
        values = torch.empty_like(parameter)
        if "norm" in name or ".ln_" in name:
            values.normal_(0.0, 0.3, generator=generator)
            parameter.data.add_(values + 2.0 if weak and "post_" in name else values)
        elif "wpe" in name:
            parameter.data = values.normal_(0.0, 1.0, generator=generator)
        elif "embed" in name or "wte" in name or "lm_head" in name:
            parameter.data = values.normal_(0.0, embedding, generator=generator)
        elif name.endswith("A_log"):
            parameter.data = values.normal_(-2.0, 1.0, generator=generator)  # states that last
        elif values.ndim == 1:
            parameter.data = values.normal_(0.0, 0.3, generator=generator)
        else:
            gain = 4.0 if weak and "c_proj" in name else 1.6
            parameter.data = values.normal_(0.0, gain / values.shape[-1] ** 0.5, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            # Above 0: transformers gives groups that are not chosen the score 0, and a group that is chosen must have more.
            buffer.uniform_(0.0, 0.3, generator=generator)


def make_model(case: Case, seed: int) -> Any:
    """Makes a model with random float32 parameters, tied as its config says."""
    model_class = getattr(transformers, case.architecture)
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    settings = {key: value for key, value in case.config.items() if value is not None or key != "rope_parameters"}
    config = model_class.config_class(**special, **settings)
    model = model_class._from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(seed)
    randomise(model, generator)
    if case.in_mxfp4:
        for name, (blocks, scales) in mxfp4_of(model, seed).items():
            model.get_parameter(name).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    model.tie_weights()
    return model.eval()


def mxfp4_of(model: Any, seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Returns random blocks and scales for each matrix of the experts, by its name."""
    random, found = np.random.default_rng(seed), {}
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = parameter.shape
            # A byte is two values; the numbers 0 and 8 are zeros.
            low, high = random.choice([*range(1, 8), *range(9, 16)], (2, experts, outputs, inputs // 32, 16))
            blocks = (low + 16 * high).astype(np.uint8)
            scales = random.integers(120, 124, blocks.shape[:-1], np.uint8)
            found[name] = torch.tensor(blocks), torch.tensor(scales)
    return found


def store_in_mxfp4(folder: pathlib.Path, quantised: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Replaces tensors of a folder by their blocks and scales, as in OpenAI's folders."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    for name, (blocks, scales) in quantised.items():
        del tensors[name]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def continuation(
    model: Any, prompts: np.ndarray, lengths: np.ndarray, stop_strings: list[str] | None = None, tokenizer: Any = None
) -> tuple[np.ndarray, float]:
    """Returns the greedy tokens after left-padded prompts ([rows, NEW_TOKENS], or fewer if all rows end earlier), and
    the smallest difference between the best and the second-best logit.
    """
    ids = torch.tensor(prompts, dtype=torch.long)
    mask = torch.arange(prompts.shape[1])[None] >= prompts.shape[1] - torch.tensor(lengths)[:, None]
    config = transformers.GenerationConfig(
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        stop_strings=stop_strings,
    )
    # generate() would take what its own config lacks from the model's.
    model.generation_config = config
    output = model.generate(ids, attention_mask=mask.long(), tokenizer=tokenizer)
    tokens = output.sequences[:, ids.shape[1] :].numpy().astype(np.int32)
    best = torch.stack(output.logits).topk(2, dim=-1).values
    gap = float((best[..., 0] - best[..., 1]).min())
    return tokens, gap


def to_end(tokens: np.ndarray, eos_id: int) -> np.ndarray:
    """Returns continuations cut after their first end-of-text; -1 fills the rest."""
    result = np.full_like(tokens, -1)
    for row, (source, target) in enumerate(zip(tokens, result, strict=True)):
        found = np.flatnonzero(source == eos_id)
        end = int(found[0]) + 1 if len(found) else len(source)
        target[:end] = tokens[row, :end]
    return result


def make_tokenizer(vocab_size: int) -> Any:
    """Returns a byte-level BPE of ASCII text, with special tokens and a chat template."""
    special = ["<|pad|>", "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=[symbol for symbol in tokenizers.pre_tokenizers.ByteLevel.alphabet() if symbol.isascii()]
        + ["\u0120", "\u010a"],
        show_progress=False,
    )
    bpe.train_from_iterator([TEXT] * 4, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=special[0], bos_token=special[1], eos_token=special[2], padding_side="left"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def expected(case: Case, model: Any, tokenizer: Any, seed: int) -> dict[str, np.ndarray] | None:
    """Returns the arrays of expected.npz; None if this seed's model is too repetitive or close to a tie."""
    random, vocab = np.random.default_rng(seed), model.config.vocab_size
    ids = random.integers(3, vocab, (ROWS, LENGTH)).astype(np.int32)
    with torch.no_grad():
        output = model(torch.tensor(ids, dtype=torch.long), labels=torch.tensor(ids, dtype=torch.long))
    lengths = np.array(PROMPT_LENGTHS, np.int32)
    prompts = np.zeros((ROWS, max(PROMPT_LENGTHS)), np.int32)
    for row, length in enumerate(PROMPT_LENGTHS):
        prompts[row, -length:] = random.integers(3, vocab, length)
    saved_config = model.generation_config
    tokens, gap = continuation(model, prompts, lengths)
    distinct = min(len(set(row)) for row in tokens.tolist())
    if gap < MIN_GAP or distinct < MIN_DISTINCT:
        return None
    first_seen = {token: place for place, token in reversed(list(enumerate(tokens[0].tolist())))}
    eos_id = next(token for token, place in first_seen.items() if place >= 9)
    tokens_to_eos = to_end(tokens, eos_id)
    found = {
        "ids": ids,
        "logits": output.logits.numpy().astype(np.float32),
        "loss": np.float32(output.loss),
        "prompts": prompts,
        "prompt_lengths": lengths,
        "tokens": tokens,
        "eos_id": np.int32(eos_id),
        "tokens_to_eos": tokens_to_eos,
    }
    if tokenizer is not None:
        text = tokenizer.decode(tokens[0])
        stop = [text[len(text) // 3 :][:4], "never in the text"]
        # In a batch, generate() goes on with rows that have ended by a stop string alone: each row by itself.
        stopped = [
            continuation(model, prompts[[row], -length:], lengths[[row]], stop, tokenizer)[0][0]
            for row, length in enumerate(PROMPT_LENGTHS)
        ]
        if not (10 < len(stopped[0]) < 40 and stop[0] in tokenizer.decode(stopped[0])):
            return None
        found["stop_strings"] = np.array(stop)
        found["tokens_to_stop"] = np.stack(
            [np.pad(row, (0, NEW_TOKENS - len(row)), constant_values=-1) for row in stopped]
        )
    model.generation_config = saved_config
    return found


def write(case: Case, directory: pathlib.Path) -> None:
    """Writes one folder. Takes the first seed whose greedy tokens are varied and far from a tie."""
    for seed in range(200):
        model = make_model(case, seed)
        tokenizer = make_tokenizer(model.config.vocab_size) if case.has_tokenizer else None
        arrays = expected(case, model, tokenizer, seed)
        if arrays is not None:
            break
    else:
        raise SystemExit(f"{case.name}: no seed below 200 gives a model with varied greedy tokens")
    folder = directory / case.name
    model.save_pretrained(folder)
    if case.in_mxfp4:
        store_in_mxfp4(folder, mxfp4_of(model, seed))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    np.savez_compressed(folder / "expected.npz", **arrays)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{case.name}: seed {seed}, loss {float(arrays['loss']):.3f}, {size / 1024:.0f} KiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("names", nargs="*", help="models to make; all by default")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - {case.name for case in CASES}
    if unknown:
        raise SystemExit(
            f"no model is named {', '.join(sorted(unknown))}; there are {', '.join(c.name for c in CASES)}"
        )
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for case in CASES:
        if not arguments.names or case.name in arguments.names:
            write(case, arguments.directory)


if __name__ == "__main__":
    main()
