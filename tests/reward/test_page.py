"""What docs/rewards.md shows works as it stands there."""

import asyncio
import json
import re
from dataclasses import replace

import pytest
import yaml

from proxima.data.flow import Group, Score
from proxima.reward import REWARDS
from proxima.reward.function import FunctionBatch
from proxima.reward.http import Http, _score
from proxima.reward.runner import RewardRunner
from tests.docs.printed import ROOT, section
from tests.reward.make import ask, completion, prompt, runner
from tests.reward.server import served

pytestmark = pytest.mark.usefixtures("lent_servers")
PAGE = (
    (ROOT / "docs/rewards.md")
    .read_text(encoding="utf-8")
    .replace(section("docs/rewards.md", "A reward of your own"), "")
)  # tests/examples has that section


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_server_of_the_page_scores():
    (source,) = [block for block in blocks("python") if "BaseHTTPRequestHandler" in block]
    names = {"__name__": "page"}
    exec(source, names)
    names["Scorer"].log_message = lambda *args: None
    with served(names["Scorer"]) as url, runner(Http(url=url)) as made:
        made.check()
        scores = ask(made, None, "short", "long " * 50)
    assert [score.value for score in scores] == [1.0, 0.0]


def test_the_function_of_the_page_ranks(tmp_path):
    (source,) = [block for block in blocks("python") if block.startswith("def rank")]
    (tmp_path / "my_rewards.py").write_text(source)
    groups = []
    for i, counts in enumerate([(3, 5), (9,)]):
        made = tuple(completion("x", tokens=n, sample=j) for j, n in enumerate(counts))
        scores = (Score(value=0.0),) * len(counts)
        groups.append(Group(prompt=replace(prompt(), uid=i), completions=made, scores=scores))
    with runner(FunctionBatch(path=f"{tmp_path}/my_rewards.py:rank")) as made:
        scored = asyncio.run(made.score_batch(groups))
    assert [[score.value for score in group.scores] for group in scored] == [[1.0, 0.5], [0.0]]


def test_the_answer_of_the_page_is_read_and_its_recipes_name_rewards(tmp_path):
    request, answer = map(json.loads, blocks("json"))
    assert request.keys() == {"prompt", "completions"} and len(answer["scores"]) == 3
    first, second, third = map(_score, answer["scores"])
    assert (first.value, second.value, second.correct, second.parts) == (1.0, 0.5, False, {"style": 0.25})
    assert third.error == "the judge refused" and not third.valid
    (tmp_path / "my_rewards.py").write_text("def rank(groups): ...\n")
    for block in blocks("yaml"):
        given = yaml.safe_load(block)["reward"]
        for entry in given if isinstance(given, list) else [given]:
            fields = {"kind": entry} if isinstance(entry, str) else dict(entry)
            if "path" in fields:
                fields["path"] = fields["path"].replace("./", f"{tmp_path}/")
            RewardRunner([REWARDS[fields.pop("kind")](**fields)])
