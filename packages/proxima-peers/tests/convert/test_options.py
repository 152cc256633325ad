"""What options and whole files of the peers become; the cases are in options.yaml."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from proxima.config.families import family_name
from proxima.config.problems import ConfigError
from proxima.config.resolution import resolve
from proxima.config.resolved import Resolved, nested
from proxima.view.trackers import TRACKERS
from proxima.view.trackers.wandb import Wandb
from proxima_peers.convert import trackers
from proxima_peers.convert.conversion import convert, likely_peers
from proxima_peers.convert.read import read
from proxima_peers.verify.record import Tracked
from proxima_peers.verify.trl_preference import dpo_spec

from .conftest import EXAMPLES, options_file, why

A, R = "actor_rollout_ref.actor.", "algorithm.rollout_correction."
GRPO = {"algorithm.adv_estimator": "grpo"}
CASES = yaml.load(Path(__file__).with_name("options.yaml").read_text(), yaml.CSafeLoader)
LISTS = ("missing", "unsupported", "unknown", "ignored", "assumed", "read")


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


NOTHING = object()


def written_at(recipe, place):
    for part in place.split("."):
        entries = recipe if isinstance(recipe, list) else ()
        keys = recipe if isinstance(recipe, dict) else {str(index): entry for index, entry in enumerate(entries)}
        recipe = keys.get(part, NOTHING)
    return recipe


@pytest.fixture
def file_of(tmp_path):
    """The file of a case: one in ../examples, one of the name and text that it gives, or its options."""

    def run(case):
        if "example" in case:
            return EXAMPLES / case["example"]
        if "options" in case:
            return options_file(tmp_path, case["options"])
        file = tmp_path / case["file"]
        file.write_text(case["text"])
        return file

    return run


def case_name(case):
    source = case.get("example") or case.get("file") or " ".join(map(str, case["options"]))
    return f"{case['peer']}-{source[-80:]}"


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_options_become_fields_or_are_told(file_of, case):
    """What the keys of a case say of its conversion.

    Of the recipe: `becomes`, a place in it resolved, and its whole value; `writes`, a place as it is written; `lacks`,
    places left to our default; `family`, the command that trains it; `stops`, what keeps it from running.

    Of the report: `missing`, `unsupported`, `unknown`, `ignored`, `assumed`, `read`, names in that list, with words of
    the reason; `only`, all names in it; `never`, names that are in none of the first three; `why`, words of some
    reason; `says`, words of the text. `refused`: words of the error, if there is one.
    """
    file = file_of(case)
    if "refused" in case:
        with pytest.raises(ConfigError, match=case["refused"]) as caught:
            convert(file, case["peer"])
        assert len(str(caught.value).splitlines()) == 1
        return
    done = convert(file, case["peer"])
    assert {place: written_at(done.filled, place) for place in case.get("writes", ())} == case.get("writes", {})
    if "stops" in case:
        with pytest.raises(ConfigError, match=case["stops"]):
            resolve(done.filled)
    else:
        assert done.problems == ()
        resolved = resolve(done.filled, root=None, import_code=False)
        assert {place: value_at(resolved, place) for place in case.get("becomes", ())} == case.get("becomes", {})
        assert case.get("family") in (None, family_name(resolved.config))
        assert "family" not in case or likely_peers(file) == [case["peer"]]
    check_report(case, done)
    assert swallowed(file, done) == set() and yaml.load(done.text, yaml.CSafeLoader) == done.recipe


def swallowed(file, done):
    """The options of the file that the recipe's text does not name: neither as a value's origin nor in a list."""
    named = {word.strip(".,:;") for word in re.findall(r"[^\s()'=]+", done.text.replace("#", " "))}
    return {option for option, value in read(file).items() if value is not None} - named


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
    assert all(written_at(done.filled, place) is NOTHING for place in case.get("lacks", ()))


def test_every_example_is_a_case():
    assert {case["example"] for case in CASES if "example" in case} == {file.name for file in EXAMPLES.iterdir()}


def test_the_defaults_that_stand_for_options_are_listed_with_the_version(converted):
    options = {"valid_dataset.path": "openai/gsm8k", "evaluator.freq_steps": 5, "rollout.max_head_offpolicyness": 2}
    done = converted("areal", options)
    assumed = {entry.name: entry.why for entry in done.assumed}
    assert {"sampling.temperature=1.0 (gconfig.temperature)", "eval.limit=0"} <= set(assumed)
    assert set(assumed.values()) == {"AReaL 4aef98d8"} and resolve(done.filled).config.eval.limit == 0
    at_their_place = [line for line in done.text.splitlines() if "AReaL's default" in line and line[0] != "#"]
    assert (
        len(at_their_place) + len(done.defaults) == len(assumed)
        and "over_age: wait  # ours; AReaL trains on such" in done.text
    )
    assert "defaults of the framework, assumed because the file does not set them:" in done.report


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


@pytest.mark.parametrize("written", ["sigmoid", "hinge", "ipo", "robust", "nca_pair", "aot", "discopop"])
def test_the_loss_of_a_pair_is_the_one_that_golden_records_prove(converted, written):
    options = {"loss_type": written, "beta": 0.4, "label_smoothing": 0.1, "discopop_tau": 0.3}
    expected = dpo_spec(written, Tracked(options), smoothing=False)  # TRL's sigmoid has none: T12
    done = converted("trl", options | {"model_name_or_path": "m", "dataset_name": "org/rows"})
    assert resolve(done.recipe, root=None).config.preference.loss == (expected,)


def test_fields_that_options_fill_are_fields_of_the_trackers():
    for table in (trackers.TRL, trackers.VERL, {"wandb": trackers.UNIRL}, trackers.AREAL):
        for kind, names in table.items():
            assert set(names) <= {field.name for field in fields(TRACKERS[kind])}


def test_a_tracker_that_this_machine_lacks_is_no_problem_of_the_recipe(converted, monkeypatch):
    monkeypatch.setattr(Wandb, "problem", lambda tracker: "is not installed")
    assert converted("verl", GRPO | {"trainer.logger": ["wandb"]}).problems == ()


BOTH = {"actor.use_decoupled_loss": True, "rollout.max_head_offpolicyness": 2, "train_dataset.batch_size": 8}
OF_AREAL = ("m2_threshold", "importance_sampling_level", "prox_logp_method", "use_sapo_loss", "use_cispo_loss")


@pytest.mark.parametrize(
    ("option", "value"),
    [(f"actor.{name}", {"m2_threshold": 0.04, "prox_logp_method": "recompute"}.get(name, "token")) for name in OF_AREAL]
    + [("actor.behave_imp_weight_cap", 5.0), ("actor.rejection_sampling.upper", 5.0), ("rollout.backend", "sglang:d1")],
)
def test_an_option_that_only_areal_has_leaves_no_doubt_about_segment_wise_ppo(converted, option, value):
    assert any("enable_segment_wise_ppo" in line for line in converted("areal", BOTH).report)
    done = converted("areal", BOTH | {option: value})
    assert not any("enable_segment_wise_ppo" in line for line in done.report)
    assert done.recipe["algorithm"]["proximal"] == "recompute"
