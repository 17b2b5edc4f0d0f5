"""Settings of `--mode=export`, `--mode=page` (a run's HTML page) and `--mode=port` (code written for paxml)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from spmd_trainer.errors import UserError
from spmd_trainer.settings import Settings, setting
from spmd_trainer.training.run_config import RunConfig, read_directory

if TYPE_CHECKING:
    from etils import epath

_planning = functools.partial(setting, group="Checking and planning")
_export = functools.partial(setting, group="Export (--mode=export)")
_page = functools.partial(setting, group="The page of a run (--mode=page)")


@dataclasses.dataclass(frozen=True)
class ExportConfig(RunConfig):
    """Settings of `--mode=export`, which exports a checkpoint, by default as a Hugging Face folder."""

    mode: str = "export"
    directory: epath.Path = _export(
        None,
        "The folder to write. It must be new or empty.",
        flag="export_dir",
        value="DIR",
        read=read_directory,
        required="--mode=export needs --export_dir=DIR, the folder to write",
    )
    dtype: str | None = _export(
        None,
        "The dtype to write; by default, that of the variables.",
        flag="export_dtype",
        value="DTYPE",
        choices=("float32", "bfloat16", "float16"),
    )
    adapter: bool = _export(
        False, "Write the adapters alone, in PEFT's format, instead of a merged model.", flag="export_adapter"
    )
    checkpoint: bool = _export(
        False, "Write a checkpoint instead of a folder, for warm starts; of any model.", flag="export_checkpoint"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.checkpoint and (self.adapter or self.dtype):
            raise UserError("--export_checkpoint writes all variables; leave --export_adapter and --export_dtype out")
        if self.adapter and self.dtype:
            raise UserError("--export_adapter writes float32; leave --export_dtype out")


@dataclasses.dataclass(frozen=True)
class PageConfig(Settings):
    """Settings of `--mode=page`, which writes or serves an HTML page about the runs in `directories`."""

    directories: Sequence[str]
    page_file: str | None = _page(
        None, "Write this file instead of run.html in --job_log_dir, or compare.html for several runs.", value="FILE"
    )
    follow: bool = _page(False, "Serve the page on this machine, up to date while the run goes on, until Ctrl-C.")
    port: int = _page(0, "With --follow: the port; 0 takes a free one.", value="PORT", at_least=0, at_most=65535)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.page_file and self.follow:
            raise UserError("--follow writes no file: leave --page_file out")
        if self.port and not self.follow:
            raise UserError("--port goes with --follow")


@dataclasses.dataclass(frozen=True)
class PortConfig(Settings):
    """Settings of `--mode=port`, which prints the changes that code written for paxml needs."""

    module: str = _planning(
        None,
        "File, folder or module written for paxml, for --mode=port.",
        value="FILE",
        instead="--exp_module=MODULE adds experiments of your own",
        required="--mode=port needs --module=FILE: a file, folder or module written for paxml",
    )


CONFIGS: Mapping[str, type[Settings]] = {"export": ExportConfig, "page": PageConfig, "port": PortConfig}
