"""Chat templates: renderings equal to transformers', the sandbox, and the choice among a tokenizer's templates."""

import concurrent.futures
import json
import os
import sys

import pytest
from chat_templates import CONVERSATIONS, RENDERED, SPECIAL_TOKENS, TEMPLATES
from facts import raises_naming

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import chat_template
from spmd_trainer.inputs.chat_template import ChatTemplate, RenderLimitError

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
        with raises_naming(UserError, template.name, "can't render"):
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
    with pytest.raises(UserError, match=r"^mine (can't render|.* may not)"):
        ChatTemplate(attack, name="mine").render(HI)
    assert HI == [{"role": "user", "content": "Hi"}]


def test_a_template_that_is_none_is_named_with_its_line():
    with raises_naming(UserError, "mine", "chat template", "line 2"):
        ChatTemplate("{{ 1 }}\n{% for %}", name="mine")


def test_a_template_s_own_refusal_is_told():
    with raises_naming(UserError, "mine", "can't render", "no users here"):
        ChatTemplate("{{ raise_exception('no users here') }}", name="mine").render(HI)


def test_a_message_that_lacks_what_a_template_needs_is_an_error():
    with raises_naming(UserError, "can't render", "weight"):
        ChatTemplate("{{ messages[0].content | trim | length + messages[0].weight }}").render(HI)


MARKED = "{% for m in messages %}{{ m.role }}:{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}"


def test_marks_are_found_in_the_text():
    talk = [*HI, {"role": "assistant", "content": "\N{GRINNING FACE}!"}, {"role": "user", "content": ""}]
    template = ChatTemplate(MARKED)
    found = template.render_marked(talk)
    assert found.text == template.render(talk) == "user:Hi;assistant:\N{GRINNING FACE}!;user:;"
    assert found.generated == ((5, 7), (18, 20), (26, 26))
    assert template.has_marks
    assert ChatTemplate("{%- generation -%}{%- endgeneration -%}").has_marks
    assert not ChatTemplate("{# {% generation %} #}{% raw %}{% generation %}{% endraw %}").has_marks
    assert not ChatTemplate("{% macro m() %}{{ caller() }}{% endmacro %}{% call m() %}a{% endcall %}").has_marks


@pytest.mark.parametrize(
    "text",
    [
        "{% macro m(x) %}a{% generation %}{{ x }}{% endgeneration %}{% endmacro %}{{ m('b') }}",
        "{% set x %}{% generation %}b{% endgeneration %}{% endset %}a{{ x }}",
        "a{% filter upper %}{% generation %}b{% endgeneration %}{% endfilter %}",
        "{% generation %}a{% generation %}a{% endgeneration %}{% endgeneration %}",
    ],
)
def test_marks_whose_position_is_unknown_are_refused(text):
    template = ChatTemplate(text, name="mine")
    assert template.render(HI).lower() in ("ab", "aa")
    with raises_naming(UserError, "mine", "{% generation %}", "macro", "filter", "{% set %}"):
        template.render_marked(HI)


def test_a_function_as_a_variable_is_refused():
    with raises_naming(UserError, "mine", "variables", "values"):
        ChatTemplate("{{ f() }}", name="mine").render(HI, f=lambda: 1)


def test_entries_that_are_null_are_not_there():
    text = "{{ messages[0].content is defined }} {{ messages[0].reasoning_content is defined }}"
    null = {"role": "assistant", "content": None, "thinking": None, "reasoning_content": None}
    assert ChatTemplate(text).render([null]) == "False False"


def test_the_choice_of_a_template():
    known = {"default": "a", "tool_use": "b", "rag": "c"}
    assert chat_template.choose(known, None, has_tools=False, owner="x") == ("default", "a")
    assert chat_template.choose(known, None, has_tools=True, owner="x") == ("tool_use", "b")
    assert chat_template.choose({"default": "a"}, None, has_tools=True, owner="x") == ("default", "a")
    assert chat_template.choose(known, "rag", has_tools=True, owner="x") == ("rag", "c")
    with raises_naming(UserError, "x", "chat template 'rags'", "default, rag, tool_use", "rag?"):
        chat_template.choose(known, "rags", has_tools=False, owner="x")
    with raises_naming(UserError, "x", "no chat template", "set chat_template", ".jinja"):
        chat_template.choose({}, None, has_tools=False, owner="x")


def test_without_jinja2_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(UserError, match=r"needs jinja2: pip install 'spmd-trainer\[hf\]'"):
        ChatTemplate("{{ 1 }}", name="mine")


DOUBLED = "{% for _ in range(90) %}{% set ns.s = _MORE_ %}{% endfor %}{{ ns.s }}"
ENDLESS = {
    "nested ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "doubled integers": "{% set ns = namespace(s=9) %}" + DOUBLED.replace("_MORE_", "ns.s * ns.s"),
    "doubled lists": "{% set ns = namespace(s=[1]) %}" + DOUBLED.replace("_MORE_", "[ns.s, ns.s]"),
}


@pytest.mark.parametrize("text", ENDLESS.values(), ids=ENDLESS)
def test_a_rendering_without_an_end_is_ended(text):
    template = ChatTemplate(text, name="mine", max_render_seconds=0.05)
    with raises_naming(RenderLimitError, "mine", "0.05 s", "max_render_seconds"):
        template.render(HI)
    assert ChatTemplate("{{ messages[0].content }}").render(HI) == "Hi"


LARGE = {
    "doubled strings": "{% set ns = namespace(s='x') %}" + DOUBLED.replace("_MORE_", "ns.s ~ ns.s"),
    "a width": "{{ 'x'.center(10**11) }}",
    "a width of a filter": "{{ 'x' | center(100000000000) }}",
    "bytes": "{{ (1).to_bytes(10**11, 'big') }}",
    "many": "{% for _ in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
}


@pytest.mark.parametrize("text", LARGE.values(), ids=LARGE)
def test_a_rendering_that_grows_without_an_end_is_ended(text):
    with raises_naming(RenderLimitError, "mine", "max_rendered_chars=1,000"):
        ChatTemplate(text, name="mine", max_rendered_chars=1000, max_render_seconds=10).render(HI)


@pytest.mark.parametrize(
    "text",
    [
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% block a %}{{ self.a() }}{% endblock %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ 1" + "+1" * 5000 + " }}",
    ],
)
def test_a_template_that_nests_without_an_end_is_refused(text):
    with raises_naming(RenderLimitError, "mine", "nests"):
        ChatTemplate(text, name="mine").render(HI)


def test_the_limits_of_a_rendering_can_be_raised():
    text = "{{ 'x' * 2000 }}"
    with raises_naming(RenderLimitError, "1,000 characters", "max_rendered_chars"):
        ChatTemplate(text, max_rendered_chars=1000).render(HI)
    assert len(ChatTemplate(text, max_rendered_chars=2000).render(HI)) == 2000
    for wrong in ({"max_rendered_chars": 0}, {"max_render_seconds": -1}):
        with raises_naming(UserError, *wrong):
            ChatTemplate(text, **wrong)


def test_threads_and_forked_processes_render():
    template = ChatTemplate("{{ messages[0].content }}")
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        texts = [str(number) for number in range(40)]
        assert list(threads.map(lambda text: template.render([{"content": text}]), texts)) == texts
    child = os.fork()
    if child == 0:
        os._exit(0 if template.render(HI) == "Hi" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert template.render(HI) == "Hi"
