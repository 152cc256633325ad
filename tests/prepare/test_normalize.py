"""What is the question, when are two the same, what are its words; what is an answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxima.prepare.normalize import ANSWERS, question_key, words
from proxima.prepare.prompt_template import TEMPLATES, resolve_template
from proxima.system.jsonl import utf8
from proxima.task.question_text import normalize, strip_instructions

from .published import AFTER, BEFORE

BOXED_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "\\boxed{$Answer} where "
    "$Answer is the answer to the problem.\n\n"
)


@pytest.mark.parametrize(
    "text",
    [
        BEFORE + "What is $2+2$?" + AFTER,
        BOXED_BEFORE + "What is $2+2$?" + AFTER,
        BEFORE.replace("$Answer", "$ANSWER")
        + "What is $2+2$?"
        + AFTER.removesuffix(".")
        + ", and you do not need to use a \\boxed command.",
        'What is $2+2$? Let\'s think step by step and output the final answer after "####".',
        "What is $2+2$? Let's think step by step and output the final answer within \\boxed{}.",
        "What is $2+2$?\nPlease reason step by step, and put your final answer within \\boxed{}.",
        "  What is $2+2$?\n",
    ],
)
def test_instructions_are_no_part_of_the_question(text):
    assert strip_instructions(text) == "What is $2+2$?"


def test_an_instruction_in_the_middle_stays():
    text = "He says: Please reason step by step, and put your final answer within \\boxed{}. What does he mean?"
    assert strip_instructions(text) == text


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_every_preset_is_stripped_again_or_leaves_the_question(name):
    asked = TEMPLATES[name].messages("What is $\\frac{1}{2}$?")[-1]["content"]
    assert "What is $\\frac{1}{2}$?" in asked
    if name in ("dapo", "boxed", "plain", "think_answer"):
        assert strip_instructions(asked) == "What is $\\frac{1}{2}$?"


def test_same_question():
    assert normalize("a\u00a0 b\n\tc") == "a b c"
    assert question_key("What is  2\n+ 2?") == question_key(BEFORE + "What is 2 + 2?" + AFTER)
    assert question_key("ﬁnd x") == question_key("find x")  # NFKC
    for seen_alike in ("What is\u200b 2+2?", "\ufeffWhat is 2+2?", "What is 2+2 ?", "W\u00adhat is\u00a02+2 \u200b?"):
        assert question_key(seen_alike) == question_key("What is 2+2?")
    assert normalize("Is .5 > 1 : 3 , or 3 .5 ?") == "Is .5 > 1: 3, or 3 .5?"
    assert question_key("half \ud83d") == question_key(utf8("half \ud83d"))
    assert question_key("Is A = 2?") != question_key("Is a = 2?")


@pytest.mark.slow
@given(st.text())
def test_normalising_twice_changes_nothing(text):
    once = normalize(utf8(text))
    assert normalize(once) == once
    assert question_key(once) == question_key(utf8(text))


def test_words():
    assert words("Let $\\frac{1}{2}x_1 = 3.5$, A!") == ["let", "frac", "1", "2", "x", "1", "3", "5", "a"]
    assert words("求x的值: 计算2倍") == ["求", "x", "的", "值", "计", "算", "2", "倍"]


@pytest.mark.parametrize(
    ("kind", "raw", "answer"),
    [
        ("integer", "34", "34"),
        ("integer", "033", "33"),
        ("integer", "-1,000", "-1000"),
        ("integer", 27.0, "27"),
        ("integer", "27.5", None),
        ("integer", "\\frac{1}{2}", None),
        ("integer", "9" * 60, None),
        ("aime", "025", "25"),
        ("aime", 204, "204"),
        ("aime", "1000", None),
        ("aime", "-3", None),
        ("after_hashes", "so\n#### 70,000", "70000"),
        ("after_hashes", "so\n#### -5 ", "-5"),
        ("after_hashes", "#### 0.50", "0.5"),
        ("after_hashes", "72", "72"),
        ("after_hashes", "it is 72", None),
        ("after_hashes", "so ####", None),
        ("expression", "\\frac{3}{4}", "\\frac{3}{4}"),
        ("expression", "thus $\\boxed{\\frac{3}{4}}$.", "\\frac{3}{4}"),
        ("expression", "first \\boxed{1}, then \\fbox{2}", "2"),
        ("expression", "it is $\\boxed 2$.", "2"),
        ("expression", "it is $\\boxed2$.", "2"),
        ("expression", "it is \\boxed{2", None),
        ("expression", "\\boxed{}", None),
        ("expression", "{1", None),
        ("expression", " ", None),
    ],
)
def test_answers(kind, raw, answer):
    result, reason = ANSWERS[kind](raw)
    assert result == answer
    assert bool(reason) == (answer is None)


def test_templates():
    assert resolve_template("Q: {question}\\nA:").messages("1+1?") == [{"role": "user", "content": "Q: 1+1?\nA:"}]
    assert resolve_template("plain", "Be brief.").messages("1+1?")[0] == {"role": "system", "content": "Be brief."}
    assert resolve_template("think_answer").system and resolve_template("think_answer", "").system is None


def test_a_template_from_a_file(tmp_path):
    (tmp_path / "t.txt").write_text("Think \\neq.\n{question}\n")
    assert resolve_template(f"@{tmp_path / 't.txt'}").text == "Think \\neq.\n{question}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{problem}", r"must hold \{question\} and nothing else"),
        ("{question} \\boxed{}", "must name a column in each pair of braces"),
        ("{question", "is not a template"),
        ("@nowhere.txt", "can't be read"),
    ],
)
def test_bad_templates(text, message):
    with pytest.raises(ValueError, match=message):
        resolve_template(text)
