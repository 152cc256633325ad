"""Every convention in the tables against its rewriting, and dumps that the rewriting made: each is explained by its own
convention, and by those that are equal on its batch."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from proxima_peers.shadow.advantage_choices import advantage_candidates
from proxima_peers.shadow.aggregate_choices import count_masks, factor_tables
from proxima_peers.shadow.dump import Dump, read_dump
from proxima_peers.shadow.loss_choices import loss_tables, search_tables
from proxima_peers.shadow.stages import stages
from proxima_peers.shadow.token_advantage_choices import shaped_rewards, token_advantage_candidates
from proxima_peers.shadow.weight_choices import weight_candidates

from . import rewriting

pytestmark = pytest.mark.slow  # whole tables

SEEDS = range(2)
SURROGATE = {"kind": "ppo_clip", "epsilon_low": 0.7, "epsilon_high": 1.2, "dual_clip": 1.6}
PENALTY = {"kind": "k3", "coefficient": 0.05}
CORRECTION = {"kind": "importance", "bound": "clip", "upper": 1.3}
COUNTS = {"max_length": 7, "tokens": 31, "sequences": 9, "ranks": 3}


def arrays(seed: int, rows: int = 7, width: int = 5) -> dict[str, Any]:
    """A batch in which nearly every convention matters: clipped tokens on both sides, answers of different lengths and
    one without a token, rejected tokens, a group of one, ranks with different numbers of micro-batches."""
    draw = np.random.default_rng(seed)
    old = -0.4 - 2 * draw.random((rows, width))
    length = draw.integers(2, width + 1, rows)
    length[:2] = width, 2
    mask = np.arange(width) < length[:, None]
    loss_mask = mask & (draw.random((rows, width)) > 0.2)
    loss_mask[0] = mask[0]
    loss_mask[3] = False

    def moved(scale: float) -> np.ndarray:
        return np.minimum(old + scale * draw.standard_normal((rows, width)), -0.01)

    return {
        "mask": mask,
        "loss_mask": loss_mask,
        "every": np.ones_like(mask),
        "log_prob": moved(0.6),
        "old_log_prob": old,
        "rollout_log_prob": moved(0.3),
        "reference_log_prob": moved(0.4),
        "entropy": draw.random((rows, width)),
        "value": draw.standard_normal((rows, width)),
        "reward": draw.integers(0, 5, rows) / 3.0,
        "group": np.array([4, 4, 4, 9, 9, 9, 2])[:rows],
        "rank": np.array([0, 0, 0, 0, 1, 1, 1])[:rows],
        "micro_batch": np.array([0, 0, 1, 2, 0, 1, 1])[:rows],
        "advantage": np.repeat(draw.standard_normal((rows, 1)), width, 1),
        "weight": np.where(loss_mask, draw.random((rows, width)) + 0.4, 0.0),
    }


def dumped(folder: Any, values: dict[str, Any], without: tuple[str, ...] = (), **settings: Any) -> Dump:
    """The dump that is read from a file with these arrays."""
    file = folder / "step.npz"
    kept = {name: value for name, value in values.items() if name not in ("every", *without)}
    np.savez(file, **kept, settings=json.dumps(settings))
    return read_dump(str(file))


@pytest.mark.parametrize("seed", SEEDS)
def test_advantages(tmp_path, seed):
    values = arrays(seed)
    made = list(advantage_candidates(dumped(tmp_path, values).outcomes(), read_spec(tmp_path, values)))
    assert len(made) == 5 * 2 * (1 + 4 * 2 * (1 + 4 * 2))
    for candidate in made:
        ours = candidate.value.numpy()
        theirs = rewriting.advantages(values, dict(candidate.convention))
        off = abs(ours - theirs) / (1 + candidate.scale.numpy())
        assert off.max() <= 1e-10, candidate.convention


@pytest.mark.parametrize("seed", SEEDS)
def test_advantages_of_tokens_and_the_kl_in_the_reward(tmp_path, seed):
    values = arrays(seed)
    settings = {"advantage": {"kind": "gae", "gamma": 0.9, "lam": 0.7}, "reward_kl": {"coefficient": 0.3}}
    dump = dumped(tmp_path, values, **settings)
    made = list(token_advantage_candidates(dump, dump.settings.advantage))
    # rewards: 2 masks, no KL or 5 of 2 policies; estimates: GAE of 3 discounts, and the reward to go of 2
    assert len(made) == 2 * (1 + 5 * 2) * (3 + 2) * (1 + 2 * (2 * 2 + 1))
    for candidate in made:
        theirs = rewriting.token_advantages(values, candidate.convention, 0.3)[values["loss_mask"]]
        off = abs(candidate.value.numpy() - theirs) / (1 + abs(theirs))
        assert off.max() <= 1e-10, candidate.convention
    at = int(np.random.default_rng(seed).integers(len(made)))
    truth = rewriting.token_advantages(values, made[at].convention, 0.3)
    stage = next(stages(dumped(tmp_path, values | {"advantage": truth}, **settings)))
    named = [dict(match.convention) for match in stage.found.matches]
    assert made[at].convention in named
    for convention in named:
        number = rewriting.token_advantages(values, convention, 0.3)
        np.testing.assert_allclose(number, truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_kl_in_the_reward_of_answers(tmp_path, seed):
    values = arrays(seed)
    settings = {"reward_kl": {"coefficient": 0.3, "estimator": "k2"}}
    for shaped in list(shaped_rewards(dumped(tmp_path, values, **settings)))[:: 10 + seed]:
        total = values["reward"] - rewriting.kl_reward(values, shaped.convention, 0.3).sum(1)
        assert abs(shaped.total.numpy() - total).max() <= 1e-10
        told = dumped(tmp_path, values | {"advantage": total - total.mean()}, **settings)
        stage = next(stages(told))
        assert stage.verdict == "explained"
        wanted = {**shaped.convention, "subtracted": "the mean of the batch", "divided by": "nothing"}
        named = [match.convention for match in stage.found.matches]
        # without a KL the tokens with a reward are not named
        assert any(all(wanted.get(axis, choice) == choice for axis, choice in each.items()) for each in named)


def read_spec(folder: Any, values: dict[str, Any]) -> Any:
    return dumped(folder, values).settings.advantage


@pytest.mark.parametrize("seed", SEEDS)
def test_weights(tmp_path, seed):
    values = arrays(seed)
    made = list(weight_candidates(dumped(tmp_path, values, correction=CORRECTION)))
    assert len(made) == 3 * 2 * 2 * (1 + 1 + 2 * 2)
    for candidate in made:
        theirs = rewriting.weights(values, dict(candidate.convention), 1.3)[values["loss_mask"]]
        np.testing.assert_allclose(candidate.value.numpy(), theirs, rtol=1e-10, err_msg=str(candidate.convention))


@pytest.mark.parametrize("seed", SEEDS)
def test_means(tmp_path, seed):
    values = arrays(seed)
    dump = dumped(tmp_path, values, **COUNTS)
    made = [each for name, mask in count_masks(dump).items() for each in factor_tables(dump, name, mask)]
    assert len({each.convention["over"] for each in made}) == 10
    assert len({each.convention["mean"] for each in made}) == 7
    for each in made:
        theirs = rewriting.factors(values, dict(each.convention), COUNTS)
        np.testing.assert_allclose(each.factor.numpy(), theirs, rtol=1e-10, err_msg=str(each.convention))


@pytest.mark.parametrize("kind", ["ppo_clip", "gspo"])
def test_terms_of_the_loss(tmp_path, kind):
    values = arrays(2)
    values["log_prob"][0, 0], values["old_log_prob"][0, 0] = -0.1, -30.0  # beyond the clamp
    spec = SURROGATE | {"kind": kind}
    dump = dumped(tmp_path, values, surrogate=spec, penalty=PENALTY, **COUNTS)
    choices: dict[str, set[str]] = {}
    for family in loss_tables(dump, dump["advantage"]):
        for term in family.policy:
            said = dict(term.convention)
            if kind == "gspo":  # what the surrogate says
                said["ratio of"] = said["ratio of"].replace(
                    "what the surrogate says", "the answer, gradient of the token's own"
                )
            theirs = rewriting.policy(values, said, 0.7, 1.2, 1.6)
            ours, _ = term.make()
            np.testing.assert_allclose(ours.numpy(), theirs, rtol=1e-10, atol=1e-10, err_msg=str(said))
            for axis, choice in said.items():
                choices.setdefault(axis, set()).add(choice)
        for term in family.kl:
            first = family.policy[0].convention
            theirs = rewriting.penalty(
                values, {"KL is weighted": "no"} | term.convention, 0.05, first["summed"], first["ratio to"]
            )
            np.testing.assert_allclose(
                term.make()[0].numpy(), theirs, rtol=1e-10, atol=1e-10, err_msg=str(term.convention)
            )
            choices.setdefault("KL", set()).add(term.convention["KL"])
    assert {axis: len(known) for axis, known in choices.items()} == {
        "summed": 3,
        "ratio to": 3,
        "ratio of": 3,
        "clip range": 4,
        "bound where A < 0": 4,
        "log-ratios": 2,
        "weights": 3,
        "KL": 21,
    }


def test_the_derivative_of_a_term_is_that_of_the_rewriting(tmp_path):
    """By central differences; but for forms that keep the value and change the derivative on purpose."""
    values = arrays(1, rows=4, width=3)
    dump = dumped(tmp_path, values, surrogate=SURROGATE, penalty=PENALTY)
    step = 1e-6
    frozen = {"its own log-probs, so that it is 1, with their gradient": "fixed"}
    values["fixed"] = values["log_prob"].copy()
    rewriting_before = rewriting.BEFORE | frozen

    def difference(function: Any) -> np.ndarray:
        out = np.zeros(values["log_prob"].shape)
        plain = values["log_prob"]
        for at in np.ndindex(out.shape):
            for sign in (1, -1):
                changed = plain.copy()
                changed[at] += sign * step
                out[at] += sign * function({**values, "log_prob": changed}).sum() / (2 * step)
        return out

    compared = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rewriting, "BEFORE", rewriting_before)
        for family in loss_tables(dump, dump["advantage"]):
            for term in family.policy[::5]:
                if term.convention["ratio of"] == "the answer, gradient of the token's own":
                    continue
                theirs = difference(lambda a, said=dict(term.convention): rewriting.policy(a, said, 0.7, 1.2, 1.6))
                np.testing.assert_allclose(
                    term.make()[1].numpy(), theirs, rtol=1e-5, atol=1e-7, err_msg=str(term.convention)
                )
                compared += 1
    assert compared > 100


AXES = ("mean", "over", "counted", "summed", "ratio to", "ratio of", "clip range", "bound where A < 0", "weights", "KL")


@pytest.mark.parametrize("single", [False, True], ids=["float64", "float32"])
def test_a_loss_of_the_rewriting_is_explained_by_its_own_convention(tmp_path, single):
    """And every other one that is named gives the same number in the rewriting, too."""
    values = arrays(2)
    settings = {"surrogate": SURROGATE, "penalty": PENALTY, **COUNTS}
    dump = dumped(tmp_path, values, **settings)
    table = list(loss_tables(dump, dump["advantage"]))
    draw = np.random.default_rng(5)
    seen: dict[str, set[str]] = {}

    def number(convention: dict[str, str]) -> float:
        said = {"KL is weighted": "no"} | convention
        terms = rewriting.policy(values, said, 0.7, 1.2, 1.6)
        terms = terms + rewriting.penalty(values, said, 0.05, said["summed"], said["ratio to"])
        return float((terms.sum(1) * rewriting.factors(values, said, COUNTS)).sum())

    for _ in range(3):
        family = table[draw.integers(len(table))]
        sizes = (len(family.policy), len(family.kl), len(family.entropy), len(family.factors))
        truth = dict(family.convention(tuple(int(draw.integers(size)) for size in sizes)))
        loss = number(truth)
        told = dumped(tmp_path, values | {"loss": np.float32(loss) if single else loss}, **settings)
        found = search_tables(told, table)
        names = [dict(match.convention) for match in found.loss.matches]
        assert truth in names
        for name in names:
            assert number(name) == pytest.approx(loss, rel=1e-4 if single else 1e-5, abs=1e-5 if single else 1e-6)
        for axis in AXES:
            seen.setdefault(axis, set()).add(truth.get(axis, ""))
    assert all(len(choices) > 1 for choices in seen.values())


@pytest.mark.parametrize("seed", SEEDS)
def test_advantages_of_the_rewriting_are_explained_by_exactly_the_conventions_that_are_equal_on_them(tmp_path, seed):
    values = arrays(seed)
    table = [dict(each.convention) for each in advantage_candidates(dumped(tmp_path, values).outcomes(), None)]
    numbers = [rewriting.advantages(values, convention) for convention in table]
    some = values["loss_mask"].any(1)
    for at in np.random.default_rng(seed).integers(len(table), size=12):
        made = dumped(tmp_path, values | {"advantage": numbers[at]})
        stage = next(
            stage
            for stage in stages(dumped(tmp_path, values | {"advantage": numbers[at]}, ("log",)))
            if stage.name == "advantages"
        )
        assert made.rtol == 1e-7
        named = {json.dumps(dict(match.convention)) for match in stage.found.matches}
        equal = {
            json.dumps(convention)
            for convention, number in zip(table, numbers, strict=True)
            if np.allclose(number[some], numbers[at][some], rtol=1e-9, atol=1e-9)
        }
        assert json.dumps(table[at]) in named
        assert equal <= named
        for match in stage.found.matches:  # what is named beside them differs by less than rounding could
            number = rewriting.advantages(values, dict(match.convention))
            np.testing.assert_allclose(number[some], numbers[at][some], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("seed", SEEDS)
def test_weights_of_the_rewriting_are_explained_by_exactly_the_conventions_that_are_equal_on_them(tmp_path, seed):
    values = arrays(seed)
    table = list(weight_candidates(dumped(tmp_path, values, correction=CORRECTION)))
    numbers = [rewriting.weights(values, dict(each.convention), 1.3) for each in table]
    mask = values["loss_mask"]
    for at in np.random.default_rng(seed).integers(len(table), size=3):
        dump = dumped(tmp_path, values | {"weight": numbers[at]}, ("advantage",), correction=CORRECTION)
        stage = next(stage for stage in stages(dump) if stage.name == "weights")
        named = [dict(match.convention) for match in stage.found.matches]
        equal = [
            dict(each.convention)
            for each, number in zip(table, numbers, strict=True)
            if np.allclose(number[mask], numbers[at][mask], rtol=1e-9, atol=1e-9)
        ]
        assert sorted(map(str, named)) == sorted(map(str, equal))


def test_a_number_between_the_conventions_is_given_by_none(tmp_path):
    values = arrays(0)
    settings = {"surrogate": SURROGATE, "penalty": PENALTY}
    dump = dumped(tmp_path, values, **settings)
    table = list(loss_tables(dump, dump["advantage"]))
    known = torch.cat([family.sums()[0].flatten() for family in table]).unique()
    gaps = known.diff()
    at = int(gaps.argmax())
    between = float(known[at] + gaps[at] / 2)
    found = search_tables(dumped(tmp_path, values | {"loss": between}, **settings), table)
    assert not found.loss.matches
    assert found.loss.tried > 100_000
