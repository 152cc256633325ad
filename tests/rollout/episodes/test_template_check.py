import pytest

from proxima.rollout.episodes.conversation import ForkRefused, TurnTemplate
from proxima.rollout.episodes.template_check import check_template
from tests.rollout.episodes.chat_families import FAMILIES, MISTRAL, family_tokenizer
from tests.rollout.episodes.episode_proof import TOOLS

FAMILY = {family.name: family for family in FAMILIES}
OPENINGS = [[{"role": "user", "content": f"What is {n} + 5?"}] for n in range(2)]


def found(name, template=None, tools=TOOLS, **options):
    tokenizer = family_tokenizer(FAMILY[name])
    tokenizer.chat_template = template or tokenizer.chat_template
    return check_template(TurnTemplate(tokenizer, {}, tools), OPENINGS, **options)


@pytest.mark.parametrize("name", ["chatml", "qwen2.5", "xml"])
def test_templates_that_leave_the_past_alone(name):
    assert found(name) == []


def test_forks_are_named_once_with_what_causes_them():
    thought, space = found("qwen3")[0], found("llama3")[0]
    assert isinstance(thought, ForkRefused) and isinstance(space, ForkRefused)
    assert "where a turn thinks and the user answers, the chat template rewrites turn 0: '<think>" in str(thought)
    assert "where a turn ends with a space and the tool answers, the chat template rewrites turn 0: ' <" in str(space)
    assert found("qwen3", roles=["tool"]) == []
    assert len({error.reason for error in found("mistral")}) == len(found("mistral"))


def test_what_makes_a_run_impossible_is_no_fork():
    tools, *_ = found("none")
    assert str(tools).startswith("the model's chat template shows no tools; set episode.tool_format to xml")
    refuses = "{%- for m in messages if m.role == 'tool' %}{{ raise_exception('unknown role') }}{%- endfor %}"
    fails = [error for error in found("mistral", refuses + MISTRAL) if not isinstance(error, ForkRefused)]
    assert ["fails for 'Right.': TemplateError: unknown role" in str(error) for error in fails] == [True]
    latest = MISTRAL.replace("ns.first and tools", "tools and loop.last")  # tools stand before the last question
    moved = [error for error in found("mistral", latest) if "opening" in str(error)]
    assert "rewrites the opening: '<s>[AVAILABLE_TOOLS]" in str(moved[0])
    assert isinstance(moved[0], ForkRefused)


@pytest.mark.parametrize("name", ["qwen3-off", "thinks"])
def test_a_generation_prompt_that_is_rewritten_is_a_fork(name):
    (error,) = found(name)
    assert isinstance(error, ForkRefused)
    assert str(error).startswith("at every turn, the chat template rewrites the opening: '<think>")
