"""What the page says of a token is what `proxima.core` computed of it and what Parquet has, over every surrogate."""

import base64
import math
import random

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml

from proxima.core import CORRECTIONS, SURROGATES
from proxima.core.token_reasons import band_of
from proxima.data import UserError
from proxima.experiments.stored_tokens import LossSpecs, StoredTokens
from proxima.laws.spec_check import variants_of
from proxima.runtime.state.folder import RunFolder
from proxima.view.microscope.completion_page import CompletionPage, completion_key, first_difference
from proxima.view.microscope.viewed_run import ViewedRun
from tests.view.microscope.page_runs import make_run
from tests.view.microscope.stored_run import make_step

CASES = [(name, spec, ()) for name, cls in sorted(SURROGATES.items()) for spec in variants_of(cls()).values()]
CASES += [
    (f"cppo with {name}", SURROGATES["cppo"](), (spec,))
    for name, cls in sorted(CORRECTIONS.items())
    for spec in variants_of(cls()).values()
    if getattr(spec, "towards", "") != "next" and "top_k_log_prob" not in spec.needs  # not stored
]


def pages(folder, step=1):
    run = ViewedRun(0, RunFolder(folder))
    return {key: CompletionPage(run, run.step(step), key) for key in run.step(step).rows}


@pytest.fixture
def page(tmp_path):
    """The first completion of a step."""
    make_step(tmp_path, SURROGATES["cppo"]())
    return next(iter(pages(tmp_path).values()))


def digits(value):
    return f"{value:.5g}"


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(CASES)), ids=[name for name, _, _ in CASES])
def test_tokens_drawn_at_random_say_what_core_and_parquet_say(case, tmp_path):
    _, surrogate, corrections = CASES[case]
    batch, keep, weight = make_step(tmp_path, surrogate, corrections, prompts=2, samples=2, seed=case)
    table = pq.read_table(tmp_path / "rollouts" / "000001.parquet").to_pylist()
    drawn, shown = random.Random(case), pages(tmp_path)
    band = band_of(surrogate, batch) if not surrogate.whole_batch and not corrections else None
    starts = batch.cu_seqlens.tolist()
    for _ in range(8):
        row = drawn.randrange(len(table))
        token = drawn.randrange(starts[row + 1] - starts[row])
        at = starts[row] + token
        answer = shown[(table[row]["prompt_uid"], table[row]["sample"], 0)].token(token)
        stored = {"current": "log_prob", "behavior": "behavior_log_prob", "sampled": "sampled_log_prob"}
        for policy, column in stored.items():
            assert digits(answer["log_probs"][policy]) == digits(table[row][column][token])
        assert answer["kept"] == table[row]["keep"][token] == bool(keep[at])
        assert answer["kept"] == answer["reason"].startswith("kept: "), answer["reason"]
        ratio = float((batch.log_prob[at] - batch.behavior_log_prob[at]).exp())
        assert answer["ratio"] == pytest.approx(ratio, rel=3e-7)  # the last bit of exp
        if not any(getattr(spec, "normalise", False) for spec in corrections):
            assert answer["gradient_weight"] == pytest.approx(float(weight[at]), rel=2e-6, abs=1e-7)
        for column, values in ({} if band is None else band.drawn()).items():
            there = float(values[at])
            assert digits(answer["band"][column]) == digits(there) if math.isfinite(there) else True, column


@pytest.mark.slow
def test_the_prefix_of_cppo_is_its_definition(tmp_path):
    spec = SURROGATES["cppo"]()
    batch, *_ = make_step(tmp_path, spec)
    weighted, threshold = spec.threshold(batch)
    for row, page in enumerate(pages(tmp_path).values()):
        own = slice(int(batch.cu_seqlens[row]), int(batch.cu_seqlens[row + 1]))
        z, c = weighted[own].numpy(), threshold[own].numpy()
        columns = page.columns
        np.testing.assert_array_equal(columns["weighted_divergence"], z)
        np.testing.assert_array_equal(columns["threshold"], c)
        np.testing.assert_allclose(columns["prefix_spent"], np.cumsum(z) - z, atol=1e-6)
        bound = np.minimum(0, columns["prefix_budget"] - columns["prefix_spent"]) + spec.delta
        np.testing.assert_allclose(c, bound, atol=2e-6)


def test_columns_travel_as_bytes(page):
    answer = page.answer()
    coded = answer["columns"]
    for name, kind, dtype in (("log_prob", "f32", "<f4"), ("keep", "u8", "u1"), ("policy_version", "i32", "<i4")):
        values = np.frombuffer(base64.b64decode(coded[name][kind]), dtype)
        np.testing.assert_array_equal(values, page.row[name])
    assert set(answer["band"]["names"]) <= set(coded)
    assert answer["tokens"]["text"][0] == f"⟨{answer['tokens']['ids'][0]}⟩"  # no tokenizer here


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"outcome": "skipped_zero_advantage"}, "no gradient: the completion's advantage is 0"),
        ({"outcome": "dropped_uniform"}, "not trained: the selection uniform dropped it"),
        ({"outcome": "invalid"}, "not trained: its score failed"),
        ({"log_prob": None, "keep": None}, "the trainer ran no forward pass of it"),
    ],
)
def test_why_there_are_no_reasons(change, words, page):
    page.row.update(change)
    assert page.token(0)["reason"].startswith(words)
    assert page.answer()["band"] is None


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ({"surrogate": {"kind": "my_lab.losses:SoftClip"}}, "my_lab.losses:SoftClip is not a kind of proxima"),
        ({"surrogate": None}, "the run has no surrogate"),
        ({"surrogate": {"kind": "cppo", "gamma": 1}}, "config.yaml is of another version"),
        ({"surrogate": {"kind": "ppo_clip"}, "proximal": "recompute"}, "the proximal log-prob was recomputed"),
    ],
)
def test_recipes_of_which_nothing_can_be_said(algorithm, words, page):
    recipe = {"algorithm": algorithm, "train": {"updates_per_step": 2}}
    stored = StoredTokens(row=page.row, specs=LossSpecs.of(recipe), step=1, recomputed={})
    assert words in stored.problem()
    assert stored.reasons() is None


def test_keys_and_differences():
    assert completion_key("12.3.0") == (12, 3, 0)
    for wrong in ("", "1.2", "a.b.c", "1.2.3.4", "../../etc"):
        with pytest.raises(UserError, match="uid.sample.turn"):
            completion_key(wrong)
    first, other = np.array([1, 2, 3]), np.array([1, 5, 3])
    assert first_difference(first, other)["first_difference"] == 1
    assert first_difference(first, first[:2])["first_difference"] == 2
    assert first_difference(first, first)["first_difference"] is None


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """A step of the page's run: 3.2 is an episode of two paths, 7.7 one that failed."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    make_run(folder, str)
    return pages(folder, 3)


@pytest.mark.slow
def test_an_episode_shows_its_messages_and_explains_the_models_alone(played):
    page = played[3, 2, 1]
    answer = page.answer()
    sizes = [span["tokens"] for span in answer["episode"]["spans"]]
    (path,) = answer["episode"]["paths"]
    assert (path["turn"], path["shared_tokens"], len(path["spans"])) == (0, sizes[0] + 3, 3)
    assert played[4, 0, 0].answer()["episode"]["paths"] == []
    sampled = np.frombuffer(base64.b64decode(answer["columns"]["sampled"]["u8"]), "u1").astype(bool)
    assert sampled.tolist() == np.repeat([True, False, True, False, True], sizes).tolist()
    for name in ("log_ratio", "divergence", "mismatch", "loss_weight", "prefix_spent", "threshold"):
        np.testing.assert_array_equal(np.isnan(page.columns[name]), ~sampled, name)
    z = page.columns["weighted_divergence"][sampled]  # an observation takes no part of CPPO's prefix
    np.testing.assert_allclose(page.columns["prefix_spent"][sampled], np.cumsum(z) - z, atol=1e-6)
    behavior = np.frombuffer(base64.b64decode(answer["columns"]["behavior_log_prob"]["f32"]), np.float32)
    np.testing.assert_array_equal(np.isnan(behavior), ~sampled)
    observed, written = page.token(sizes[0]), page.token(sizes[0] + sizes[1])
    assert (observed["reason"], observed["top_k"]) == ("not sampled here: it is context, in no loss", None)
    assert observed["log_probs"]["behavior"] is observed["ratio"] is observed["advantage"] is None
    assert written["reason"].startswith(("kept: ", "masked: ")) and written["log_probs"]["behavior"] is not None
    assert played[7, 7, 0].answer()["episode"]["failure"] == "it broke"


@pytest.mark.slow
def test_an_episode_counts_once_in_its_group_with_the_models_tokens(played):
    file = played[3, 2, 1].file
    rows = {key: page.row for key, page in played.items() if key[0] == 3}
    sizes = {key: len(row["tokens"]) if row["sampled"] is None else row["sampled"].sum() for key, row in rows.items()}
    lengths = dict(zip(file.rows, file.table["length"], strict=True))
    assert (len(sizes), lengths, lengths[7, 7, 0]) == (9, lengths | sizes, 0)
    once, group = [row["reward"] for key, row in rows.items() if key != (3, 2, 0)], file.groups()[3]
    assert (group["mean"], group["answer"]) == (pytest.approx(np.mean(once)), "4")
    assert group["length_mean"] == sum(sizes.values()) / 8
    scored = [page.row["reward"] for (uid, sample, _), page in played.items() if uid == 7 and sample < 7]
    assert file.groups()[7]["mean"] == pytest.approx(np.mean(scored))


def test_the_mismatch_is_of_the_weights_that_wrote_the_token(tmp_path):
    """Of a forward pass before any update of the step; after one, the policy's own movement would be in it."""
    make_step(tmp_path, SURROGATES["cppo"]())
    page = next(iter(pages(tmp_path).values()))
    behavior, given = page.row["behavior_log_prob"], dict(page.run.recipe)
    np.testing.assert_array_equal(page.columns["mismatch"], np.abs(page.row["log_prob"] - behavior))

    def changed(recipe=None, **row):
        (tmp_path / "config.yaml").write_text(yaml.safe_dump({**given, **(recipe or {})}))
        other = next(iter(pages(tmp_path).values()))
        other.row.update(row)
        assert other.columns  # read now: the next call writes another config
        return other

    several = {"train": {"updates_per_step": 4, "epochs_per_step": 1}}
    for page_, why in (
        (changed(several), "its first forward pass came after others of the step, which had moved the weights"),
        (changed(several, updates_before=2), "its first forward pass came after 2 updates of the step, which"),
        (changed({"rollouts": "runs/other"}), "this run is a replay: the weights of another run wrote the completion"),
        (changed(log_prob=None, keep=None), "not stored: the trainer ran no forward pass of it"),
        (changed(policy_version=page.row["policy_version"] + 1), "older weights wrote the completion: the step began"),
    ):
        assert page_.columns["mismatch"] is None and page_.token(0)["missing"]["mismatch"].startswith(why)
        assert "mismatch" not in page_.answer()["columns"]
    assert changed(several, updates_before=0).columns["mismatch"] is not None
    before = behavior + np.float32(0.25)  # of the pass before the step's updates
    recomputed = {"algorithm": {**given["algorithm"], "proximal": "recompute"}, **several}
    shown = changed(recomputed, proximal_log_prob=before, updates_before=3)
    np.testing.assert_allclose(shown.columns["mismatch"], 0.25, atol=1e-6)
    mixed = page.row["policy_version"].copy()
    mixed[0] += 1
    half = changed(policy_version=mixed).columns["mismatch"]
    assert np.isnan(half[0]) and not np.isnan(half[1:]).any()


def test_a_step_names_the_masked_tokens_and_the_beginning_of_each_answer(tmp_path):
    make_step(tmp_path, SURROGATES["cppo"]())
    step, rows = ViewedRun(0, RunFolder(tmp_path)).step(1), pq.read_table(tmp_path / "rollouts" / "000001.parquet")
    columns = step.answer()["completions"]
    assert columns["masked"] == [row.count(False) for row in rows["keep"].to_pylist()] and any(columns["masked"])
    assert columns["beginning"] == [" ".join(text.split())[:80] for text in rows["text"].to_pylist()]
