"""Reward `math`: compares numbers and words in this process, and formulas by math-verify in a worker."""

from dataclasses import dataclass

from proxima.data import require
from proxima.data.flow import Completion, Prompt, Score
from proxima.reward.base import Job, PooledReward, binary_score, missing_answer, required_answer
from proxima.reward.math.algebra import why_not_evaluated
from proxima.reward.math.answer_rules import compare_answers, parse_answer
from proxima.reward.math.formula import Formula
from proxima.reward.math.found import FinalAnswer
from proxima.reward.math.marked import row_answer
from proxima.system.user_modules import require_package


@dataclass(frozen=True, kw_only=True)
class Math(PooledReward):
    r"""1 if the final answer equals the row's answer, else 0; sets `correct`.

    The final answer is the last `\boxed{…}`, else the last `<answer>…</answer>`, else, in the last `max_chars`
    characters, the formula between `$` or the plain number after the last `answer is`, `Answer:` or `####`, else the
    last of either. An unclosed box is wrong, and so are alternatives (`61 or 62`) and an answer that ends in dots. The
    criterion of equality depends on the row's answer:

    - A plain number. The answer must be one in final form: an integer, decimal, fraction, mixed number, percent,
      `3\times 10^5`, with unit, currency, sign, or a name before it (`x = 61`, `m+n = 61`; an expression with
      numbers only if the question asks for it). An unfinished operation (`54+7`, `2^{10}`, `\frac{122}{2}`, an
      integral, a root, a factorial) is wrong, whatever its value, and so are `60=61` and two numbers. A fraction need
      not be in lowest terms. Of `54+7=61` the last side counts, if the sides that plain arithmetic can evaluate agree.
      50 % is 50 and 0.5; decimals of six places or more are compared rounded, to at
      least five significant digits.
    - An option (`B`, `(B)`, `\textbf{(B)}\ 12`): its letter, or what it says. Two letters are wrong.
    - WordAnswer (`\text{even}`, `Monday`): the same words, in any case and font. Several words must be in `\text{…}`.
    - Anything else (`2\sqrt{3}`, `x^2+1`, `[0,5]`): math-verify must accept every side of an equality. An integral, sum
      or product over an index, limit or derivative is wrong unless the row's answer has one; so are words other than
      a unit, and a run of over 400 digits. `0 \le x < 5` is `[0,5)`, `x \le 2 \text{ or } x \ge 3` is
      `(-\infty,2]\cup[3,\infty)`, `\mathrm{e}` is `e`. Of an answer with dots, only the same text is right.

    A final period is ignored. An answer that math-verify can't parse is wrong; one that it can't finish is invalid,
    never 0: the worker is killed and replaced, and no other completion is affected. Brackets nested over 30 deep,
    powers with an exponent over 9,999 and factorials or binomials of such size are not evaluated; they are invalid too.

    Args:
        cpu_seconds: CPU time for one completion, in seconds, > 0; the runner's wall-clock timeout applies as well.
        max_chars: maximum length of a marked answer; of a text without one, the last `max_chars` characters are read;
            >= 16.
        answer_in_box: the row's answer is the text of a whole solution; the contents of its last `\boxed{…}` count.
    Returns: Score of value 0 or 1, `correct` set.
    Raises: ValueError if the row's answer is missing, is prose or a whole solution, or can't be read as mathematics.
    Source: the math-verify package, 0.9.
    Differs: math-verify, and verl and TRL that call it, evaluate whatever they find in a text, so that repeating the
        question (`54+7`) is an answer, and read words as products of letters; numbers that differ by less than 1e-15
        are equal to them, and they drop dots and everything after a word. verl and TRL call it in their own process,
        where its alarm-based timeout raises in threads, and turn a failure into 0.
    """

    cpu_seconds: float = 1.0
    max_chars: int = 2000
    answer_in_box: bool = False

    kind = "math"
    warm_up = "proxima.reward.workers.graders:warm_math"
    needs_answer = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.cpu_seconds > 0, "cpu_seconds", self.cpu_seconds, "must be > 0 seconds")
        require(self.max_chars >= 16, "max_chars", self.max_chars, "must be >= 16")

    def check(self) -> None:
        require_package("math_verify", "it needs", "proxima-rl[math]")

    def job(self, prompt: Prompt, completion: Completion) -> Job | Score:
        answer = row_answer(required_answer(prompt, self.kind), self.answer_in_box)
        verdict = compare_answers(answer, FinalAnswer(completion.text, self.max_chars), _question(prompt))
        if isinstance(verdict, bool):
            return binary_score(verdict)
        arguments = {"answer": verdict.answer, "texts": list(verdict.texts)}
        return Job(grader="math", arguments=arguments, cpu_seconds=self.cpu_seconds)

    def answer_job(self, answer: object) -> Job | str | None:
        missing = missing_answer(answer)
        if missing:
            return missing
        try:
            formula = row_answer(answer, self.answer_in_box)
            parsed = parse_answer(formula)
            if not isinstance(parsed, Formula):  # most rows of most data: no worker needed
                return None
        except ValueError as error:
            return str(error)
        if parsed.has_dots:
            return (
                "has dots for what is not written: only the same text is right; write the answer out, or remove the row"
            )
        problem = why_not_evaluated(formula, self.max_chars)
        if problem:
            return f"not evaluated: {problem}"
        arguments = {"answer": parsed.normal}
        return Job(grader="math_answer", arguments=arguments, cpu_seconds=self.cpu_seconds)


def _question(prompt: Prompt) -> str:
    """The text of the last message, in which a formula may be asked for."""
    content = None
    if prompt.messages:
        content = prompt.messages[-1].get("content")
    return content if isinstance(content, str) else ""
