"""`lm.chat`: the rules of its dial, the questions made by rule, and the road from text to answers."""

import collections
import importlib.util
import json
import math
import pathlib
import sys

import pytest
from facts import raises_naming

from spmd_trainer.checkpointing import records
from spmd_trainer.errors import UserError
from spmd_trainer.experiments.lm import stdlib, stdlib_questions
from spmd_trainer.experiments.lm.chat import Sizes
from spmd_trainer.inputs import Documents
from spmd_trainer.inputs.text_settings import TokenizerConfig
from spmd_trainer.inputs.tokenizer_training import train_tokenizer
from spmd_trainer.training import experiment_config
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import make_run_config

TOOLS = pathlib.Path(__file__).parents[2] / "tools"


@pytest.fixture(scope="module")
def road(tmp_path_factory):
    """The folder with the data and the tokenizer."""
    folder = tmp_path_factory.mktemp("road")
    data = folder / "data"
    stdlib_questions.write(data, num_entries=30, source_bytes=30_000)
    template = str(data / "chat_template.jinja")
    special = [",".join(stdlib_questions.SPECIAL_TOKENS)]
    given = {"vocab_size": 500, "chat_template": template, "special_tokens": special}
    train_tokenizer(TokenizerConfig([str(data / "train.jsonl")], output=str(folder / "tokenizer"), **given))
    return folder


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_the_dial_says():
    """nanochat's sizes at depth 12, where its rules have their reference, and 20."""
    d12, d20 = Sizes(12), Sizes(20)
    assert [(s.width, s.heads, s.row) for s in (d12, d20)] == [(768, 6, 1536), (1280, 10, 2048)]
    assert d12.matrix_rate == pytest.approx(0.02, rel=0.3)
    assert d12.adam_rate == pytest.approx(0.008, rel=0.3)
    assert 2**18 <= d12.rows * d12.row <= 2**20 < d20.rows * d20.row * 2
    for sizes in (Sizes(1), Sizes(2), d12, d20, Sizes(26)):
        tokens = sizes.steps(sizes.rows) * sizes.rows * sizes.row
        assert tokens == pytest.approx(20 * sizes.scaling_parameters, rel=0.01)
        assert sizes.width % sizes.heads == 0
    assert [Sizes(depth).minibatches for depth in (2, 12, 20, 26)] == [1, 4, 16, 32], "as docs/chat.md says"
    for depth in (0, 2.5):
        with raises_naming(UserError, f"DEPTH={depth}", "--fdl.DEPTH=2"):
            Sizes(depth)


@pytest.mark.parametrize("experiment", ["Pretrain", "Answers", "Prefer", "Choose"])
def test_each_stage_builds_and_has_the_parameters_that_the_dial_says(road, experiment):
    overrides = (f"ROAD={road}", "DEPTH=1", "ROWS=2", "STEPS=2")
    job = Job.build(make_run_config(f"lm.chat.{experiment}", road / experiment, overrides=overrides))
    spec = job.task.model.lm_tpl.spec
    assert (spec.model_dims, spec.num_layers, spec.vocab_size) == (128, 1, 1024)
    rules = job.task.train.init_from_checkpoint_rules or {}
    before = {"Pretrain": [], "Answers": ["pretrain"]}.get(experiment, ["answers"])
    assert list(rules) == [str(road / name) for name in before]
    shapes = {
        path: spec.logical_shape
        for path, spec in records.by_path(job.partitioner.layout.without_opt_states().variables).items()
        if "norm" not in path and "token_emb" not in path and "params" in path
    }
    assert sum(map(math.prod, shapes.values())) == Sizes(1).scaling_parameters


def test_a_stage_begins_with_any_run(road):
    given = (f"ROAD={road}", "FROM=runs/other")
    assert list(experiment_config.resolve("lm.chat.Answers", given).task_p.train.init_from_checkpoint_rules) == [
        "runs/other"
    ]


@pytest.mark.parametrize(("given", "example"), [("STEPS=0", "--fdl.STEPS=100"), ("ROWS=0", "--fdl.ROWS=32")])
def test_nothing_to_do_is_not_the_default(road, given, example):
    with raises_naming(UserError, given, example):
        experiment_config.resolve("lm.chat.Pretrain", (f"ROAD={road}", given)).task_p  # noqa: B018


def test_a_road_that_looks_like_a_number():
    rules = experiment_config.resolve("lm.chat.Answers", ("ROAD=2024",)).task_p.train.init_from_checkpoint_rules
    assert list(rules) == ["2024/pretrain"]


def test_questions_are_kept_apart():
    known = stdlib_questions.entries()
    heldout = {entry.name for entry in known if entry.is_heldout}
    asked = stdlib_questions.questions(known)
    trained = {one.question for one in asked["chats"]}
    assert len(known) > 500
    assert 0.05 < len(heldout) / len(known) < 0.15
    for name in ("new_phrasing", "new_names"):
        assert not trained & {one.question for one in asked[name]}
    assert trained >= {one.question for one in [*asked["trained"], *asked["pairs"]]}
    right = collections.defaultdict(set)
    for _, question, answer, wrong in (one for some in asked.values() for one in some):
        right[question].add(answer)
        assert answer not in wrong
    assert {question for question, answers in right.items() if len(answers) > 1} == set()
    assert right["In which module is namedtuple?"] == {"It is in collections."}
    assert right["What arguments does shlex.quote take?"] == {"It takes s."}
    assert right["What does shlex.quote do?"] == {"Return a shell-escaped version of the string *s*."}


def test_files_of_the_data(road):
    data = road / "data"
    assert len(rows(data / "asked/new_phrasing.jsonl")) > 30
    for name in stdlib_questions.SETS:
        assert {row["kind"] for row in rows(data / f"asked/{name}.jsonl")} == set(stdlib_questions.PHRASINGS)
    for row in rows(data / "pairs.jsonl"):
        assert row["chosen"] != row["rejected"]
    for row in rows(data / f"lm_eval/{stdlib_questions.TASK}_choices.jsonl"):
        assert len(set(row["choices"])) == 4
    assert (data / "train.jsonl").stat().st_size < 80_000


def test_wrong_answers_that_are_few_are_not_repeated():
    known = [stdlib_questions.Entry("re", f"name{number}", f"Says {number}.", None) for number in range(3)]
    asked = stdlib_questions.questions(known)
    assert {one.wrong for one in asked["chats"] if one.kind == stdlib_questions.WHERE} == {("I do not know.",)}
    assert {len(set(one.wrong)) for one in asked["chats"] if one.kind == stdlib_questions.DOES} == {2}


def test_bytes_of_a_label(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("four", "né")))
    assert stdlib.bytes_per_label(Documents(str(path)), None) == 7 / 9


@pytest.fixture
def tool(monkeypatch):
    """tools/chat.py as a module."""
    monkeypatch.syspath_prepend(TOOLS)
    spec = importlib.util.spec_from_file_location("chat_tool", TOOLS / "chat.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "chat_tool", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("status", "problem"), [("stopped", "was interrupted"), ("finished", "")])
def test_a_stage_that_was_interrupted_is_not_finished(tool, tmp_path, status, problem):
    """Its status is 0: it has saved its state."""
    (tmp_path / "run.json").write_text(json.dumps({"experiment": "lm.chat.Pretrain", "status": status}))
    assert tool._problem(tool.Stage("pretrain", "", "keyword", (), tmp_path)) == problem
    assert tool._problem(tool.Stage("other", "", "no_such_module", ())) == "ended with status 1"


def test_an_interruption_counts_although_the_run_has_finished(tool, tmp_path, monkeypatch):
    """In the last evaluation."""
    (tmp_path / "run.json").write_text(json.dumps({"experiment": "lm.chat.Pretrain", "status": "finished"}))
    waited = iter([KeyboardInterrupt(), 0])

    def wait(self):
        if isinstance(found := next(waited), KeyboardInterrupt):
            raise found
        return found

    monkeypatch.setattr(tool.subprocess.Popen, "wait", wait)
    assert tool._problem(tool.Stage("pretrain", "", "keyword", (), tmp_path)) == "was interrupted"


@pytest.mark.parametrize(("code", "problem"), [("open({!r}, 'w'); exit(2)", ""), ("exit(2)", "ended with status 2")])
def test_a_plan_that_does_not_fit_is_finished(tool, tmp_path, monkeypatch, code, problem):
    plan = tmp_path / "plan.json"
    plan.write_text("of an earlier try")
    monkeypatch.setattr(tool.Stage, "command", lambda stage: [sys.executable, "-c", code.format(str(plan))])
    assert tool._problem(tool.Stage("plan", "", "", (), result=plan)) == problem


def test_the_stages_of_a_deep_model(tool, tmp_path, monkeypatch):
    monkeypatch.setattr(tool, "has_gpu_compiler", lambda: True)
    stages = {stage.name: stage for stage in tool.stages(tmp_path, 12, quick=False)}
    with_parts = {name for name, stage in stages.items() if "--num_minibatches=4" in stage.arguments}
    assert with_parts == {"pretrain", "plan"}
    assert stages["plan"].result == tmp_path / "plan/plan.json"


def test_a_torn_line_of_the_log(tool, tmp_path):
    log = tmp_path / "stages.jsonl"
    assert tool._finished(log) == {}
    log.write_text('{"name": "data", "command": "a"}\n{"name": "toke')
    assert tool._finished(log) == {"data": {"name": "data", "command": "a"}}


@pytest.mark.parametrize("depth", ["0", "-1", "2.5"])
def test_a_depth_that_is_none(tool, tmp_path, capsys, depth):
    with pytest.raises(SystemExit) as left:
        tool.main([str(tmp_path / "road"), f"--depth={depth}"])
    assert left.value.code == 2
    assert f"--depth: {depth!r}" in capsys.readouterr().err
    assert not (tmp_path / "road").exists()


def test_scores_are_those_of_the_last_step(tool, tmp_path):
    report, asked = tool.chat_report, {"messages": [], "answer": "yes", "kind": stdlib_questions.WHERE}
    for path, lines in {
        "prefer/run.json": [{"status": "finished", "last_step": 100}],
        "prefer/decode_out/trained/step_00000100.jsonl": [{"index": 0, "output": "yes"}],
        "prefer/decode_out/trained/step_00000050.jsonl": [{"index": 0, "output": "no"}],
        "choose_prefer/summaries/eval_heldout/metrics.jsonl": [{"step": 50, "rewards/accuracies": 0.5}],
        "data/asked/trained.jsonl": [asked],
        **{f"data/asked/{name}.jsonl": [] for name in stdlib_questions.SETS[1:]},
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert report.scores_of(tmp_path, "prefer") == {"trained": (1.0, "where 1/1, does 0/0, takes 0/0")}


def test_the_report_of_a_plan_that_does_not_fit(tool, tmp_path):
    for name in ("plan", "pretrain"):
        (tmp_path / name).mkdir()
    (tmp_path / "pretrain/config.txt").write_text("")
    (tmp_path / "plan/plan.json").write_text(json.dumps({"fits": False, "total": 90 * 2**30, "memory": 80 * 2**30}))
    (sentence,) = tool.chat_report._plan(tmp_path)
    assert "doesn't fit one H100: it needs 90.0 GiB, of 80.0 GiB" in sentence


@pytest.mark.full
def test_the_road_from_end_to_end_and_again(tool, tmp_path, capfd):
    tool.main([str(tmp_path / "road"), "--quick", "--depth=1"])
    first = capfd.readouterr().out
    assert "python -m spmd_trainer.main --exp=lm.chat.Prefer" in first
    assert first.count("right: ") == 5
    report = (tmp_path / "road/report.html").read_text()
    assert "bits per byte" in report
    tool.main([str(tmp_path / "road"), "--quick", "--depth=1"])
    again = capfd.readouterr().out
    assert "==" not in again, "finished stages are not repeated"
    assert again.count("right: ") == 5
    with pytest.raises(SystemExit, match="other settings"):
        tool.main([str(tmp_path / "road"), "--quick", "--depth=2"])
