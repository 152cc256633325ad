"""`proxima plot divergence` and `plot threshold` on the rollouts of a tiny run."""

import json
from pathlib import Path

import numpy as np
import pytest

from proxima.cli.plot import with_settings
from proxima.core import Cppo, Dppo
from proxima.experiments.divergences import (
    Calibration,
    TrainedCompletion,
    as_batch,
    masked_share,
    measurable,
    read_trained,
)
from proxima.view.token_plots import EXAMPLE, ThresholdFigure, most_masked, threshold_lines


def completion(behavior, policy, advantage=1.0, sample=0):
    size = len(behavior)
    return TrainedCompletion(
        step=1,
        prompt_uid=0,
        sample=sample,
        behavior_log_prob=np.log(np.asarray(behavior, np.float32)),
        log_prob=np.log(np.asarray(policy, np.float32)),
        advantage=np.full(size, advantage, np.float32),
    )


WORKED = completion([0.70, 0.62, 0.55, 0.60, 0.505], [0.88, 0.80, 0.70, 0.65, 0.50])


def test_thresholds_are_quantiles():
    rng = np.random.default_rng(0)
    behavior = rng.uniform(0.2, 0.8, (50, 40))
    policy = behavior + rng.normal(0, 0.05, behavior.shape).clip(-0.15, 0.15)
    completions = [completion(b, p) for b, p in zip(behavior, policy, strict=True)]
    calibration = Calibration.of(completions, Cppo(), share=0.01)
    far = np.abs(policy - behavior)
    weight = 1 - 0.2 * np.arange(40) / 39
    assert calibration.delta_b == pytest.approx(np.quantile(far, 0.9), rel=0.06)
    assert calibration.delta == pytest.approx(np.quantile(far * weight, 0.99), rel=0.06)
    assert calibration.quantiles[1.0] == pytest.approx(far.max(), rel=1e-5)
    assert (calibration.tokens, calibration.completions) == (2000, 50)
    assert calibration.masked == masked_share(
        as_batch(completions), Cppo(delta=calibration.delta, delta_b=calibration.delta_b)
    )
    assert calibration.masked < calibration.masked_now  # the published budget is a third of what these policies need


def test_a_percentile_of_too_few_tokens_is_said():
    calibration = Calibration.of([WORKED], Cppo(), share=0.001)
    said = (
        "5 tokens are too few for this percentile: it is the largest value; use more steps, with 1,000 tokens or more"
    )
    assert f"WARNING {said}" in threshold_lines(calibration, 0.001, Path("r"))
    assert "WARNING" not in "".join(threshold_lines(calibration, 0.2, Path("r")))


def test_thresholds_of_equal_policies_are_legal():
    same = completion([0.5, 0.5], [0.5, 0.5])
    calibration = Calibration.of([same], Cppo(), share=0.001)
    assert (calibration.delta, calibration.delta_b, calibration.masked) == (1e-6, 0.0, 0.0)


def test_figure_shows_the_worked_example():
    drawing = ThresholdFigure.of(WORKED, Cppo(delta=0.2))
    np.testing.assert_allclose(drawing.weighted, [0.18, 0.171, 0.135, 0.0425, 0.004], atol=1e-6)
    np.testing.assert_allclose(drawing.allowed, [0.2, 0.06, -0.073, -0.172, -0.1805], atol=1e-6)
    assert drawing.masked.tolist() == [False, True, True, True, False]
    np.testing.assert_allclose(drawing.prefix, drawing.allowed, atol=1e-6)
    assert drawing.remark.startswith("3 of 5 tokens masked") and drawing.remark.endswith("at 4")


@pytest.mark.parametrize(
    "spec", [Cppo(), Cppo(delta=0.05, delta_b=0.01), Cppo(budget="static"), Cppo(w_min=1.0)], ids=str
)
def test_the_threshold_is_the_smaller_of_what_is_drawn(spec):
    drawing = ThresholdFigure.of(EXAMPLE, spec)
    np.testing.assert_allclose(np.minimum(spec.delta, drawing.prefix), drawing.allowed, atol=1e-6)


@pytest.mark.slow
def test_the_example_has_both_kinds_of_masked_tokens(proxima, here):
    drawing = ThresholdFigure.of(EXAMPLE, Cppo())
    above = drawing.weighted > drawing.spec.delta
    assert (drawing.masked & above).any() and (drawing.masked & ~above).any()
    assert proxima("plot", "threshold", "--surrogate", "cppo,delta=0.1") == (0, "threshold.svg\n", "")
    text = (here / "threshold.svg").read_text()
    assert "(δ = 0.1, δ_b = 0.02" in text and "by the prefix alone" in text


def test_most_masked():
    calm = completion([0.5] * 9, [0.5] * 9, sample=1)
    assert most_masked([calm, WORKED], Cppo(delta=0.2)) is WORKED


def test_only_a_finite_cppo_of_the_sampled_tokens_is_measurable():
    assert measurable(Cppo()) == Cppo()
    for other in (Dppo(), Cppo(delta=float("inf"), delta_b=float("inf")), Cppo(divergence="binary_kl"), None):
        assert measurable(other) is None


NO_BOUND = (
    "the run used cppo,delta=inf,delta_b=inf, which has no such threshold: the figure shows what cppo would have done\n"
)


@pytest.fixture
def calibrated(proxima, recipe):
    code, out, err = proxima("plot", "divergence", recipe(), "train.completions_per_prompt=4", "train.steps=1")
    assert (code, err) == (0, "") and out.endswith("\ndivergence.svg\n")
    return out


@pytest.mark.slow
def test_recipe_and_its_run(proxima, here, calibrated):
    folder = here / "runs" / "tiny-divergence"
    completions = read_trained(folder)
    assert len(completions) == 8  # those whose advantage is 0 too
    assert f"of 8 completions, {folder.relative_to(here)}" in calibrated
    code, out, _ = proxima("plot", "divergence", folder, "--json")
    output = json.loads(out)
    assert code == 0 and output["tokens"] == sum(len(it.log_prob) for it in completions)
    assert (
        f"algorithm.surrogate.delta={output['delta']:g} algorithm.surrogate.delta_b={output['delta_b']:g}" in calibrated
    )
    assert f"{output['masked_now']:.3%} with delta=0.15 delta_b=0.02" in calibrated
    key = f"{completions[3].prompt_uid}:{completions[3].sample}"
    assert proxima("plot", "threshold", folder, "--completion", key) == (0, "threshold.svg\n", NO_BOUND)
    prompt, sample = key.split(":")
    assert f"step 1, prompt {prompt}, sample {sample}, advantage" in (here / "threshold.svg").read_text()
    assert proxima("plot", "threshold", folder)[:2] == (0, "threshold.svg (replaced)\n")
    assert proxima("plot", "threshold", folder, "--surrogate", "cppo,delta=0.3", "--out", "threshold.svg")[0] == 0
    text = (here / "threshold.svg").read_text()
    assert (
        "hypothetical, the run used cppo,delta=inf,delta_b=inf: step 1" in text
        and "tokens would be masked (δ = 0.3" in text
    )
    assert proxima("plot", "divergence", folder, "--step", 1, "--out", "d.png")[1].endswith("\nd.png\n")
    assert (here / "d.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_bad_input_of_a_run(proxima, refusal, calibrated):
    run = "runs/tiny-divergence"
    for words, line in (
        (["plot", "divergence", run, "train.steps=3"], "is a run, whose settings are fixed"),
        (["plot", "threshold", run, "--step", 7], "--step 7: runs/tiny-divergence has no such step; it has 1 to 1"),
        (["plot", "threshold", run, "--completion", "9:9"], "--completion 9:9: no such trained completion"),
        (["plot", "threshold", run, "--surrogate", "dppo"], "--surrogate dppo: only cppo"),
    ):
        assert line in refusal(*words)
    code, _, err = proxima("plot", "divergence", run, "--out", "a.jpg")  # its figures are told before
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1 and "a.jpg has the suffix .jpg" in err


def test_values_take_the_place_of_overrides_of_the_same_fields():
    given = ["train.steps=5", "algorithm.surrogate.delta=0.1", " folder =runs/a", "train.steps_more=1", "seed=2"]
    values = {"train.steps": 2, "algorithm.surrogate": "{kind: cppo}", "folder": "runs/b"}
    assert with_settings(given, values) == [
        "train.steps_more=1",
        "seed=2",
        "train.steps=2",
        "algorithm.surrogate={kind: cppo}",
        "folder=runs/b",
    ]
