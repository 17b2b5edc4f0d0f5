"""`--mode=chat` and `st.generate`: answers in pieces are the answer, conversations, pipes and a keyboard."""

import dataclasses
import io
import json
import shutil
import subprocess
import sys
import types

import pytest
import trained_helpers
from facts import missing_facts, raises_naming
from lm_eval_helpers import FOLDER
from safetensors.numpy import load_file, save_file

import spmd_trainer as st
from spmd_trainer.decoder.generation.settings import GenerationSettings
from spmd_trainer.errors import UserError
from spmd_trainer.inputs.tokenizers import ByteTokenizer
from spmd_trainer.lm_eval import chat
from spmd_trainer.lm_eval.chat import Talk
from spmd_trainer.lm_eval.requests import Prompt, Source, no_progress
from spmd_trainer.lm_eval.texts import Texts

OVERRIDES = [
    "NUM_LAYERS=1",
    "MODEL_DIMS=32",
    "HIDDEN_DIMS=64",
    "MAX_SEQ_LEN=96",
    "NUM_TRAIN_STEPS=30",
    "CHECKPOINT_EVERY_N_STEPS=30",
    "EVAL_INTERVAL_STEPS=0",
    "WARMUP_STEPS=3",
]


class Spoken:
    """Stands for `Requests`: a model that says a text, whatever it is asked. Keeps the prompts."""

    def __init__(self, says, max_length=200):
        self.says, self.max_length, self.prompts, self.widths = says.encode(), max_length, [], set()

    def continuations(self, prompts, settings, source, *, least_width):
        self.widths.add(least_width)
        (prompt,) = prompts
        text = bytes(token for token in prompt.tokens if token < 256)
        before = self.prompts[-1] if self.prompts else b"nothing"
        if not (text.startswith(before) and self.says.startswith(text[len(before) :])):
            self.prompts.append(text)
        made = text[len(self.prompts[-1]) :]
        assert 256 not in prompt.tokens, "the model is asked after its end"
        rest = [*self.says[len(made) :], 256][: settings.max_tokens]
        return [rest]


class Template:
    """A chat template that writes roles and texts in a row."""

    text = "a template"

    def render(self, messages, add_generation_prompt):
        said = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return said + ("<assistant>" if add_generation_prompt else "")


def talk(says, *, has_template=False, system="", max_length=200, **settings):
    texts = Texts(ByteTokenizer(256), None)
    texts.template = Template() if has_template else None
    spoken = Spoken(says, max_length)
    state = types.SimpleNamespace(step=3)
    source = Source(state, "", None, no_progress)
    return Talk(spoken, texts, GenerationSettings(**settings), source, system=system), spoken


@pytest.mark.parametrize(
    "says",
    [
        "",
        "short",
        "x" * 15,
        "x" * 31,
        "a text that takes several pieces of sixteen tokens",
        "Zwölf Boxkämpfer jagen Öl",
    ],
)
def test_pieces_join_to_the_text(says):
    found, _ = talk(says)
    pieces = list(found.answer("go on"))
    assert "".join(pieces) == says
    assert len([piece for piece in pieces if piece]) >= len(says.encode()) // 16


@pytest.mark.parametrize(
    ("max_tokens", "length", "cut"),
    [
        (37, 37, "37 tokens; --max_tokens"),
        (100, 100, "--max_tokens"),
        (101, 100, ""),
        (200, 100, ""),
        (64, 55, "55 tokens, where a row"),
    ],
)
def test_an_answer_that_is_cut_says_where(max_tokens, length, cut):
    found, _ = talk("x" * 100, max_tokens=max_tokens, max_length=60 if length == 55 else 200)
    assert "".join(found.answer("go on")) == "x" * length
    assert cut in found.cut
    assert bool(cut) == bool(found.cut)


def test_the_pieces_of_a_conversation_have_few_widths():
    found, spoken = talk("x" * 60, has_template=True, max_length=1000)
    for _ in range(8):
        list(found.answer("go on"))
    assert spoken.widths == {128, 256, 512, 984}


@pytest.mark.parametrize("stop", ["END", "pieces of", "a"])
def test_a_stop_string_ends_an_answer_wherever_pieces_do(stop):
    says = "the text is longer than pieces of 16 tokens are, END and on"
    assert "".join(talk(says, stop=(stop,))[0].answer("go on")) == says[: says.index(stop)]


def test_a_conversation_is_the_prompt_until_it_is_forgotten():
    found, spoken = talk("yes", has_template=True, system="be brief")
    for text in ("one?", "two?"):
        assert "".join(found.answer(text)) == "yes"
    found.reset()
    list(found.answer("three?"))
    assert spoken.prompts == [
        b"<system>be brief<user>one?<assistant>",
        b"<system>be brief<user>one?<assistant>yes<user>two?<assistant>",
        b"<system>be brief<user>three?<assistant>",
    ]


def test_without_a_template_each_prompt_stands_alone():
    found, spoken = talk("yes")
    for text in ("one", "two"):
        list(found.answer(text))
    assert spoken.prompts == [b"one", b"two"]


def test_a_conversation_that_is_too_long():
    found, _ = talk("yes", max_length=40)
    with raises_naming(UserError, "50 tokens", "40", "shorten"):
        list(found.answer("x" * 50))
    found, _ = talk("yes", has_template=True, max_length=70)
    list(found.answer("one?"))
    with raises_naming(UserError, "70", "/reset"):
        list(found.answer("x" * 30))


@pytest.mark.full
def test_adapters_that_learnt_nothing_answer_as_their_base(tmp_path):
    """A decoding model reads on what its output matrix gives, which still gets no adapters."""
    folder = shutil.copytree(FOLDER, tmp_path / "untied")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][::-1].copy()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))

    def answers(name, *fields):
        overrides = [f"FOLDER={str(folder)!r}", "SEQ_LEN=64", f"FILES={str(folder / '*.jinja')!r}", *fields]
        settings = {"restore_checkpoint_dir": folder, "max_tokens": 8}
        return st.generate(name, tmp_path / "run", ["one"], overrides=overrides, **settings)

    base = answers("lm.hf.FromFolder")
    assert answers("lm.finetune.LoraFromFolder", "LORA_TARGETS='all-linear'") == base


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat")
    (folder / "zen.txt").write_text("Beautiful is better than ugly. " * 400)
    overrides = [f"FILES={str(folder / '*.txt')!r}", *OVERRIDES]
    st.train("lm.own_text.OwnText", folder / "run", overrides=overrides)
    return folder, overrides


@pytest.mark.full
def test_generate_gives_what_one_decode_gives(run):
    folder, overrides = run
    (answer,) = st.generate("lm.own_text.OwnText", folder / "run", ["Beautiful"], overrides=overrides, max_tokens=40)
    with st.api._job("chat", "lm.own_text.OwnText", folder / "run", overrides, {}) as job:
        whole = Talk.of_job(job)
        settings = dataclasses.replace(whole._settings, max_tokens=40)
        prompt = Prompt(tuple(whole._texts.encode_prompt("Beautiful")))
        (tokens,) = whole._requests.continuations([prompt], settings, whole._source)
        assert answer == whole._texts.decode(tokens)
    assert answer


@pytest.mark.full
def test_the_command_line_answers_a_pipe(run):
    folder, _ = run
    plain = [sys.executable, "-m", "spmd_trainer.main", f"--job_log_dir={folder / 'run'}", "--max_tokens=8"]
    command = [*plain, "--mode=chat"]
    piped = subprocess.run(command, input="Beautiful", capture_output=True, text=True, timeout=300)
    assert piped.returncode == 0, piped.stderr
    given = subprocess.run([*plain, "--prompt=Beautiful"], capture_output=True, text=True, timeout=300)
    assert given.stdout == piped.stdout  # the text alone: the log goes elsewhere
    assert 1 < len(given.stdout.encode()) <= 9 + len("\n")
    empty = subprocess.run(command, input="", capture_output=True, text=True, timeout=300)
    assert empty.returncode == 2
    assert "--prompt" in empty.stderr


@pytest.mark.full
def test_lines_that_are_typed(run, monkeypatch, capsys):
    folder, overrides = run
    lines = iter(["Beautiful", "", "x" * 200, "/reset", "Beautiful", "/exit", "never"])
    monkeypatch.setattr("builtins.input", lambda shown: next(lines))
    monkeypatch.setattr(sys, "stdin", types.SimpleNamespace(isatty=lambda: True, read=io.StringIO().read))
    with st.api._job("chat", "lm.own_text.OwnText", folder / "run", overrides, {"max_tokens": 8}) as job:
        chat.chat(job)
    first, *answers = capsys.readouterr().out.rstrip("\n").split("\n")
    assert "step 30" in first
    assert len(answers) == 3
    assert answers[0] == answers[2]
    assert missing_facts(answers[1], "tokens", "shorten") == []
    assert next(lines) == "never"


@pytest.mark.full
def test_what_can_not_talk(run):
    with raises_naming(UserError, "StdlibBytesTiny", "decode_once"):
        st.generate("lm.stdlib.StdlibBytesTiny", trained_helpers.trained(), ["a"])
    folder, overrides = run
    with raises_naming(UserError, "chat template"):
        st.generate("lm.own_text.OwnText", folder / "run", ["a"], overrides=overrides, system="be brief")
