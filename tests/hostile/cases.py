"""What a hostile case is: the files that it writes, the command that reads them, and what must become of it."""

from __future__ import annotations

import dataclasses
import functools
import random
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

DATA = Path(__file__).resolve().parents[1] / "interop" / "data"
TRAINER, IMPORT_PAX = "trainer", "import_pax"
TEXT = "hello world, this is a text\n" * 50
CHAT = '{"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A llama."}]}\n'
# Short rows and two of them: the smallest program that the experiments have.
SMALL = ("--fdl.SEQ_LEN=16", "--fdl.GLOBAL_BATCH_SIZE=2", "--jax_cache_dir=")
TRAINED = ("--fdl.NUM_TRAIN_STEPS=2", "--fdl.CHECKPOINT_EVERY_N_STEPS=1")
LORA = (
    "--fdl.LORA_TARGETS=['attention/(query|value|output)/w','mlp/down/w']",
    "--fdl.LORA_RANK=3",
    "--fdl.LORA_ALPHA=5",
)


@dataclasses.dataclass(frozen=True)
class Command:
    """What a case runs.

    Attributes:
      what: the case in a few words, for reports.
      arguments: the command line, without the program.
      program: `TRAINER`, or `IMPORT_PAX` for tools/import_pax_checkpoint.py.
      must_refuse: status 0 is a fault.
    """

    what: str
    arguments: tuple[str, ...]
    program: str = TRAINER
    must_refuse: bool = False


@dataclasses.dataclass(frozen=True)
class Place:
    """The folders of a case. Only `run` and `out` may change, and what the system's settings name for temporary files.

    Attributes:
      root: the case's folder.
      trained: makes a run of two steps in a new folder of the given path, from the folder `model_folder` of the same path.
    """

    root: Path
    trained: Callable[[Path], None]

    @property
    def inputs(self) -> Path:
        """Where the hostile files are; also the working directory."""
        return self.root / "in"

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.root / "run"

    @property
    def out(self) -> Path:
        """Where an export goes; it does not exist yet."""
        return self.root / "out" / "new"

    def write(self, name: str, content: str | bytes) -> Path:
        """Writes an input and returns its path."""
        path = self.inputs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    def model_folder(self) -> Path:
        """Copies a folder of Hugging Face into the inputs: a Llama of two layers, with a tokenizer and a chat template."""
        path = self.inputs / "model"
        shutil.copytree(DATA / "hf" / "llama_tokenizer", path, ignore=shutil.ignore_patterns("expected.npz"))
        self.write("a.txt", TEXT)
        self.write("chats.jsonl", CHAT)
        return path

    def adapter_folder(self) -> Path:
        """Copies adapters of PEFT into the inputs, beside their model."""
        self.model_folder()
        path = self.inputs / "adapters"
        shutil.copytree(DATA / "peft" / "lora", path, ignore=shutil.ignore_patterns("expected.npz"))
        return path

    def pax_run(self, layout: str) -> Path:
        """Copies a checkpoint that paxml wrote into the inputs; returns the step's folder."""
        with tarfile.open(DATA / "UnevenRepeatedAdam.tar.xz") as archive:
            inside = [entry for entry in archive if f"/{layout}" in entry.name]
            archive.extractall(self.inputs, inside, filter="data")
        return next((self.inputs / "UnevenRepeatedAdam" / layout).iterdir())

    def trained_run(self) -> Path:
        """Copies a run of two steps to the run's folder, and its model to the inputs."""
        self.model_folder()
        self.run.rmdir()
        self.trained(self.run)
        return self.run


Maker = Callable[[random.Random, Place], Command]


def look(what: str, *, must_refuse: bool = False) -> Command:
    """Opens the model's folder: its config.json, and the headers of its tensors."""
    flags = ("--exp=lm.hf.FromFolder", "--fdl.FOLDER=model", '--fdl.VARIABLE_DTYPE="stored"', "--fdl.FILES=a.txt")
    return Command(what, (*flags, *SMALL, "--mode=inspect"), must_refuse=must_refuse)


def chat(what: str, files: str = "chats.jsonl", *more: str, must_refuse: bool = False) -> Command:
    """Prepares conversations with the tokenizer and the template of the model's folder."""
    flags = ("--exp=lm.finetune.ChatFromFolder", "--fdl.FOLDER=model", f"--fdl.FILES={files}", *SMALL[1:])
    return Command(what, (*flags, "--fdl.SEQ_LEN=64", *more, "--mode=data"), must_refuse=must_refuse)


def adapt(what: str, *, must_refuse: bool = False) -> Command:
    """Exports a model with the adapters of PEFT merged."""
    flags = ("--exp=lm.finetune.LoraFromFolder", "--fdl.FOLDER=model", "--fdl.FILES=a.txt", *SMALL, *LORA)
    more = ("--job_log_dir=../run", "--mode=export", "--export_dir=../out/new", "--restore_checkpoint_dir=adapters")
    return Command(what, (*flags, *more), must_refuse=must_refuse)


def import_pax(what: str, step_dir: Path, *, must_refuse: bool = False) -> Command:
    """Converts a checkpoint of Pax."""
    return Command(what, (str(step_dir.parent), "../out/new"), program=IMPORT_PAX, must_refuse=must_refuse)


def corpus(what: str, files: str, *more: str, must_refuse: bool = False) -> Command:
    """Reads documents, as bytes."""
    flags = ("--exp=lm.own_text.OwnText", f"--fdl.FILES={files}", "--fdl.MAX_SEQ_LEN=16", "--fdl.GLOBAL_BATCH_SIZE=2")
    return Command(what, (*flags, "--jax_cache_dir=", *more, "--mode=data"), must_refuse=must_refuse)


def on_run(what: str, mode: str, *, must_refuse: bool = False) -> Command:
    """Goes on with the run of two steps: 'page' shows it, 'export' writes its model, 'train' finds that it has ended."""
    if mode == "page":
        return Command(what, ("--mode=page", "--job_log_dir=../run"))
    flags = ("--exp=lm.hf.FromFolder", "--fdl.FOLDER=model", "--fdl.FILES=a.txt", *SMALL, *TRAINED)
    more = ("--export_dir=../out/new",) if mode == "export" else ()
    return Command(what, (*flags, "--job_log_dir=../run", f"--mode={mode}", *more), must_refuse=must_refuse)


@functools.cache
def training_command() -> tuple[str, ...]:
    """The command line that makes the run of two steps."""
    return on_run("", "train").arguments
