"""Imports paxml's own experiment modules from an installed paxml, with `paxml` renamed in their import lines.

    pip install --no-deps paxml==1.4.0

After this command, `spmd_trainer.tasks.lm.params.c4` is paxml's `tasks/lm/params/c4.py`, so a file that imports paxml's module
works once its imports are renamed. paxml itself is never imported, because it needs a JAX version from 2024. These imports work
for the modules in the packages that `import_table.PACKAGES` lists, and for the modules that `import_table.MODULES` lists.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import pathlib
import re
import sys
import types
from collections.abc import Sequence

from spmd_trainer.pax import import_table

# A module of praxis' repository that praxis 1.4.0 was published without.
_PRAXIS_CONTRIB = "praxis.contrib"
_PRAXIS_MODELS = "praxis.contrib.gpu.scripts_gpu.models"
INSTALL_PAXML = "pip install --no-deps paxml==1.4.0"
# How to install the packages that these modules import.
_INSTALL = {
    **dict.fromkeys(
        ("seqio", "t5", "tensorflow_text"), "pip install 'spmd-trainer[seqio]' and see docs/coming_from_pax.md"
    ),
    "pyglove": "pip install 'spmd-trainer[pyglove]'",
    "tensorflow_datasets": "pip install 'spmd-trainer[tfds]'",
    "zstandard": "pip install zstandard jsonlines pysimdjson",
    "jsonlines": "pip install zstandard jsonlines pysimdjson",
    "simdjson": "pip install zstandard jsonlines pysimdjson",
}
_IMPORT_LINE = re.compile(r"(?m)^(\s*(?:from|import)) paxml\b")


def renamed(text: str) -> str:
    """Returns the text of a Python file with `paxml` replaced by `spmd_trainer` in its import lines, and nothing else."""
    return _IMPORT_LINE.sub(r"\1 spmd_trainer", text)


def paxml_folder() -> pathlib.Path | None:
    """Returns the folder of the installed paxml; None if it is not installed. Does not import paxml."""
    spec = importlib.util.find_spec("paxml")
    if spec is None or not spec.submodule_search_locations:
        return None
    return pathlib.Path(next(iter(spec.submodule_search_locations)))


def spec_of(fullname: str) -> importlib.machinery.ModuleSpec | None:
    """Returns the import spec that loads `spmd_trainer.NAME` from paxml's file NAME.py; None if paxml has no such file.

    Raises:
      ModuleNotFoundError: paxml is not installed; the message says how to install it.
    """
    folder = paxml_folder()
    if folder is None:
        # Not the module's own name: `from spmd_trainer import automl` would hide the error.
        raise ModuleNotFoundError(
            f"{fullname} is paxml's own module, and paxml is not installed: {INSTALL_PAXML}. It is only read, never imported",
            name="paxml",
        )
    file = folder.joinpath(*fullname.split(".")[1:]).with_suffix(".py")
    if not file.is_file():
        return None
    return importlib.util.spec_from_file_location(fullname, file, loader=_RenamingLoader(fullname, str(file)))


def install() -> None:
    """Adds an import hook that loads the modules of `import_table.PACKAGES` from paxml. Does nothing if called again."""
    if not any(isinstance(finder, _PaxmlFinder) for finder in sys.meta_path):
        sys.meta_path.append(_PaxmlFinder())


class _PaxmlFinder(importlib.abc.MetaPathFinder):
    """Import hook that finds modules in paxml's folder if no other import hook has found them."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname == _PRAXIS_MODELS:
            own = pathlib.Path(__file__).parent / "import_names" / "tasks" / "lm" / "custom_metrics.py"
            return importlib.util.spec_from_file_location(fullname, own)
        if fullname.startswith(_PRAXIS_CONTRIB) and _PRAXIS_MODELS.startswith(f"{fullname}."):
            return importlib.machinery.ModuleSpec(fullname, None, is_package=True)
        package = fullname.removeprefix("spmd_trainer.").rpartition(".")[0]
        if not fullname.startswith("spmd_trainer.") or package not in import_table.PACKAGES:
            return None
        return spec_of(fullname)


class _RenamingLoader(importlib.machinery.SourceFileLoader):
    """Loads one of paxml's files, with `paxml` renamed in its import lines."""

    def get_source(self, fullname: str) -> str:
        return renamed(self.get_data(self.get_filename(fullname)).decode())

    def get_code(self, fullname: str) -> types.CodeType:
        """Compiles the file's renamed text. Ignores cached bytecode, which would be that of the original file."""
        return compile(self.get_source(fullname), self.get_filename(fullname), "exec", dont_inherit=True)

    def exec_module(self, module: types.ModuleType) -> None:
        """Runs the module.

        Raises:
          ModuleNotFoundError: the module imports a package that is not installed; the message says how to install it.
        """
        try:
            super().exec_module(module)
        except ModuleNotFoundError as error:
            install_it = _INSTALL.get((error.name or "").partition(".")[0])
            if install_it is None or install_it in str(error):  # added by a module that this one imports
                raise
            raise ModuleNotFoundError(f"{error.msg}: {install_it}", name=error.name) from error
