"""Chat templates have a budget of CPU time and characters: one that exceeds it is refused; others render as before."""

import pytest
from transformers.utils import chat_template_utils

from proxima.data import UserError
from proxima.model.chat import template_budget
from proxima.model.chat.encode import prompt_tokens
from proxima.model.chat.template_budget import BoundedEnvironment, bounded_environment
from proxima.model.chat.template_inputs import unread
from tests.model.folders import TEMPLATES
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer

CHAT = [{"role": "user", "content": "Hello?"}]
FINE = ("ordinary",)
CPU_TIME = "s of CPU time"
REASONS = {
    CPU_TIME: ("nested loops", "loops over a variable", "lists in lists", "two calls each"),
    "characters": (
        "repeated text", "repeated list", "doubled text", "doubled sum", "a large block", "text of a loop", "centred",
        "padded", "a width", "a width beside", "a width of format", "a width in format", "replaced", "joined",
        "indented", "sliced", "text of an inner loop", "a long source",
    ),
    "bits": ("squares", "powers"),
    "to_bytes": ("bytes",),
    "RecursionError": ("endless calls", "an endless loop", "deep brackets", "deep blocks"),
    "surrogates": ("half of a pair",),
    "TemplateSyntaxError": ("a tag of its own",),
    "no chats here": ("an error",),
}  # fmt: skip


def rendered(template: str) -> str:
    bounded_environment()
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer.decode(prompt_tokens(CHAT, tokenizer))


@pytest.mark.parametrize(("reason", "name"), [(reason, name) for reason, names in REASONS.items() for name in names])
def test_a_template_without_end_is_refused(monkeypatch, reason, name):
    if reason == CPU_TIME:
        monkeypatch.setattr(template_budget, "SECONDS", 0.03)
    with pytest.raises(UserError, match=f"the chat template fails for 'Hello\\?': .*{reason}"):
        rendered(TEMPLATES[name])


def test_every_template_of_the_list_has_its_reason():
    assert sorted([*FINE, *(name for names in REASONS.values() for name in names)]) == sorted(TEMPLATES)


SAME = {
    CHAT_TEMPLATE: "<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\n",
    "{% for m in messages %}{{ loop.index }}{{ loop.last }}{{ m.role|upper }}{% endfor %}": "1TrueUSER",
    "{{ 3 * 'ab' ~ 1 ~ none }} {{ '%5.2f|%s' % (1.5, 'x') }} {{ '{:>4}'.format('x') }}": "ababab1None  1.50|x    x",
    "{{ messages|tojson }}": '[{"role": "user", "content": "Hello?"}]',
    "{{ messages[0].content.replace('l', 'LL').split('L')|join(',') }}": "He,,,,o?",
    "{% set n = namespace(s='') %}{% for i in range(3) %}{% set n.s = n.s ~ i %}{% endfor %}{{ n.s|indent(2) }}": "012",
    "{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(1) ~ f('a') }}{% generation %}y{% endgeneration %}": "[1][a]y",
    "{% for m in messages|selectattr('role', 'equalto', 'user') %}{{ loop.length }}{% endfor %}": "1",
    "{{ 'Tool: {}'.format('a') }} {{ '{n}: {d:>3}'.format(n='b', d='c') }} {{ '### {0}:\n{1}'.format(1, 2) }}": (
        "Tool: a b:   c ### 1:\n2"
    ),
    "{{ 'Answer: **%s**' % 'a' }} {{ 'tool_%d: {%s}'|format(1, 'x') }} {{ '%(k)5s: {' % {'k': 'v'} }}": (
        "Answer: **a** tool_1: {x}     v: {"
    ),
    "{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }}{% endfor %}{{ messages[::-1]|length }}": "a=11",
}


@pytest.mark.parametrize("template", SAME)
def test_a_template_within_the_budget_renders_as_in_transformers(template):
    assert rendered(template) == SAME[template]


def test_transformers_renders_with_the_budget_wherever_it_is_asked(monkeypatch):
    monkeypatch.setattr(template_budget, "SECONDS", 0.03)
    bounded_environment()
    assert isinstance(chat_template_utils._compile_jinja_template("{{ 1 }}").environment, BoundedEnvironment)
    with pytest.raises(template_budget.TemplateBudgetError):
        tokenizer = tiny_tokenizer()
        tokenizer.apply_chat_template(CHAT, chat_template=TEMPLATES["nested loops"], tokenize=False)


@pytest.mark.parametrize("name", ["powers", "deep brackets", "repeated text"])
def test_a_template_is_not_computed_to_see_what_it_reads(name):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATES[name]
    assert unread(tokenizer, {"x": 1}) in ([], ["x"])


def test_cpu_time_is_bounded_too(monkeypatch):
    """Whatever a step costs: here the first look finds that the time is over."""
    monkeypatch.setattr(template_budget, "SECONDS", -1.0)
    with pytest.raises(UserError, match="it takes more than -1 s of CPU time"):
        rendered("{% for i in range(1000) %}{{ i }}{% endfor %}")


@pytest.mark.parametrize("text", ["{:{}}", "{0:{1}}", "%*d", "%.*f", "{:999999999}", "%999999999d"])
def test_widths_are_charged(text):
    made = "% (9, 9)" if "%" in text else ".format(9, 9)"
    with pytest.raises(UserError, match="it makes texts of more than"):
        rendered(f"{{{{ '{text}' {made} }}}}" if "%" in text else f"{{{{ '{text}'{made} }}}}")


@pytest.mark.parametrize("body", ["{% set y = x[::-1] %}", "{% if 'b' in x %}{% endif %}"])
def test_cpu_time_is_bounded_in_loops_without_a_step(monkeypatch, body):
    monkeypatch.setattr(template_budget, "SECONDS", -1.0)
    with pytest.raises(UserError, match="it takes more than -1 s of CPU time"):
        rendered(f"{{% set x = 'a' * 9 %}}{{% for i in range(99) %}}{body}{{% endfor %}}")
