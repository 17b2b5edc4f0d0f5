"""Settings: fields of frozen dataclasses, each declared once, with its default and a sentence of help.

The declaration determines the setting's flag, its entry in `--help`, its validity check and its keyword in Python. It also says
whether the value must be the same on all processes, and whether a restarted run reports a change of the value.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from spmd_trainer.errors import UserError, did_you_mean

_KINDS: dict[str, type] = {"bool": bool, "int": int, "float": float, "tuple": tuple}
_UNITS = {"s": 1, "m": 60, "h": 3600}
_BYTES = {f"{unit}{i}": (1024 if i else 1000) ** n for n, unit in enumerate("kMGT", 1) for i in ("", "i")}
SettingsT = TypeVar("SettingsT", bound="Settings")


@dataclasses.dataclass(frozen=True)
class Setting:
    """The declaration of one setting: everything about a field except its current value.

    Attributes:
      help: what the setting does, in a sentence.
      group: the group of `--help` that shows the setting.
      value: placeholder for the value in `--help`, e.g. 'DIR'.
      flag: name of the setting's flag, if that is not the field's own name.
      off: what `--noFLAG` does, for a flag that is on by default.
      at_least, at_most: valid range of a number.
      choices: valid values.
      read: converts a given value; called with (flag name with dashes, string from the command line or value from Python).
      compared: False if the processes of a job may have different values.
      noted: True if `config.txt` records the value, so that a restart with a different value reports the change.
      carried: True if modes without this setting ignore its flag, so that a training command also works with other modes.
      instead: what to use instead in modes that refuse the flag; part of the error message.
      empty: True if '' is a valid value. Otherwise an empty flag, as in --restore_checkpoint_dir=$UNSET, counts as not given.
      required: error message if no value is given, e.g. '--mode=replay needs --step=N'; '' for an optional setting.
      room: the optional subpackage of `spmd_trainer`, e.g. 'watch', that the setting needs; '' for none.
      default, kind: default and type of the field, filled in by `settings_of`.
    """

    help: str
    group: str
    value: str = ""
    flag: str = ""
    off: str = ""
    at_least: float = -math.inf
    at_most: float = math.inf
    choices: Sequence[str] = ()
    read: Callable[[str, Any], Any] | None = None
    compared: bool = True
    noted: bool = False
    carried: bool = False
    instead: str = ""
    empty: bool = False
    required: str = ""
    room: str = ""
    default: Any = None
    kind: type = str

    def problem(self, value: Any) -> str:
        """Returns a clause for the error message that describes the valid values, or '' if `value` is valid."""
        if self.kind is bool:
            return "" if isinstance(value, bool) else "give True or False"
        if self.kind in (int, float):
            of_kind = numbers.Integral if self.kind is int else numbers.Real
            is_number = isinstance(value, of_kind) and not isinstance(value, bool)
            if is_number and self.at_least <= value <= self.at_most:
                return ""
            noun = "a whole number" if self.kind is int else "a number"
            if self.at_most < math.inf:
                return f"give {noun} from {self.at_least:.15g} to {self.at_most:.15g}"
            return f"give {noun}, {self.at_least:g} or more" if self.at_least > -math.inf else f"give {noun}"
        if self.kind is str and self.read is None and not isinstance(value, str):
            return "give a text"
        for item in value if self.kind is tuple else [value]:
            if self.choices and item not in self.choices:
                near = did_you_mean(str(item), self.choices, otherwise="")
                return f"there is no {item!r}; it takes {', '.join(self.choices)}{near}"
        return ""

    def checked(self, value: Any) -> Any:
        """Converts and checks a value that the user gave, and returns the field's value.

        Raises:
          UserError: the value is not valid, or a required value is missing.
        """
        if self.required and value in (None, ""):
            raise UserError(self.required)
        if value is None and self.default is None:
            return None
        if self.read is not None:
            value = self.read(f"--{self.flag}", value)
        elif isinstance(value, os.PathLike):
            value = os.fspath(value)
        if problem := self.problem(value):
            raise UserError(f"--{self.flag}={','.join(value) if self.kind is tuple else value}: {problem}")
        # 900 and 900.0 are the same number, so the lines that compare settings must not differ.
        return self.kind(value) if self.kind in (int, float) else value


def setting(default: Any, help: str, group: str, **about: Any) -> Any:
    """Returns a dataclass field that is a setting. `about` has further fields of `Setting`."""
    return dataclasses.field(default=default, metadata={"setting": Setting(help, group, **about)})


def settings_of(cls: type) -> dict[str, Setting]:
    """Returns the settings of a class by field name. Fields that were not made by `setting` are left out."""
    found = {}
    for field in dataclasses.fields(cls):
        if about := field.metadata.get("setting"):
            match = re.match(r"\w+", str(field.type))
            kind = _KINDS.get(match[0] if match else "", str)
            flag = about.flag or field.name
            default = None if field.default is dataclasses.MISSING else field.default
            found[field.name] = dataclasses.replace(about, flag=flag, default=default, kind=kind)
    return found


@dataclasses.dataclass(frozen=True)
class Settings:
    """Base class of the dataclasses of settings. Creating an instance converts and checks the value of every field.

    Raises:
      UserError: a value is not valid.
    """

    def __post_init__(self) -> None:
        """Replaces the value of every field with its parsed and checked value."""
        for name, about in settings_of(type(self)).items():
            object.__setattr__(self, name, about.checked(getattr(self, name)))

    def of(self, kind: type[SettingsT]) -> SettingsT:
        """Returns `self`, typed as `kind`, the settings class of one mode.

        Raises:
          TypeError: `self` is not an instance of `kind`, because it has the settings of a different mode.
        """
        if not isinstance(self, kind):
            raise TypeError(f"{type(self).__name__} has not the settings of {kind.__name__}")
        return self

    def compared_lines(self) -> Iterator[str]:
        """Yields '--flag: value' for every setting that must be equal on all processes."""
        for name, about in settings_of(type(self)).items():
            if about.compared:
                yield f"--{about.flag}: {getattr(self, name)}"

    def given(self) -> dict[str, Any]:
        """Returns {field: JSON value} of the settings other than `job_log_dir` that don't have their default values."""
        return {
            name: _as_json(value)
            for name, about in settings_of(type(self)).items()
            if name != "job_log_dir" and (value := getattr(self, name)) != about.default
        }

    def noted_lines(self) -> Iterator[str]:
        """Yields '--flag: value' for every setting that `config.txt` records."""
        for name, about in settings_of(type(self)).items():
            if about.noted:
                yield f"--{about.flag}: {getattr(self, name)}"


def _as_json(value: Any) -> Any:
    """Returns a setting's value as a number, a bool, a list of strings, or the flag's text ('data:4,mdl:2' for pairs)."""
    if isinstance(value, tuple | list):
        pairs = [":".join(map(str, item)) for item in value if isinstance(item, tuple)]
        return ",".join(pairs) if pairs else list(map(str, value))
    return value if isinstance(value, bool | int | float) else os.fspath(value)


def arguments(cls: type, given: Mapping[str, Any]) -> list[str]:
    """Returns the command-line flags for the settings that `Settings.given` returned. A list gives one flag for each item."""
    about = settings_of(cls)
    flat = ((name, one) for name, value in given.items() for one in (value if isinstance(value, list) else [value]))
    return [f"--{about[name].flag}={one}" for name, one in flat]


def refuse_unknown(known: Sequence[str], given: Mapping[str, object], where: str) -> None:
    """Raises UserError, with the nearest known names, for a keyword in `given` that is not in `known`."""
    for name in [name for name in given if name not in known]:
        raise UserError(f"{where} has no setting {name!r} (given: {given[name]!r:.100}){did_you_mean(name, known)}")


def texts(name: str, value: Any) -> tuple[str, ...]:
    """Returns a list of strings as a tuple. Raises UserError, which names `name`, for anything else, e.g. a single string."""
    if isinstance(value, str):
        raise UserError(f"{name}={value!r} is one text; give a list, e.g. {name}=[{value!r}]")
    found = tuple(value) if isinstance(value, Iterable) else (None,)
    if not all(isinstance(text, str) for text in found):
        raise UserError(f"{name}={value!r:.100}: give a list of texts")
    return found


def names(flag: str, value: Any) -> tuple[str, ...]:
    """Returns the names in a list of comma-separated strings, without duplicates."""
    return split_names(texts(flag.removeprefix("--"), value))


def split_names(lists: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for text in lists for name in text.split(",") if name.strip()))


def size(flag: str, value: Any) -> int:
    """Returns a size in bytes, given as '500GB', '1.5TB' or '200GiB', or as a number of bytes."""
    number = math.nan
    if isinstance(value, str) and (found := re.fullmatch(r"(\d+(?:\.\d+)?)([kMGT]i?)?B?", value)):
        number = float(found[1]) * _BYTES.get(found[2], 1)
    elif isinstance(value, numbers.Real) and not isinstance(value, bool):
        number = float(value)
    if not 1 <= number < math.inf:
        raise UserError(f"{flag}={value} is not of the form 500GB, 1.5TB or 200GiB")
    return int(number)


def seconds(flag: str, value: Any) -> float:
    """Returns a duration in seconds, given as '90s', '20m' or '1.5h', or as a number of seconds."""
    if isinstance(value, str):
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", value)
        number = float(found[1]) * _UNITS[found[2]] if found else math.nan
    else:
        number = float(value) if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
    if math.isnan(number):
        raise UserError(f"{flag}={value} is not of the form 90s, 20m or 1h")
    if number <= 0:
        raise UserError(f"{flag}={value} leaves no time; use e.g. {flag}=20m")
    return number
