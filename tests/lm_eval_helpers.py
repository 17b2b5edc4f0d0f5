"""Three local tasks for lm-eval (`lm_evaluation/lm_eval_tasks`), a folder to judge, and the answers of lm-eval's `hf` backend."""

import atexit
import json
import os
import pathlib
import shutil
import tempfile

TESTS = pathlib.Path(__file__).parent
TASKS = TESTS / "lm_evaluation" / "lm_eval_tasks"
FOLDER = TESTS / "interop" / "data" / "hf" / "llama_tokenizer"
NAMES = ("tiny_choice", "tiny_perplexity", "tiny_generate")
# How the tasks are run: {name: arguments of lm-eval's simple_evaluate}.
VARIANTS = {
    "plain": {},
    "bos": {},
    "chat": {"apply_chat_template": True, "system_instruction": "Answer.", "num_fewshot": 1},
}


def write_tasks(directory):
    """Writes the tasks' YAML files, which name their data by its absolute path. Returns the directory as a text."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in TASKS.glob("*.yaml"):
        (directory / path.name).write_text(path.read_text().replace("FOLDER", str(TASKS)))
    return str(directory)


def write_folder(directory, variant):
    """Copies the folder; in the variant 'bos', its tokenizer puts beginning-of-text before every text."""
    shutil.copytree(FOLDER, directory)
    if variant == "bos":
        path = directory / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        begin = {"SpecialToken": {"id": "<|begin|>", "type_id": 0}}
        tokenizer["post_processor"]["single"].insert(0, begin)
        tokenizer["post_processor"]["special_tokens"]["<|begin|>"] = {
            "id": "<|begin|>",
            "ids": [1],
            "tokens": ["<|begin|>"],
        }
        path.write_text(json.dumps(tokenizer))
    return directory


def compare(found, expected):
    """Compares results and samples of lm-eval with what the `hf` backend gave, request by request.

    Args:
      found: {'results': ..., 'requests': {task: [[arguments, answer], ...]}}.
      expected: the same of the `hf` backend.
    """
    for task in NAMES:
        ours, theirs = found["requests"][task], expected["requests"][task]
        assert len(ours) == len(theirs) > 0
        for (arguments, answer), (same, wanted) in zip(ours, theirs, strict=True):
            assert arguments == same, task
            if task == "tiny_choice":
                assert abs(answer[0] - wanted[0]) < 1e-4, arguments
                assert answer[1] == wanted[1], arguments
            elif task == "tiny_perplexity":
                assert abs(answer - wanted) < 1e-4 * max(1, abs(wanted) / 100), arguments
            else:
                assert answer == wanted, arguments
        for metric, value in expected["results"][task].items():
            if isinstance(value, float):
                assert abs(found["results"][task][metric] - value) <= 1e-5 * abs(value), (task, metric)


def results_in(directory):
    """Returns what lm-eval's files in a directory say, in the form that `compare` takes."""
    (path,) = directory.glob("results_*.json")
    found = {"results": json.loads(path.read_text())["results"], "requests": {}}
    for task in NAMES:
        (path,) = directory.glob(f"samples_{task}_*.jsonl")
        found["requests"][task] = [
            [list(arguments.values()), _answer(task, answers)]
            for sample in map(json.loads, path.read_text().splitlines())
            for arguments, (answers,) in zip(sample["arguments"].values(), sample["resps"], strict=True)
        ]
    return found


def _answer(task, written):
    """Returns an answer of lm-eval's file of samples, which has numbers as texts."""
    if task == "tiny_choice":
        return [float(written[0]), {"True": True, "False": False}[written[1]]]
    return float(written) if task == "tiny_perplexity" else written


def stay_offline():
    """Lets the datasets library read local files only, and keep its copies in a temporary directory. Call before importing it."""
    os.environ["HF_DATASETS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"
    if "HF_HOME" not in os.environ:
        os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="spmd_trainer_lm_eval_")
        atexit.register(shutil.rmtree, os.environ["HF_HOME"], ignore_errors=True)
