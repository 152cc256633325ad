r"""Parses a row's answer into its normal form, and says which answers equal it. All rules of equality are here.

61, 1/2, 5\text{ cm}         a number: the same value, finished, of the same name
B, \textbf{(B)}\ 12          an option: its letter, or what it says
\text{even}, Monday          words: the same, in any case and font
2\sqrt{3}, [0,5], x^2+1      a formula: the same text; else math-verify decides, on both in one notation
"""

import re
from functools import lru_cache

from proxima.reward.math.algebra import Algebra, ask_algebra
from proxima.reward.math.answer_options import chosen_letter, parse_choice
from proxima.reward.math.forms import Choice, WordAnswer, WrittenNumber
from proxima.reward.math.formula import Formula
from proxima.reward.math.found import FinalAnswer
from proxima.reward.math.notation import SETS_IN_WORDS
from proxima.reward.math.numeric_answer import asked_number, is_sum_of_names, parse_number, same_number
from proxima.reward.math.words import is_prose, normalize_words, parse_words

_POINT = re.compile(r"\s*(?:\\left)?\(.*,", re.DOTALL)  # (1,000) is a point, not a thousand


NormalForm = WrittenNumber | Choice | WordAnswer | Formula


@lru_cache(maxsize=4096)
def parse_answer(answer: str) -> NormalForm:
    """The normal form of a row's answer. ValueError if it is prose."""
    number = None if _POINT.match(answer) else parse_number(answer)
    if number is not None and not is_sum_of_names(number.name):
        return number
    choice = parse_choice(answer)
    if choice is not None:
        return choice
    formula = Formula(answer)
    if formula.normal in SETS_IN_WORDS:
        return formula
    words = parse_words(answer)
    if words is not None:
        return WordAnswer(words)
    if is_prose(answer) and not formula.has_dots:
        raise ValueError("is prose, not mathematics; write words as \\text{…}, or use 'exact'")
    return formula


def compare_answers(answer: str, final: FinalAnswer, question: str) -> bool | Algebra:
    """Whether the final answer of a text equals the row's answer, or what to ask math-verify about it.

    ValueError if the row's answer is prose, or if evaluating one of them is unbounded.
    """
    reference = parse_answer(answer)
    if isinstance(reference, Formula) and "=" in answer:
        reference = asked_number(answer, question) or reference
    if isinstance(reference, WrittenNumber):
        return _is_number(reference, answer, final, question)
    if isinstance(reference, Choice):
        return _is_option(reference, answer, final, question)
    if isinstance(reference, WordAnswer):
        return reference.text in map(normalize_words, final.words())
    return _is_formula(reference, final)


def _is_number(reference: WrittenNumber, answer: str, final: FinalAnswer, question: str) -> bool:
    """By its value, of the first candidate that is a number; a text that is the row's answer is right in any case."""
    candidates = final.formulas(number=True)
    if candidates and answer.strip() == without_period(candidates[0]).strip() != "":
        return True
    for candidate in candidates:
        number = parse_number(candidate, question)
        if number is not None:
            return number.finished and same_number(reference, number)
    return False


def _is_option(reference: Choice, answer: str, final: FinalAnswer, question: str) -> bool | Algebra:
    """By the letter; a text that names none, by what the option says, or as a formula: `B` may be a variable."""
    marked = final.words(choice=True)
    letters = [letter for letter in map(chosen_letter, marked) if letter is not None]
    if letters or (reference.value is None and not reference.bare):
        return reference.letter in letters
    if reference.value is None:
        return _is_formula(Formula(answer), final, words=False)
    if is_prose(reference.value):
        return normalize_words(reference.value) in map(normalize_words, marked)
    return compare_answers(reference.value, final, question)


def _is_formula(reference: Formula, final: FinalAnswer, words: bool = True) -> bool | Algebra:
    """By the text; then by algebra, unless dots or words leave open what is meant."""
    found = final.formulas()[:1]
    texts = dict.fromkeys([*found, *final.words()] if words else found)
    if any(Formula(text).compact == reference.compact is not None for text in texts):
        return True
    if reference.has_dots or reference.is_only_text:
        return False
    answer = without_period(found[0]) if found else ""
    if reference.is_equation and "=" not in answer:
        return False
    return ask_algebra(reference, Formula(answer), final.max_chars)


def without_period(formula: str) -> str:
    """The formula without a final period: to math-verify, `42.` is not 42."""
    text = formula.rstrip()
    before = text[:-1]
    if not text.endswith(".") or before.endswith(".") or before != before.rstrip():
        return formula
    return before
