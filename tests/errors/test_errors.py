"""Messages that name the nearest valid spelling."""

import subprocess
import sys

import pytest
from facts import assert_names
from praxis.pax_fiddle import Config

from spmd_trainer import inputs
from spmd_trainer.errors import did_you_mean, first_paragraph


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("dta", "; did you mean data?"),
        ("map_7d", "; did you mean map_2d or map_1d?"),
        ("zzz", "; known: data, map_1d, map_2d"),
        (3, "; known: data, map_1d, map_2d"),
    ],
)
def test_the_nearest_names_or_all(name, text):
    assert did_you_mean(name, ["map_2d", "data", "map_1d"]) == text


def test_the_caller_may_say_what_comes_instead_of_the_known_names():
    assert did_you_mean("zzz", ["data"], otherwise=".") == "."
    assert did_you_mean("dta", ["data"], otherwise=".") == "; did you mean data?"
    assert did_you_mean("zzz", []) == ""


def test_fiddles_unknown_field_names_the_nearest_one():
    fiddle = "No parameter named 'num_step' exists for <class 'spmd_trainer.tasks_lib.Train'>; valid parameter names: num_steps"
    error = TypeError(f"{fiddle}\nFiddle context: <Config[Train]>")
    text = first_paragraph(error)
    assert_names(text, "tasks_lib.Train", "no field 'num_step'", "mean num_steps")
    assert "Fiddle" not in text


def a_function(*, width):
    return width


@pytest.mark.parametrize(
    "mistake",
    [
        lambda: Config(inputs.PromptInput, num_promts=3),
        lambda: Config(inputs.PromptInput).set(num_promts=3),
        lambda: setattr(Config(inputs.PromptInput), "num_promts", 3),
        lambda: Config(inputs.PromptInput).num_promts,
    ],
    ids=["given", "set", "assigned", "read"],
)
def test_an_unknown_field_of_an_input_names_the_nearest_one_however_it_is_written(mistake):
    with pytest.raises((TypeError, AttributeError)) as caught:
        mistake()
    message = first_paragraph(caught.value)
    assert_names(message, "inputs.text.PromptInput", "no field 'num_promts'", "mean num_prompts")
    assert "Fiddle" not in message


def test_an_unknown_argument_of_a_function_and_of_a_local_class():
    class Local:
        def __init__(self, width=1):
            self.width = width

    with pytest.raises(AttributeError) as of_function:
        Config(a_function).set(widht=3)
    assert_names(first_paragraph(of_function.value), "a_function", "no field 'widht'", "mean width")
    with pytest.raises(TypeError) as given:
        Config(Local, widht=3)
    text = first_paragraph(given.value)
    assert_names(text, "Local", "no field 'widht'")
    assert "Fiddle" not in text


def test_a_field_that_exists_and_is_not_set_is_another_mistake():
    with pytest.raises(AttributeError) as unset:
        Config(a_function).width  # noqa: B018
    assert_names(first_paragraph(unset.value), "parameter 'width'", "been set")


def test_importing_errors_brings_in_neither_jax_nor_numpy():
    """A mistyped flag is answered at once."""
    code = "import sys, spmd_trainer.errors; print(*sorted({'jax', 'numpy'} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.split() == []
