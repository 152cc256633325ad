"""The README.md of an exported model."""

import yaml

from proxima.cli.main import main
from tests.runtime.tiny_run import go, recipe


def test_the_card_has_results_and_recipe_and_no_place_of_this_machine(tiny_model, tmp_path):
    run = tmp_path / "sums"
    go(run, recipe(tiny_model("llama"), train__steps=1))
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    card = (tmp_path / "out" / "README.md").read_text()
    _, facts, text = card.split("---\n", 2)
    assert yaml.safe_load(facts) == {"library_name": "transformers", "tags": ["proxima", "reinforcement-learning"]}
    shown = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    assert shown["train"]["steps"] == 1 and shown["reward"][0]["kind"] == "tests.runtime.tiny_run:Even"
    assert not {"folder", "runtime", "engine"} & shown.keys()
    assert "| 0 | 0." in text and "| 1 | 0." in text and str(run.parent) not in card and "/dev" not in card
