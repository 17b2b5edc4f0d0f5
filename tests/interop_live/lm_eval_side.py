"""What lm-eval's own `hf` backend answers, in the environment with torch. Imports nothing of this project.

python lm_eval_side.py FOLDER TASKS_DIR ANSWERS.json [key=value,...]    further arguments of simple_evaluate, as JSON

ANSWERS.json has for each task the scores and, request by request, the arguments and the answer.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["HF_DATASETS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"

from lm_eval import evaluator
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

TASKS = ("tiny_choice", "tiny_perplexity", "tiny_generate")


def judge(folder: str, tasks: str, options: dict[str, object]) -> dict[str, object]:
    """Returns {'results': ..., 'requests': {task: [[arguments, answer], ...]}}."""
    model = HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=1)
    results = evaluator.simple_evaluate(
        model=model, tasks=list(TASKS), task_manager=TaskManager(include_path=tasks), bootstrap_iters=0, **options
    )
    assert results is not None
    requests = {
        task: [
            [list(arguments), answers]
            for example in results["samples"][task]
            for arguments, (answers,) in zip(example["arguments"], example["resps"], strict=True)
        ]
        for task in TASKS
    }
    return {"results": results["results"], "requests": requests}


if __name__ == "__main__":
    folder, tasks, target = sys.argv[1:4]
    options = json.loads(sys.argv[4]) if len(sys.argv) > 4 else {}
    with open(target, "w") as file:
        json.dump(judge(folder, tasks, options), file, indent=1, ensure_ascii=False)
