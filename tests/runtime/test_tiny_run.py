"""What the helpers of the other tests promise."""

import copy

from tests.runtime.tiny_run import changed, recipe


def test_a_recipe_changes_nothing_that_is_passed_to_it(tmp_path):
    engine = {"kind": "vllm", "serve": {"dtype": "float32"}}
    before = copy.deepcopy(engine)
    tree = recipe(tmp_path, engine=engine, engine__serve__dtype="bfloat16")
    assert tree["engine"]["serve"]["dtype"] == "bfloat16" and engine == before
    base = {"train": {"steps": 3}}
    assert changed(base, {"train__steps": 4}) == {"train": {"steps": 4}} and base == {"train": {"steps": 3}}
