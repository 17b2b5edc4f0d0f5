"""Makes random adapters with PEFT on the tiny models of tests/interop/data/hf, and records their outputs.

Runs in a separate environment with torch, transformers and peft (`make interop` creates it), without this project:

    python tools/make_peft_goldens.py FOLDERS DIR [NAME ...]

FOLDERS holds the models (tests/interop/data/hf). For each case it writes DIR/NAME with the files of `save_pretrained`,
and beside them expected.npz: logits [rows, length, vocab] float32 of the model with the adapters, for the ids in the
model's expected.npz.

tests/interop/data/peft holds the output for all names. Remake it with the versions that its README names.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
from typing import Any

import numpy as np
import peft
import torch
import transformers


@dataclasses.dataclass(frozen=True)
class Case:
    """Adapters to make.

    Attributes:
      name: the folder's name.
      model: the model's name.
      config: arguments of LoraConfig.
    """

    name: str
    model: str
    config: dict[str, Any]


ATTENTION = {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"]}
CASES = (
    Case("lora", "llama_tokenizer", ATTENTION),
    Case("lora_again", "llama_tokenizer", ATTENTION),
    Case("dora", "qwen2", {"r": 2, "lora_alpha": 8, "use_dora": True, "target_modules": "all-linear"}),
    Case("rslora_gpt2", "gpt2", {"r": 4, "lora_alpha": 6, "use_rslora": True, "target_modules": ["c_proj", "c_fc"]}),
    Case(
        "dora_head",
        "gemma3_untied",
        {"r": 2, "lora_alpha": 2, "use_dora": True, "target_modules": ["k_proj", "lm_head"]},
    ),
    Case("one_layer", "olmo2", {"r": 5, "lora_alpha": 10, "target_modules": ["layers.0.self_attn.k_proj"]}),
)


def make(case: Case, models: pathlib.Path, target: pathlib.Path) -> None:
    torch.manual_seed(sum(map(ord, case.name)))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        models / case.model, attn_implementation="eager", dtype=torch.float32
    )
    config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=True, **case.config)
    adapted = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_magnitude_vector" in name:
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
            elif "lora_" in name:
                parameter.normal_(0, 0.2)
        with np.load(models / case.model / "expected.npz") as file:
            ids = torch.tensor(file["ids"], dtype=torch.long)
        logits = adapted(ids).logits.numpy()
    adapted.save_pretrained(target / case.name)
    (target / case.name / "README.md").unlink(missing_ok=True)  # a model card template
    np.savez_compressed(target / case.name / "expected.npz", logits=logits)


def main() -> None:
    """Writes the named cases, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=pathlib.Path)
    parser.add_argument("target", type=pathlib.Path)
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    for case in CASES:
        if not arguments.names or case.name in arguments.names:
            make(case, arguments.models, arguments.target)


if __name__ == "__main__":
    main()
