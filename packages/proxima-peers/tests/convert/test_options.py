"""What single options become, where a peer means something else by them; the cases are in options.yaml."""

from pathlib import Path

import pytest
import yaml

from proxima.config import ConfigError, Resolved, resolve
from proxima.config.yaml_dump import nested

from .conftest import why

A, R = "actor_rollout_ref.actor.", "algorithm.rollout_correction."
GRPO = {"algorithm.adv_estimator": "grpo"}
CASES = yaml.load(Path(__file__).with_name("options.yaml").read_text(), yaml.CSafeLoader)
LISTS = ("missing", "unsupported", "unknown", "ignored", "assumed")


def value_at(resolved: Resolved, place: str):
    """The value of a field, or of all those below it with their defaults."""
    entries = [entry for entry in resolved.entries if f"{entry.path}.".startswith(f"{place}.")]
    below = {entry.path.removeprefix(place): entry.value for entry in entries}
    return below[""] if list(below) == [""] else plain(nested((path[1:], value) for path, value in below.items()))


def plain(tree):
    """The tree with lists where its keys are 0, 1, …"""
    if not isinstance(tree, dict):
        return list(tree) if isinstance(tree, tuple) else tree
    values = {key: plain(value) for key, value in tree.items()}
    return list(values.values()) if "0" in values else values


def holds(tree, place):
    for part in place.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return False
        tree = tree[part]
    return True


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['peer']}-{' '.join(map(str, case['options']))[-80:]}")
def test_options_become_fields_or_are_told(converted, case):
    """`becomes`: a place in the resolved recipe and its whole value. `writes`: a section as it is written. `missing`,
    `unsupported`, `unknown`, `ignored`, `assumed`: names in that list, with words of the reason; `only`: all names in
    it. `never`: names that are in none of the first three. `why`: words of some reason. `says`: words of the text.
    `lacks`: places left to our default. `refused`: words of the error. `stops`: what keeps the recipe from running."""
    if "refused" in case:
        with pytest.raises(ConfigError, match=case["refused"]) as caught:
            converted(case["peer"], case["options"])
        assert len(str(caught.value).splitlines()) == 1
        return
    done = converted(case["peer"], case["options"])
    assert {section: done.recipe[section] for section in case.get("writes", ())} == case.get("writes", {})
    if "stops" in case:
        with pytest.raises(ConfigError, match=case["stops"]):
            resolve(done.recipe)
    else:
        check_fields(case, resolve(done.recipe))
    check_report(case, done)


def check_fields(case, resolved):
    assert {place: value_at(resolved, place) for place in case.get("becomes", ())} == case.get("becomes", {})


def check_report(case, done):
    told = {kind: why(getattr(done, kind)) for kind in LISTS}
    for kind in LISTS:
        for name in case.get(kind, ()):
            assert name in told[kind], (kind, name)
            words = case[kind][name] if isinstance(case[kind], dict) else ""
            assert any(entry.name == name and words in entry.why for entry in getattr(done, kind)), (kind, name)
    assert {kind: sorted(told[kind]) for kind in case.get("only", ())} == case.get("only", {})
    assert not set(case.get("never", ())) & {*told["missing"], *told["unsupported"], *told["unknown"]}
    reasons = "\n".join(reason for kind in LISTS for reason in told[kind].values())
    assert all(words in reasons for words in case.get("why", ()))
    unwrapped = " ".join(done.text.replace("#", "").split())
    assert all(words in done.text or words in unwrapped for words in case.get("says", ()))
    assert not any(holds(done.recipe, place) for place in case.get("lacks", ()))


def test_the_defaults_that_stand_for_options_are_listed_with_the_version(converted):
    options = {"valid_dataset.path": "openai/gsm8k", "evaluator.freq_steps": 5, "rollout.max_head_offpolicyness": 2}
    done = converted("areal", options)
    assumed = {entry.name: entry.why for entry in done.assumed}
    assert {"sampling.temperature=1.0 (gconfig.temperature)", "eval.limit=0"} <= set(assumed)
    assert set(assumed.values()) == {"AReaL 4aef98d8"} and resolve(done.recipe).config.eval.limit == 0
    at_their_place = [line for line in done.text.splitlines() if "AReaL's default" in line and line[0] != "#"]
    assert len(at_their_place) == len(assumed) and "over_age: wait  # ours; AReaL trains on such" in done.text
    assert "defaults of the framework, assumed because the file does not set them:" in done.report


def test_an_option_that_is_null_is_named(converted):
    options = GRPO | {"algorithm.rollout_is_threshold": 2.0, "algorithm.rollout_is_threshold_lower": None}
    done = converted("verl", options | {"algorithm.rollout_is": True})
    assert why(done.read)["algorithm.rollout_is_threshold_lower"] == "null"


BYPASSED = [{}, {R + "rollout_is": "sequence"}, {R + "rollout_is": "token", R + "loss_type": "reinforce"}]


@pytest.mark.parametrize("more", BYPASSED)
def test_a_cap_in_verls_bypass_mode_changes_nothing(converted, more):
    """It caps pi_old / pi_rollout, and pi_old is the rollout's own there."""
    options = GRPO | {R + "bypass_mode": True} | more
    done = converted("verl", options | {A + "tis_imp_ratio_cap": 2.0})
    assert done.recipe == converted("verl", options).recipe
    assert "the weights it caps are 1" in next(
        option.why for option in done.ignored if option.name == A + "tis_imp_ratio_cap"
    )
