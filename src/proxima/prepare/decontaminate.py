"""Decontamination: finds training questions that equal an evaluation question or share a long n-gram with it."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from proxima.prepare.normalize import comparison_text, text_hash, words

COVERAGE = 0.5  # share of an evaluation question's n-grams that can't be explained by common phrases


@dataclass(frozen=True)
class EvalSet:
    """Questions that must not be trained on.

    Args:
        name: of the set.
        questions: their texts.
        sha256: of their file; None if they are a side of the data being prepared.
    """

    name: str
    questions: Sequence[str]
    sha256: str | None = None


@dataclass(frozen=True)
class OverlapMatch:
    """A training question that overlaps with an evaluation question.

    Args:
        where: name of the set and number of the question in it.
        grams: shared n-grams; empty if the questions are the same.
        covers: the training question has half of the evaluation question's n-grams and all of its numbers.
    """

    where: tuple[str, int]
    grams: tuple[str, ...]
    covers: bool = field(default=False, compare=False)


class OverlapIndex:
    """Finds evaluation questions with the same text (`comparison_text`) as a training question, or a shared n-gram.

    N-grams are of lower-case words without punctuation. One that occurs in more than `common` training questions is a
    phrase ("find the remainder when m + n is divided by") and not evidence, unless the training question has half of
    the evaluation question's n-grams and all its numbers: then it is that question with additions, however many
    variants exist; with other numbers it is a different question of the same template. Call `contaminated` after `find`
    has seen all questions. A question shorter than `n` words is only found if the texts are the same.

    Args:
        n: words of an n-gram; 0: compare whole texts only.
        common: number of training questions above which an n-gram is a phrase; 0: no n-gram is.
    Source: Brown et al., arXiv 2005.14165, appendix C: 13 words, lower case, no punctuation; n-grams in more than ten
        documents ignored.
    Differs: they remove 200 characters around a match from a document and drop documents with too many matches; here
        the whole question is dropped.
    """

    def __init__(self, n: int = 13, common: int = 10) -> None:
        self.n = n
        self.common = common
        self.sets: list[EvalSet] = []
        self._exact: dict[bytes, list[tuple[str, int]]] = {}
        self._grams: dict[str, list[tuple[str, int]]] = {}
        self._facts: dict[tuple[str, int], tuple[int, Counter[str]]] = {}  # n-grams and numbers of each question
        self._seen: Counter[str] = Counter()

    def add(self, eval_set: EvalSet) -> None:
        """Add the questions of an evaluation set."""
        self.sets.append(eval_set)
        for number, question in enumerate(eval_set.questions):
            where = (eval_set.name, number)
            text = text_hash(comparison_text(question))
            self._exact.setdefault(text, []).append(where)
            grams = self._grams_of(question)
            self._facts[where] = (len(grams), _numbers(question))
            for gram in grams:
                self._grams.setdefault(gram, []).append(where)

    def find(self, question: str, *, count: bool = True) -> list[OverlapMatch]:
        """Return the evaluation questions that a question overlaps with, those with the same text first. With `count`,
        its n-grams count towards `common`, as for a training question."""
        if not self._exact:
            return []
        text = text_hash(comparison_text(question))
        same = self._exact.get(text, [])
        shared = [gram for gram in self._grams_of(question) if gram in self._grams]
        if count:
            self._seen.update(shared)
        shared_with: dict[tuple[str, int], list[str]] = {}
        for gram in shared:
            for where in self._grams[gram]:
                shared_with.setdefault(where, []).append(gram)
        matches = [OverlapMatch(where, ()) for where in same]
        numbers = _numbers(question) if shared_with else Counter()
        for where, grams in shared_with.items():
            if where not in same:
                grams_in_all, needed = self._facts[where]
                covers = len(grams) >= COVERAGE * grams_in_all and needed <= numbers
                matches.append(OverlapMatch(where, tuple(grams), covers))
        return matches

    def contaminated(self, matches: Iterable[OverlapMatch], except_set: str | None = None) -> list[OverlapMatch]:
        """Return the matches of `find` that are evidence, except those with `except_set`. Evidence is the same text, an
        n-gram that is not a phrase, or coverage of the question."""
        kept = []
        for match in matches:
            rare = tuple(gram for gram in match.grams if not self.common or self._seen[gram] <= self.common)
            if not rare and match.covers:
                rare = match.grams
            if match.where[0] != except_set and (rare or not match.grams):
                kept.append(OverlapMatch(match.where, rare, match.covers))
        return kept

    @property
    def phrases(self) -> list[tuple[str, int]]:
        """Common n-grams, with the number of training questions that contain each; the most frequent first."""
        phrases = [(gram, count) for gram, count in self._seen.items() if self.common and count > self.common]
        return sorted(phrases, key=lambda pair: (-pair[1], pair[0]))

    def _grams_of(self, question: str) -> list[str]:
        """The distinct n-grams of a question, in order."""
        if self.n == 0:
            return []
        sequence = words(question)
        return list(dict.fromkeys(" ".join(sequence[i : i + self.n]) for i in range(len(sequence) - self.n + 1)))


def _numbers(question: str) -> Counter[str]:
    return Counter(word for word in words(question) if word.isdecimal())
