"""Of several lines of the user that led to an error, which one is named, and in which order all of them are shown."""

import json

import pytest

from spmd_trainer.errors import user_code

CODE = """import json

def inner():
    return json.loads("{")

def outer():
    return inner()
"""


def test_the_innermost_line_of_the_user_comes_first(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    scope = {}
    exec(compile(CODE, str(path), "exec"), scope)
    with pytest.raises(json.JSONDecodeError) as raised:
        scope["outer"]()
    assert user_code.where(raised.value) == f" ({path}:4)"
    shown = [line for line in user_code.lines(raised.value) if line.startswith(str(path))]
    assert shown == [f'{path}:4, in inner: return json.loads("{{")', f"{path}:7, in outer: return inner()"]
    assert user_code.library_line(raised.value).startswith("json/decoder.py:")
