"""Messages that name the nearest valid spelling."""

import subprocess
import sys

import pytest
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
    assert first_paragraph(error) == "tasks_lib.Train has no field 'num_step'; did you mean num_steps?"


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
    assert message == "inputs.text.PromptInput has no field 'num_promts'; did you mean num_prompts?"


def test_an_unknown_argument_of_a_function_and_of_a_local_class():
    class Local:
        def __init__(self, width=1):
            self.width = width

    with pytest.raises(AttributeError) as of_function:
        Config(a_function).set(widht=3)
    assert first_paragraph(of_function.value) == "a_function has no field 'widht'; did you mean width?"
    with pytest.raises(TypeError) as given:
        Config(Local, widht=3)
    assert first_paragraph(given.value).endswith("Local has no field 'widht'")


def test_a_field_that_exists_and_is_not_set_is_another_mistake():
    with pytest.raises(AttributeError) as unset:
        Config(a_function).width  # noqa: B018
    assert "No parameter 'width' has been set" in first_paragraph(unset.value)


def test_importing_errors_brings_in_neither_jax_nor_numpy():
    """A mistyped flag is answered at once."""
    code = "import sys, spmd_trainer.errors; print(*sorted({'jax', 'numpy'} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert result.stdout.split() == []
