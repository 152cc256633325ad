"""Contamination: is a training question one of the evaluation's, or does it share a long run of words with one?"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from proxima.prepare.normalize import comparison_text, words

COVERED = 0.5  # share of an evaluation question's runs in one training question that no phrase of the trade explains


@dataclass(frozen=True)
class EvalSet:
    """Questions that must not be trained on.

    Args:
        name: of the set.
        questions: their texts.
        sha256: of the file they come from; None: they are a side of what is being prepared.
    """

    name: str
    questions: Sequence[str]
    sha256: str | None = None


@dataclass(frozen=True)
class OverlapMatch:
    """A training question that meets an evaluation question.

    Args:
        where: name of the set and number of the question in it.
        grams: shared runs of words; empty where the questions are the same.
        covers: it holds half of the evaluation question's runs and all of its numbers.
    """

    where: tuple[str, int]
    grams: tuple[str, ...]
    covers: bool = field(default=False, compare=False)


class OverlapIndex:
    """Compares questions with evaluation sets: the same text (`telling`: case and punctuation apart), or a common run
    of `n` words.

    Words are compared in small letters without punctuation. A run that stands in more than `common` training questions
    is a phrase of the trade ("find the remainder when m + n is divided by") and says nothing, unless the training
    question holds half of the evaluation question's runs and all its numbers: then it is that question with something
    added, however many variants of it there are; with other numbers it is another one of the same template. Ask
    `contaminated` after all questions were shown to `look`. A question shorter than `n` words can be found as the same
    text only.

    Args:
        n: words of a run; 0: compare whole texts only.
        common: training questions above which a run is a phrase; 0: none is.
    Source: Brown et al., arXiv 2005.14165, appendix C: 13 words, small letters, no punctuation; runs in more than ten
        documents ignored.
    Differs: they cut 200 characters around a hit out of a document and drop one that is cut too often; a question is
        dropped whole.
    """

    def __init__(self, n: int = 13, common: int = 10) -> None:
        self.n, self.common = n, common
        self._exact: dict[bytes, list[tuple[str, int]]] = {}
        self._grams: dict[str, list[tuple[str, int]]] = {}
        self._asked: dict[tuple[str, int], tuple[int, Counter[str]]] = {}  # runs and numbers of each question
        self._seen: Counter[str] = Counter()

    def learn(self, known: EvalSet) -> None:
        """Add the questions of an evaluation set."""
        for number, question in enumerate(known.questions):
            self._exact.setdefault(_key(question), []).append((known.name, number))
            grams = self._grams_of(question)
            self._asked[known.name, number] = len(grams), _numbers(question)
            for gram in grams:
                self._grams.setdefault(gram, []).append((known.name, number))

    def look(self, question: str, *, count: bool = True) -> list[OverlapMatch]:
        """Where a question meets an evaluation question, the same text first.

        Args:
            question: its text.
            count: it is a training question: its runs count towards `common`.
        """
        if not self._exact:
            return []
        same = self._exact.get(_key(question), [])
        shared = [gram for gram in self._grams_of(question) if gram in self._grams]
        if count:
            self._seen.update(shared)
        found: dict[tuple[str, int], list[str]] = {}
        for gram in shared:
            for where in self._grams[gram]:
                found.setdefault(where, []).append(gram)
        hits = [OverlapMatch(where, ()) for where in same]
        numbers = _numbers(question) if found else Counter()
        for where, grams in found.items():
            if where not in same:
                runs, needed = self._asked[where]
                hits.append(OverlapMatch(where, tuple(grams), len(grams) >= COVERED * runs and needed <= numbers))
        return hits

    def contaminated(self, hits: Iterable[OverlapMatch], apart_from: str | None = None) -> list[OverlapMatch]:
        """The hits that count: the same text, a run that is no common phrase, or the evaluation question with something
        added.

        Args:
            hits: of `look`.
            apart_from: name of a set that is not compared with.
        """
        kept = []
        for hit in hits:
            rare = tuple(gram for gram in hit.grams if not self.common or self._seen[gram] <= self.common)
            if not rare and hit.covers:
                rare = hit.grams
            if hit.where[0] != apart_from and (rare or not hit.grams):
                kept.append(OverlapMatch(hit.where, rare, hit.covers))
        return kept

    @property
    def phrases(self) -> list[tuple[str, int]]:
        """Runs that say nothing by themselves, with the training questions that hold each; the most frequent first."""
        found = [(gram, count) for gram, count in self._seen.items() if self.common and count > self.common]
        return sorted(found, key=lambda pair: (-pair[1], pair[0]))

    def _grams_of(self, question: str) -> list[str]:
        """The runs of a question, each once, in order."""
        if self.n == 0:
            return []
        found = words(question)
        return list(dict.fromkeys(" ".join(found[i : i + self.n]) for i in range(len(found) - self.n + 1)))


def _key(question: str) -> bytes:
    return blake2b(comparison_text(question).encode("utf-8", "replace"), digest_size=16).digest()


def _numbers(question: str) -> Counter[str]:
    return Counter(word for word in words(question) if word.isdecimal())
