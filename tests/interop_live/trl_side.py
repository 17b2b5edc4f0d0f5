"""What TRL's DPOTrainer does with a folder and pairs, in the environment with torch. Imports nothing of this project.

python trl_side.py FOLDER PAIRS.jsonl DIRECTORY SETTINGS.json

The policy is the folder's model with noise, the reference the folder's own. Writes into DIRECTORY: `policy/`, the policy as a
folder; `tokens.json`, the tokens of each pair; and for each of the SETTINGS, fields of DPOConfig, `N.npz` with the metrics and
the losses of five steps of SGD, and `N/`, the policy after the first of them.
"""

from __future__ import annotations

import copy
import json
import pathlib
import sys

import datasets
import numpy as np
import torch
import transformers
import trl

LEARNING_RATE = 5e-4
STEPS = 5


def load(folder: str | pathlib.Path) -> torch.nn.Module:
    """Opens a folder as a user does."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)


def main(folder: str, pairs: str, directory: pathlib.Path, settings: list[dict[str, object]]) -> None:
    """Writes everything."""
    policy, generator = load(folder), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    policy.save_pretrained(directory / "policy")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = datasets.Dataset.from_list([json.loads(line) for line in pathlib.Path(pairs).read_text().splitlines()])
    for number, fields in enumerate(settings):
        config = trl.DPOConfig(
            output_dir=str(directory / "output"),
            use_cpu=True,
            report_to="none",
            max_length=None,
            gradient_checkpointing=False,
            disable_dropout=True,
            bf16=False,
            **fields,
        )
        trainer = trl.DPOTrainer(
            model=copy.deepcopy(policy).eval(),
            ref_model=load(folder).eval(),
            args=config,
            train_dataset=rows,
            processing_class=tokenizer,
        )
        names = ("prompt_ids", "chosen_ids", "rejected_ids")
        examples = [{name: row[name] for name in names} for row in trainer.train_dataset]
        (directory / "tokens.json").write_text(json.dumps(examples))
        batch = trainer.data_collator(examples)
        optimizer = torch.optim.SGD(trainer.model.parameters(), lr=LEARNING_RATE)
        losses = []
        for step in range(STEPS):
            loss = trainer._compute_loss(trainer.model, dict(batch), return_outputs=False)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            if step == 0:
                metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
                metrics |= {name: values[0] for name, values in trainer._metrics["eval"].items()}
                trainer.model.save_pretrained(directory / str(number))
        np.savez(
            directory / f"{number}.npz", losses=losses, **{name.replace("/", "_"): x for name, x in metrics.items()}
        )


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    folder, pairs, directory, settings = sys.argv[1:]
    main(folder, pairs, pathlib.Path(directory), json.loads(pathlib.Path(settings).read_text()))
