"""The data sets that can be prepared, each with its places of publication, its kind of answers and its prompt."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Hub:
    """A data set on the hub.

    Args:
        name: owner/name.
        subsets: configurations to read, in this order; empty: all files.
        license: as its page states; None: unknown.
    """

    name: str
    subsets: tuple[str, ...] = ()
    license: str | None = None


@dataclass(frozen=True)
class Part:
    """One folder prepared from a source.

    Args:
        name: of the folder; evaluation looks for `data/<name>/test.parquet`.
        title: a one-line description.
        hubs: data sets that publish it; the first available one is used.
        side: `train`: training questions, of which a test split is split off if the source has none; `test`: every row
            is an evaluation question.
        answer: key in `ANSWERS`.
        template: key in `TEMPLATES`: the prompt unless `--template` names another.
        reward: a reward that scores it, for the example in the card.
        license: of the questions as first published; None: unknown.
        hints: words in a file's or folder's name that identify this part, if a source has several.
        published: number of published questions per side; a prepared side of another size is reported.
        optional: the source is complete without it.
    """

    name: str
    title: str
    hubs: tuple[Hub, ...]
    side: Literal["train", "test"]
    answer: str
    template: str = "boxed"
    reward: str = "math"
    license: str | None = None
    hints: tuple[str, ...] = ()
    published: Mapping[str, int] = field(default_factory=dict)
    optional: bool = False


_MATH_SUBSETS = (
    *("algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra"),
    "precalculus",
)


def _aime(year: int, *hubs: Hub) -> Part:
    name, title, hints = f"aime{year % 100}", f"AIME {year}, I and II", (str(year % 100),)
    return Part(name, title, hubs, "test", "aime", "dapo", hints=hints, published={"test": 30}, optional=True)


SOURCES: dict[str, tuple[Part, ...]] = {
    "dapo-math": (
        Part(
            "dapo-math",
            "DAPO-Math-17k: competition problems with integer answers, the training set of DAPO (arXiv 2503.14476)",
            (
                Hub("BytedTsinghua-SIA/DAPO-Math-17k", license="Apache-2.0"),
                Hub("open-r1/DAPO-Math-17k-Processed", ("all",)),
            ),
            side="train",
            answer="integer",
            template="dapo",
            license="Apache-2.0",
        ),
    ),
    "gsm8k": (
        Part(
            "gsm8k",
            "GSM8K: grade-school word problems (arXiv 2110.14168)",
            (Hub("openai/gsm8k", ("main",), "MIT"),),
            side="train",
            answer="after_hashes",
            template="gsm8k",
            reward="gsm8k",
            license="MIT",
            published={"train": 7473, "test": 1319},
        ),
    ),
    "aime": (
        _aime(
            2024,
            Hub("HuggingFaceH4/aime_2024"),
            Hub("Maxwell-Jia/AIME_2024", license="MIT"),
            Hub("math-ai/aime24"),
            Hub("BytedTsinghua-SIA/AIME-2024"),
        ),
        _aime(
            2025,
            Hub("math-ai/aime25"),
            Hub("yentinglin/aime_2025"),
            Hub("MathArena/aime_2025"),
            Hub("opencompass/AIME2025", ("AIME2025-I", "AIME2025-II")),
        ),
        _aime(2026, Hub("math-ai/aime26"), Hub("MathArena/aime_2026")),
    ),
    "amc23": (
        Part(
            "amc23",
            "AMC 12, 2023",
            (Hub("math-ai/amc23"), Hub("zwhe99/amc23")),
            side="test",
            answer="integer",
            published={"test": 40},
        ),
    ),
    "math": (
        Part(
            "math500",
            "MATH-500: the 500 test problems of MATH that arXiv 2305.20050 evaluates on",
            (Hub("HuggingFaceH4/MATH-500"), Hub("math-ai/math500")),
            side="test",
            answer="expression",
            license="MIT",
            hints=("500",),
            published={"test": 500},
            optional=True,
        ),
        Part(
            "math",
            "MATH: competition problems with worked solutions (arXiv 2103.03874)",
            (Hub("EleutherAI/hendrycks_math", _MATH_SUBSETS, "MIT"), Hub("DigitalLearningGmbH/MATH-lighteval")),
            side="train",
            answer="expression",
            license="MIT",
            published={"train": 7500, "test": 5000},
        ),
    ),
}
