"""`--mode=lm_eval` gives the answers of lm-eval's own `hf` backend, request by request, runs each once, and survives a kill.

`lm_eval_tasks/answers.json` has what the `hf` backend answered; tests/interop_live/test_live_lm_eval.py asks it again.
"""

import contextlib
import functools
import json
import signal
import subprocess
import sys
import time

import lm_eval_helpers as helpers
import numpy as np
import pytest
from etils import epath
from facts import raises_naming
from praxis.pax_fiddle import Config
from safetensors.numpy import load_file, save_file
from trained_helpers import TINY, make_job, read_lines

from spmd_trainer import multihost
from spmd_trainer.checkpointing.errors import CheckpointError
from spmd_trainer.decoder.lora import Lora
from spmd_trainer.errors import UserError
from spmd_trainer.lm_eval import mode
from spmd_trainer.lm_eval.lm_eval import LmEval
from spmd_trainer.lm_eval.settings import LmEvalSettings, ModelArgs
from spmd_trainer.training import checkpoints, train
from spmd_trainer.training.summary_writers import SummaryWriters, read_metrics

helpers.stay_offline()
pytest.importorskip("lm_eval", reason="lm-eval is an extra of its own: pip install 'spmd-trainer[lm-eval]'")

# Meshes on which heads, key/value heads, rows or the vocabulary are uneven.
MESHES = {"plain": (1, 2, 3), "bos": (1, 4, 2), "chat": (2, 4, 1)}


@functools.cache
def golden():
    return json.loads((helpers.TASKS / "answers.json").read_text())


def settings_of(tmp_path, variant="plain", names=helpers.NAMES, **options):
    tasks = helpers.write_tasks(tmp_path / "tasks")
    given = {"include_path": tasks, "log_samples": True, **helpers.VARIANTS[variant], **options}
    return LmEvalSettings(tuple(names), **given)


def job_on_folder(
    tmp_path,
    settings,
    *,
    variant="plain",
    mesh=(1, 4, 2),
    directory="run",
    exp="lm.hf.FromFolder",
    fields=(),
    **options,
):
    folder = tmp_path / "folder"
    if not folder.exists():
        helpers.write_folder(folder, variant)
    return make_job(
        tmp_path / directory,
        mesh=mesh,
        exp=exp,
        fields=(f"FOLDER={str(folder)!r}", "SEQ_LEN=64", *fields),
        mode="lm_eval",
        restore_checkpoint_dir=epath.Path(folder),
        **vars(settings),
        **options,
    )


@pytest.mark.parametrize("variant", helpers.VARIANTS)
def test_answers_are_those_of_the_hf_backend(variant, tmp_path, capsys):
    settings = settings_of(tmp_path, variant)
    metrics = mode.evaluate(job_on_folder(tmp_path, settings, variant=variant, mesh=MESHES[variant]))
    directory = epath.Path(tmp_path / "run/lm_eval/step_0")
    found = helpers.results_in(directory)
    helpers.compare(found, golden()[variant])
    for task in helpers.NAMES:
        written = read_metrics(tmp_path / "run", f"lm_eval_{task}")[0]
        for metric in (key for key in metrics if key.startswith(f"{task}/")):
            assert written[metric.partition("/")[2]] == metrics[metric]
    assert f"|{helpers.NAMES[0]}" in capsys.readouterr().out
    keys = [line["key"] for line in read_lines(directory / "answers.jsonl")]
    assert len(keys) == len(set(keys))


def write_pairs(tmp_path):
    path = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": f"def f{i}(x):", "chosen": " return x", "rejected": " pass"} for i in range(8)]
    path.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    return path


def test_an_experiment_on_pairs_gives_the_same_answers(tmp_path):
    fields = (f"FILES={str(write_pairs(tmp_path))!r}",)
    job = job_on_folder(tmp_path, settings_of(tmp_path), exp="lm.finetune.DpoFromFolder", fields=fields)
    mode.evaluate(job)
    directory = epath.Path(tmp_path / "run/lm_eval/step_0")
    helpers.compare(helpers.results_in(directory), golden()["plain"])


def test_results_count_frozen_parameters(tmp_path):
    def parameters(rank):
        def add_adapters(config):
            config.task.lora = Config(Lora, targets="all-linear", rank=rank) if rank else None

        job = job_on_folder(tmp_path, settings, customize=add_adapters)
        runner = mode.make_runner(job, settings)
        return runner._model.get_model_info()["model_num_parameters"]

    settings = settings_of(tmp_path)
    base, first, second = (parameters(rank) for rank in (None, 1, 2))
    assert base < first < second
    assert first - base == second - first, "adapters of rank 2 have twice as many parameters"


def test_every_process_gets_the_results_or_the_error_of_process_0(tmp_path, monkeypatch):
    """This process stands for process 1: what process 0 says when it has evaluated is put into the messages."""
    job = job_on_folder(tmp_path, settings_of(tmp_path, names=["tiny_choice"]), mesh=(1, 1, 1))
    gather, broadcast = multihost.gather, multihost.broadcast
    said = {"gather": None, "broadcast": None}
    results = tmp_path / "run/lm_eval/step_0"

    def from_gather(name, value, **options):
        values = gather(name, value, **options)
        return [said["gather"], *values] if said["gather"] and list(results.glob("results_*.json")) else values

    def from_broadcast(value, **options):
        value = broadcast(value, **options)
        return said["broadcast"] if value and said["broadcast"] and list(results.glob("results_*.json")) else value

    monkeypatch.setattr(multihost, "gather", from_gather)
    monkeypatch.setattr(multihost, "broadcast", from_broadcast)
    said["broadcast"] = [{"tiny_choice": {"acc": 0.25, "acc_stderr": 0.125}}]
    assert mode.evaluate(job) == {"tiny_choice/acc": 0.25, "tiny_choice/acc_stderr": 0.125}
    for path in results.glob("results_*.json"):
        path.unlink()
    said.update(broadcast=None, gather={"problem": None, "kind": "other", "error": "OSError: no space"})
    with raises_naming(CheckpointError, "process 0", "OSError: no space"):
        mode.evaluate(job)


class Killed(BaseException):
    """What ends an evaluation between two batches."""


def test_a_killed_evaluation_goes_on_and_runs_each_request_once(tmp_path):
    settings = settings_of(tmp_path, model_args=ModelArgs(batch_size=4))
    job = job_on_folder(tmp_path, settings, mesh=(1, 2, 2))
    restored = checkpoints.restore_for_inference(job, "none")
    step, state = restored.step, restored.state
    directory = epath.Path(tmp_path / "run/lm_eval/step_0")
    starts, computed, shapes = 0, 0, set()

    def evaluate(*, batches):
        left = iter(range(batches))

        class Progress:
            def advance(self):
                if next(left, None) is None:
                    raise Killed

        runner = mode.make_runner(job, settings)
        runner._progress = lambda what, total: contextlib.nullcontext(Progress())
        writers = SummaryWriters(tmp_path / "run")
        try:
            runner.run(state, step, epath.Path(tmp_path / "run"), writers)
            return runner, True
        except Killed:
            return runner, False
        finally:
            writers.close()

    complete = False
    while not complete:
        if starts == 1:  # the process was killed while it wrote a line
            with (directory / "answers.jsonl").open("a") as file:
                file.write('{"key": "5a3')
        runner, complete = evaluate(batches=7)
        starts, computed = starts + 1, computed + runner.requests.computed
        shapes.add(runner.requests.compiled)
    assert starts > 2
    helpers.compare(helpers.results_in(directory), golden()["plain"])
    keys = [json.loads(line)["key"] for line in (directory / "answers.jsonl").read_text().splitlines() if "}" in line]
    assert len(keys) == len(set(keys)) == computed
    runner, _ = evaluate(batches=0)  # nothing is left to run
    assert runner.requests.computed == runner.requests.compiled == 0


@pytest.mark.slow
def test_a_process_that_is_killed_goes_on(tmp_path):
    folder = helpers.write_folder(tmp_path / "folder", "plain")
    command = [
        *(sys.executable, "-m", "spmd_trainer.main", "--exp=lm.hf.FromFolder", "--mode=lm_eval", "--mesh=data:4,mdl:2"),
        *(
            f"--fdl.FOLDER={folder}",
            "--fdl.SEQ_LEN=64",
            f"--restore_checkpoint_dir={folder}",
            "--model_args=batch_size=8",
        ),
        *(f"--tasks={','.join(helpers.NAMES)}", f"--include_path={helpers.write_tasks(tmp_path / 'tasks')}"),
        *(f"--job_log_dir={tmp_path / 'run'}", "--log_samples"),
    ]
    answers, log = tmp_path / "run/lm_eval/step_0/answers.jsonl", (tmp_path / "log.txt").open("w")
    process = subprocess.Popen(command, stdout=log, stderr=log)
    while process.poll() is None and not (answers.exists() and answers.read_text()):
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL, (tmp_path / "log.txt").read_text()
    before = len(read_lines(answers))
    subprocess.run(command, stdout=log, stderr=log, check=True)
    keys = [line["key"] for line in read_lines(answers)]
    assert 0 < before < len(keys) == len(set(keys))
    helpers.compare(helpers.results_in(answers.parent), golden()["plain"])


def test_other_variables_are_judged_anew(tmp_path):
    settings = settings_of(tmp_path, names=["tiny_choice"])
    job = job_on_folder(tmp_path, settings, mesh=(1, 1, 1))
    mode.evaluate(job)
    lines = read_lines(epath.Path(tmp_path / "run/lm_eval/step_0/answers.jsonl"))
    weights = load_file(tmp_path / "folder/model.safetensors")
    weights["model.norm.weight"] *= 2
    save_file(weights, tmp_path / "folder/model.safetensors", metadata={"format": "pt"})
    mode.evaluate(job_on_folder(tmp_path, settings, mesh=(1, 1, 1)))
    again = read_lines(epath.Path(tmp_path / "run/lm_eval/step_0/answers.jsonl"))
    assert len(again) == 2 * len(lines)
    assert len({line["key"] for line in again}) == len(again)


def test_during_training_every_n_steps(tmp_path):
    tasks = helpers.write_tasks(tmp_path / "tasks")

    def add_callback(config):
        callback = Config(LmEval, tasks="tiny_perplexity", every_steps=2, include_path=tasks)
        config.task.train.callbacks = [callback]
        config.task.train.num_train_steps = 5

    job = make_job(tmp_path / "run", fields=("task.train.save_interval_steps=2",), customize=add_callback)
    train.train(job)
    written = read_metrics(tmp_path / "run", "lm_eval_tiny_perplexity")
    assert sorted(written) == [2, 4, 5]
    assert written[5]["bits_per_byte"] < written[2]["bits_per_byte"], "the model learns to spell"
    # A start at a step without results makes up for them, from the answers that are there.
    directory = tmp_path / "run/lm_eval/step_5"
    (results,) = directory.glob("results_*.json")
    results.unlink()
    answers = (directory / "answers.jsonl").read_text()
    for _ in range(2):
        train.train(make_job(tmp_path / "run", fields=("task.train.save_interval_steps=2",), customize=add_callback))
        (results_again,) = directory.glob("results_*.json")
    scores = json.loads(results_again.read_text())["results"]["tiny_perplexity"]
    assert scores["bits_per_byte,none"] == pytest.approx(written[5]["bits_per_byte"], rel=1e-6)
    assert (directory / "answers.jsonl").read_text() == answers
    # The same checkpoint, judged afterwards, gives the same numbers.
    settings = LmEvalSettings(("tiny_perplexity",), include_path=tasks)
    later = make_job(
        tmp_path / "later",
        mode="lm_eval",
        restore_checkpoint_dir=epath.Path(tmp_path / "run/checkpoints"),
        **vars(settings),
    )
    metrics = mode.evaluate(later)
    for metric in ("word_perplexity", "bits_per_byte"):
        np.testing.assert_allclose(metrics[f"tiny_perplexity/{metric}"], written[5][metric], rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"apply_chat_template": True}, ("ByteTokenizer", "no chat template")),
        ({"tasks": "tiny_generate"}, ("--tasks: tiny_generate", "no_such_file.jsonl")),
    ],
)
def test_a_callback_with_wrong_settings_ends_the_run_before_it_trains(options, facts, tmp_path):
    tasks = helpers.write_tasks(tmp_path / "tasks")
    broken = tmp_path / "tasks/tiny_generate.yaml"
    broken.write_text(broken.read_text().replace("prompts.jsonl", "no_such_file.jsonl"))

    def add_callback(config):
        given = {"tasks": "tiny_perplexity", "every_steps": 2, "include_path": tasks, **options}
        config.task.train.callbacks = [Config(LmEval, **given)]

    with raises_naming(UserError, *facts):
        train.train(make_job(tmp_path / "run", customize=add_callback))
    assert not list((tmp_path / "run").glob("checkpoints/*"))
    assert not read_metrics(tmp_path / "run", "train")


def test_what_is_refused(tmp_path):
    with raises_naming(UserError, "--tasks", "'tiny_choise'", "tiny_choice"):
        mode.evaluate(job_on_folder(tmp_path, settings_of(tmp_path, names=["tiny_choise"])))
    with raises_naming(UserError, "--include_path=nowhere", "no such directory"):
        mode.evaluate(job_on_folder(tmp_path, settings_of(tmp_path, include_path="nowhere")))
    broken = tmp_path / "tasks/tiny_generate.yaml"
    helpers.write_tasks(tmp_path / "tasks")
    broken.write_text(broken.read_text().replace("prompts.jsonl", "no_such_file.jsonl"))
    settings = LmEvalSettings(("tiny_generate",), include_path=str(tmp_path / "tasks"))
    with raises_naming(UserError, "--tasks: tiny_generate", "no_such_file.jsonl"):
        mode.evaluate(job_on_folder(tmp_path, settings))
    text_only = make_job(tmp_path / "b", mode="lm_eval", **vars(settings_of(tmp_path, "chat")))
    with raises_naming(UserError, "ByteTokenizer", "no chat template"):
        mode.evaluate(text_only)


def test_a_model_without_generation_settings_says_what_it_can_do(tmp_path):
    def no_steps(config):
        config.task.train.num_train_steps = 1

    train.train(make_job(tmp_path / "run", customize=no_steps))
    settings = settings_of(tmp_path, names=["tiny_generate"], gen_kwargs={"max_gen_toks": 4})
    job = make_job(tmp_path / "run", exp=TINY, mode="lm_eval", customize=no_steps, **vars(settings))
    with raises_naming(UserError, "generate_until", "LanguageModel", "no settings"):
        mode.evaluate(job)
