"""Chat templates: renderings equal to transformers', the sandbox, and the choice among a tokenizer's templates."""

import json
import sys

import pytest
from chat_templates import CONVERSATIONS, RENDERED, SPECIAL_TOKENS, TEMPLATES

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import chat_template
from spmd_trainer.inputs.chat_template import ChatTemplate

EXPECTED = json.loads(RENDERED.read_text())
HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("prompt", [False, True])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_renderings_are_those_of_transformers(name, conversation, prompt):
    template = ChatTemplate(TEMPLATES[name], special_tokens=SPECIAL_TOKENS)
    given = dict(CONVERSATIONS[conversation])
    variables = given.pop("chat_template_kwargs", {})
    expected = EXPECTED[name][conversation][prompt]
    if expected is None:
        with pytest.raises(UserError, match="can't render this conversation"):
            template.render(**given, add_generation_prompt=prompt, **variables)
    else:
        assert template.render(**given, add_generation_prompt=prompt, **variables) == expected


def test_every_template_and_conversation_was_rendered_by_transformers():
    assert {name: sorted(found) for name, found in EXPECTED.items()} == dict.fromkeys(TEMPLATES, sorted(CONVERSATIONS))
    assert any(found is None for found in EXPECTED["gemma"]["system"])


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append({'role': 'user'}) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ (messages|attr('__class__')) ~ messages.__class__.__name__ }}",
        "{% set ns = namespace() %}{{ ns.__init__.__globals__ }}",
        "{{ range(10**9) | list }}",
        "{{ dict.mro() }}",
    ],
)
def test_a_template_can_t_leave_the_sandbox(attack):
    with pytest.raises(UserError, match=r"mine (does something that chat templates may not do|can't render)"):
        ChatTemplate(attack, name="mine").render(HI)
    assert HI == [{"role": "user", "content": "Hi"}]


def test_a_template_that_is_none_is_named_with_its_line():
    with pytest.raises(UserError, match=r"mine is not a chat template: line 2: .*"):
        ChatTemplate("{{ 1 }}\n{% for %}", name="mine")


def test_a_template_s_own_refusal_is_told():
    with pytest.raises(UserError, match=r"mine can't render this conversation: no users here"):
        ChatTemplate("{{ raise_exception('no users here') }}", name="mine").render(HI)


def test_a_message_that_lacks_what_a_template_needs_is_an_error():
    with pytest.raises(UserError, match="can't render this conversation"):
        ChatTemplate("{{ messages[0].content | trim | length + messages[0].weight }}").render(HI)


def test_the_choice_of_a_template():
    known = {"default": "a", "tool_use": "b", "rag": "c"}
    assert chat_template.choose(known, None, has_tools=False, owner="x") == ("default", "a")
    assert chat_template.choose(known, None, has_tools=True, owner="x") == ("tool_use", "b")
    assert chat_template.choose({"default": "a"}, None, has_tools=True, owner="x") == ("default", "a")
    assert chat_template.choose(known, "rag", has_tools=True, owner="x") == ("rag", "c")
    with pytest.raises(
        UserError, match=r"x has no chat template 'rags'; it has default, rag, tool_use; did you mean rag"
    ):
        chat_template.choose(known, "rags", has_tools=False, owner="x")
    with pytest.raises(UserError, match=r"x has no chat template .*set chat_template to the path of a \.jinja file"):
        chat_template.choose({}, None, has_tools=False, owner="x")


def test_without_jinja2_the_extra_is_named(monkeypatch):
    chat_template._compile.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UserError, match=r"needs jinja2: pip install 'spmd-trainer\[hf\]'"):
        ChatTemplate("{{ 1 }}", name="mine")
