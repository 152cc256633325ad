"""The table of what can be prepared: where each set is published, what its answers are, how it is asked."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Hub:
    """A data set on the hub.

    Args:
        name: owner/name.
        subsets: configurations that are read, in this order; empty: all files.
        license: as its page says; None: it does not say, or we don't know.
    """

    name: str
    subsets: tuple[str, ...] = ()
    license: str | None = None


@dataclass(frozen=True)
class Part:
    """One folder that a source makes.

    Args:
        name: of the folder; evaluation looks for `data/<name>/test.parquet`.
        title: a line for people.
        hubs: where it is published; the first that can be had is taken.
        side: `train`: questions to train on, a test side is split off where there is none; `test`: every row is an
            evaluation question.
        answer: key in `ANSWERS`.
        template: key in `TEMPLATES`: how it is asked unless `--template` says otherwise.
        reward: a reward of ours that scores it, for the example in the card.
        license: of the questions as first published; None: unknown.
        hints: words in a file's or folder's name that mean this part, where a source has several.
        published: questions that each side has as published; a prepared side of another size is worth a line.
        optional: the source is whole without it.
    """

    name: str
    title: str
    hubs: tuple[Hub, ...]
    side: Literal["train", "test"]
    answer: str
    template: str
    reward: str
    license: str | None = None
    hints: tuple[str, ...] = ()
    published: dict[str, int] = field(default_factory=dict)
    optional: bool = False


_MATH_SUBSETS = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)

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
            reward="math",
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
        Part(
            "aime24",
            "AIME 2024, I and II",
            (
                Hub("HuggingFaceH4/aime_2024"),
                Hub("Maxwell-Jia/AIME_2024", license="MIT"),
                Hub("math-ai/aime24"),
                Hub("BytedTsinghua-SIA/AIME-2024"),
            ),
            side="test",
            answer="aime",
            template="dapo",
            reward="math",
            hints=("24",),
            published={"test": 30},
            optional=True,
        ),
        Part(
            "aime25",
            "AIME 2025, I and II",
            (
                Hub("math-ai/aime25"),
                Hub("yentinglin/aime_2025"),
                Hub("MathArena/aime_2025"),
                Hub("opencompass/AIME2025", ("AIME2025-I", "AIME2025-II")),
            ),
            side="test",
            answer="aime",
            template="dapo",
            reward="math",
            hints=("25",),
            published={"test": 30},
            optional=True,
        ),
    ),
    "amc23": (
        Part(
            "amc23",
            "AMC 12, 2023",
            (Hub("math-ai/amc23"), Hub("zwhe99/amc23")),
            side="test",
            answer="integer",
            template="boxed",
            reward="math",
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
            template="boxed",
            reward="math",
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
            template="boxed",
            reward="math",
            license="MIT",
            published={"train": 7500, "test": 5000},
        ),
    ),
}
