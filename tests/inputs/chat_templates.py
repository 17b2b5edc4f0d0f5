"""Chat templates in the forms that published models have, and conversations for them.

Run by itself in an environment with transformers, this file writes the renderings of transformers, which the tests compare with:

    python tests/inputs/chat_templates.py
"""

import json
import pathlib

RENDERED = pathlib.Path(__file__).parent / "data" / "chat_rendered.json"

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

CHATML = """
{%- if messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

LLAMA_3 = """
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%Y") | length | string %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}"""

MISTRAL = """{%- set ns = namespace(system='', index=0) %}
{%- if messages[0]["role"] == "system" %}
    {%- set ns.system = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and ns.system %}
            {{- "[INST] " + ns.system + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}
"""

# Block trimming, loop controls, `generation`, JSON with HTML characters, and reasoning under its several names.
EXTRAS = """{% for message in messages %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
  {# a comment #}
    {{ {'role': message.role, 'text': message.content} | tojson }}
    {{ message.content | tojson(ensure_ascii=True) }} {{ message | tojson(sort_keys=True, separators=(',', ':')) }}
    {% if message.role == 'assistant' %}
    {% set answer = message.content ~ message.reasoning_content ~ message.thinking %}
    {% generation %}{% set inner = 1 %}[{{ answer }}]{% endgeneration %}
    {{ inner is defined }}
    {% endif %}
    {% if loop.index > 3 %}{% break %}{% endif %}
{% endfor %}
{{ undefined_name }}{{ documents }}{{ dict(a=1).a }}{{ range(3) | list }}
"""

TEMPLATES = {"chatml": CHATML, "llama_3": LLAMA_3, "gemma": GEMMA, "mistral": MISTRAL, "extras": EXTRAS}

_TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "Adds <a> & 'b'", "parameters": {"type": "object"}},
}
CONVERSATIONS = {
    "question": {"messages": [{"role": "user", "content": "  Größe <b>&</b> 東京? "}]},
    "system": {"messages": [{"role": "system", "content": "Be brief. "}, {"role": "user", "content": "Hi"}]},
    "dialogue": {
        "messages": [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": " Hello.\n", "reasoning": "greet"},
            {"role": "user", "content": "'quoted' \"text\""},
            {"role": "assistant", "content": "Yes", "thinking": "hm", "reasoning_content": None},
            {"role": "user", "content": "Bye"},
        ]
    },
    "tools": {"messages": [{"role": "user", "content": "1 + 2?"}], "tools": [_TOOL]},
    "variables": {
        "messages": [{"role": "user", "content": "Hi"}],
        "chat_template_kwargs": {"enable_thinking": False, "date_string": "26 Jul 2024", "bos_token": "<other>"},
    },
    "unknown role": {"messages": [{"role": "narrator", "content": "Once"}]},
    "empty": {"messages": [{"role": "user", "content": ""}], "documents": [{"title": "a", "text": "b"}]},
}


def main() -> None:
    """Writes {template: {conversation: [without, with generation prompt]}}; null where the template refuses it."""
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(template: str, conversation: dict, prompt: bool) -> str | None:
        more = {**SPECIAL_TOKENS, **conversation.get("chat_template_kwargs", {})}
        try:
            rendered, _ = render_jinja_template(
                [conversation["messages"]],
                tools=conversation.get("tools"),
                documents=conversation.get("documents"),
                chat_template=template,
                add_generation_prompt=prompt,
                **more,
            )
        except jinja2.TemplateError:
            return None
        return rendered[0]

    found = {
        name: {
            key: [render(template, given, prompt) for prompt in (False, True)] for key, given in CONVERSATIONS.items()
        }
        for name, template in TEMPLATES.items()
    }
    RENDERED.write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main()
