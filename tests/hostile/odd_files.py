"""What is no regular file, names with commands for a terminal, and settings out of all proportion."""

from __future__ import annotations

import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

from absurd_json import ESCAPES
from cases import CHAT, TEXT, Command, Place, adapt, chat, corpus, import_pax, look, on_run

_IN_MODEL = ("config.json", "model.safetensors", "generation_config.json")
_OF_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
_STEP = "checkpoints/2"
_OF_STEP = ("manifest.json", "record/record.json", "state/_METADATA", "commit_success.txt", "state/manifest.ocdbt")
_OF_RUN = ("run.json", "config.txt", "lock", _STEP, *(f"{_STEP}/{name}" for name in _OF_STEP))


def no_regular_file(rng: random.Random, place: Place) -> Command:
    """A FIFO, a socket, a device or a loop of links stands where a file should be."""
    what, replace = rng.choice(_KINDS)
    which = rng.randrange(7)
    if which == 0:
        name = rng.choice(_IN_MODEL)
        replace(place.model_folder() / name)
        return look(f"{name} is {what}")
    if which == 1:
        name = rng.choice(_OF_TOKENIZER)
        replace(place.model_folder() / name)
        return chat(f"{name} is {what}")
    if which == 2:
        name = rng.choice(("adapter_config.json", "adapter_model.safetensors"))
        replace(place.adapter_folder() / name)
        return adapt(f"{name} is {what}")
    if which == 3:
        step = place.pax_run(rng.choice(("zarr_1.1", "ocdbt_1.2")))
        path = rng.choice(
            (step / "metadata" / "metadata", step / "state" / "_sharding", next((step / "state").iterdir()))
        )
        replace(path)
        return import_pax(f"{path.name} is {what}", step)
    if which == 4:
        name = rng.choice(_OF_RUN)
        replace(place.trained_run() / name)
        return on_run(f"{name} is {what}", rng.choice(("export", "train", "page")))
    if which == 5:
        name = rng.choice(
            ("docs.jsonl", "docs.jsonl.gz", "docs.txt", "docs.tar", "docs.parquet", "docs.tfrecord", "docs.arrow")
        )
        replace(place.inputs / name)
        return corpus(f"{name} is {what}", name, must_refuse=True)
    if rng.random() < 0.5:
        replace(place.model_folder().parent / "chats.jsonl")
        return chat(f"chats.jsonl is {what}", must_refuse=True)
    replace(place.inputs / "ported.py")
    return Command(f"ported.py is {what}", ("--mode=port", "--module=ported.py"), must_refuse=True)


def _gone(path: Path) -> Path:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _socket(path: Path) -> None:
    before = os.getcwd()
    os.chdir(_gone(path).parent)  # the path of a socket may not be long
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)
    os.chdir(before)


def _link(target: str) -> Callable[[Path], None]:
    return lambda path: _gone(path).symlink_to(path.name if target == "itself" else target)


_KINDS: tuple[tuple[str, Callable[[Path], None]], ...] = (
    ("a FIFO", lambda path: os.mkfifo(_gone(path))),
    ("a FIFO", lambda path: os.mkfifo(_gone(path))),
    ("a FIFO", lambda path: os.mkfifo(_gone(path))),
    ("a socket", _socket),
    ("a directory", lambda path: _gone(path).mkdir()),
    ("a link to /dev/zero", _link("/dev/zero")),
    ("a link to /dev/full", _link("/dev/full")),
    ("a link to itself", _link("itself")),
    ("a link to nothing", _link("nothing")),
)


def escape_names(rng: random.Random, place: Place) -> Command:
    """Files whose names command a terminal, whole, damaged or absent."""
    escape = rng.choice((*ESCAPES, "\x1b[31mred\x1b[0m", "a\nspmd-trainer: all is well\n", "\r\x1b[K", "\udcff\udc9b"))
    name = f"a{escape}b"
    what = f"{escape!r} in "
    how = rng.randrange(6)
    if how == 0:
        place.write(f"{name}.jsonl", '{"text": "a"}\n{"text"\n')
        return corpus(f"{what}the name of a damaged file", "a*b.jsonl", must_refuse=True)
    if how == 1:
        return corpus(f"{what}the name of a missing file", f"{name}.jsonl", must_refuse=True)
    if how == 2:
        place.write(f"{name}.txt", TEXT)
        return corpus(f"{what}the name of a good file", "a*b.txt")
    if how == 3:
        folder = place.model_folder()
        folder.rename(folder.parent / name)
        (folder.parent / name / "config.json").write_text("{")
        flags = ("--exp=lm.hf.FromFolder", f"--fdl.FOLDER={name}", "--fdl.FILES=a.txt", "--mode=inspect")
        return Command(f"{what}the name of a damaged model's folder", flags, must_refuse=True)
    if how == 4:
        place.model_folder()
        place.write(f"{name}.jsonl", CHAT[:30])
        return chat(f"{what}the name of a cut conversation", "a*b.jsonl", must_refuse=True)
    place.write(f"{name}.py", "import paxml\nx = (\n")
    return Command(f"{what}the name of a file to port", ("--mode=port", "--module=."), must_refuse=True)


def settings(rng: random.Random, place: Place) -> Command:
    """Settings of the command line that no machine has room for."""
    size = rng.choice((10**9, 10**11, 2**31, 2**63, 10**30))
    place.model_folder()
    how = rng.randrange(5)
    if how == 0:
        return corpus(f"seq_len={size}", "a.txt", f"--fdl.MAX_SEQ_LEN={size}", must_refuse=True)
    if how == 1:
        return chat(f"seq_len={size}", "chats.jsonl", f"--fdl.SEQ_LEN={size}", must_refuse=True)
    if how == 2:
        return chat(f"batch_size={size}", "chats.jsonl", f"--fdl.GLOBAL_BATCH_SIZE={size}", must_refuse=True)
    if how == 3:
        return corpus(f"batch_size={size}", "a.txt", f"--fdl.GLOBAL_BATCH_SIZE={size}", must_refuse=True)
    flags = (
        "--exp=lm.hf.FromFolder",
        "--fdl.FOLDER=model",
        "--fdl.FILES=a.txt",
        f"--fdl.SEQ_LEN={size}",
        "--jax_cache_dir=",
    )
    return Command(f"text, seq_len={size}", (*flags, "--mode=data"), must_refuse=True)
