"""What docs/models.md says of rewards and thoughts."""

import re

from proxima.data.flow import Prompt
from proxima.reward import REWARDS
from tests.docs.printed import section
from tests.reward.make import completions


def test_which_answer_is_read():
    answered, cut = "<think>42, or 41?</think>\nIt is 42, not 41... 42.", "<think>6 * 7 = 42"
    unanswered, opened_by_the_prompt = "<think>It is 42.</think>\nI do not know.", "40? 41?</think> 42"
    asked = Prompt(uid=7, messages=(), tokens=(1,), answer="42")
    given = completions(answered, cut, unanswered, opened_by_the_prompt)
    assert [score.value for score in REWARDS["number"]().score(asked, given)] == [1, 1, 1, 1]
    (code,) = re.findall(r"```python\n(.*?)```", section("docs/models.md", "Thinking models"), re.S)
    names: dict = {}
    exec(code, names)
    assert [names["after_thoughts"](asked, entry) for entry in given] == [True, False, False, True]
