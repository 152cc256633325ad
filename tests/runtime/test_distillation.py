"""Distillation in whole runs: a teacher of another seed, alone and beside rewards, resumed, replayed, refused."""

import json
import math
import shutil

import pytest

from proxima.config.resolution import resolve
from proxima.data import FieldError
from proxima.model.pretrained import load_config, load_tokenizer
from proxima.runtime.launch import run_data
from proxima.runtime.loop.training_loop import RunEnded
from tests.runtime.tiny_run import NO_EVAL, go, recipe, rollouts_of, steps_of


def distilled(tiny_model, *, divergence="reverse_kl", more=None, algorithm=None, **changes):
    """The tiny recipe with the preset `distill`, from the qwen2 of the same tokenizer."""
    section = {"path": str(tiny_model("qwen2", 5)), "divergence": divergence} | (more or {})
    preset = {"preset": "distill", "distillation": section} | (algorithm or {})
    return recipe(tiny_model("llama"), algorithm=preset, **NO_EVAL | changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "divergence",
    [{"kind": "js", "beta": 0.3, "top_k_of": "student", "top_k": 8}, {"kind": "reverse_kl", "top_k": 0}],
    ids=lambda divergence: f"{divergence['kind']}-{divergence.get('top_k', 16)}",
)
def test_a_student_gets_nearer_to_its_teacher(tiny_model, tmp_path, divergence):
    fast = {"train__optimizer": {"kind": "adamw", "lr": 2e-2}, "train__schedule": "constant"}
    tree = distilled(tiny_model, divergence=divergence, engine__top_k_log_probs=8, train__steps=6, **fast)
    assert go(tmp_path / "run", tree).status == "done"
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 6
    gap, share = ("divergence", 0.8) if divergence.get("top_k") != 0 else ("sampled_reverse_kl", 0.95)  # noisy
    assert steps[-1][f"distillation/{gap}"] < share * steps[0][f"distillation/{gap}"]
    assert all(r["loss"] == pytest.approx(r["distillation/divergence"], rel=1e-4) for r in steps)
    assert all(0 <= r["reward/mean"] <= 1 for r in steps)  # measured all the same
    assert ("distillation/teacher_rest" in steps[0]) == (divergence.get("top_k") != 0)


@pytest.mark.slow
def test_a_teacher_that_is_the_student_teaches_nothing(tiny_model, tmp_path):
    """Not even where all rewards are equal does it skip a completion."""
    more = {"path": str(tiny_model("llama")), "divergence": {"kind": "reverse_kl", "top_k": 16}}
    reward = [{"kind": "tests.runtime.tiny_run:Even", "constant": 1}]
    tree = distilled(tiny_model, more=more, reward=reward, train__steps=1)
    go(tmp_path / "run", tree)
    (step,) = steps_of(tmp_path / "run")
    assert step["distillation/divergence"] == pytest.approx(0, abs=1e-6) and step["grad_norm"] < 1e-4
    rows = rollouts_of(tmp_path / "run", 1)
    assert {row["outcome"] for row in rows} == {"trained"} and {row["advantage"] for row in rows} == {0.0}


@pytest.mark.slow
def test_a_teacher_alone_needs_no_score(tiny_model, tmp_path):
    """Completions whose reward failed are trained, and rewards that always fail don't end the run."""
    reward = [{"kind": "tests.runtime.tiny_run:Even", "fail_on": 1}]
    fails = {"reward": reward, "runtime__max_unscored_steps": 1, "train__steps": 2}
    go(tmp_path / "unscored", distilled(tiny_model, **fails))
    go(tmp_path / "scored", distilled(tiny_model, train__steps=2))
    steps, scored = steps_of(tmp_path / "unscored"), steps_of(tmp_path / "scored")
    assert [r["reward/invalid"] for r in steps] == [16, 16] and "dropped/invalid" not in steps[0]
    assert [(r["loss"], r["grad_norm"]) for r in steps] == [(r["loss"], r["grad_norm"]) for r in scored]
    rows = rollouts_of(tmp_path / "unscored", 1)
    assert {(row["outcome"], row["reward"]) for row in rows} == {("trained", None)}
    fails["runtime__reward_trial"] = "off"
    with pytest.raises(RunEnded, match="no completion of the last 1 steps has a score"):
        go(tmp_path / "both", distilled(tiny_model, algorithm={"surrogate": "reinforce"}, **fails))


@pytest.mark.slow
def test_the_teacher_has_its_own_weight_and_denominator(tiny_model, tmp_path):
    """That it adds up with the loss of rewards is proven in tests/training/test_teacher.py."""
    more = {"coefficient": 0.5, "aggregate": "sequence_mean_token_sum"}
    go(tmp_path / "run", distilled(tiny_model, more=more, train__steps=1))
    (record,) = steps_of(tmp_path / "run")
    rows = rollouts_of(tmp_path / "run", 1)
    tokens = sum(len(row["tokens"]) for row in rows)
    expected = 0.5 * record["distillation/divergence"] * tokens / len(rows)
    assert record["loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_an_engine_that_scores_teaches_the_same(tiny_model, tmp_path):
    sampled = {"kind": "reverse_kl", "top_k": 0}
    engine = {"kind": "local", "dtype": "float32"}
    for name, more in (("forward", {}), ("engine", {"engine": engine})):
        go(tmp_path / name, distilled(tiny_model, divergence=sampled, more=more, train__steps=1))
    pairs = zip(steps_of(tmp_path / "forward"), steps_of(tmp_path / "engine"), strict=True)
    for ours, theirs in pairs:
        for name in ("distillation/sampled_reverse_kl", "loss"):
            assert theirs[name] == pytest.approx(ours[name], rel=1e-3)
        assert math.isfinite(ours["loss"]) and ours["grad_norm"] > 0


@pytest.mark.parametrize(
    ("name", "text", "other", "message"),
    [
        ("tokenizer.json", '"!":', '"!!":', r"another vocabulary: '!!?' is .* \(2 differ\); use a teacher of the"),
        (
            "tokenizer_config.json",
            '"eos_token": "<|im_end|>"',
            '"eos_token": "<|endoftext|>"',
            "eos_token_id=2, and model.path has 0; use a teacher of the student's family",
        ),
    ],
)
def test_a_teacher_with_other_tokens_is_refused_before_weights_are_loaded(
    name, text, other, message, tiny_model, tmp_path
):
    teacher = shutil.copytree(tiny_model("qwen2", 5), tmp_path / "teacher")
    (teacher / name).write_text((teacher / name).read_text().replace(text, other))
    (teacher / "model.safetensors").unlink()
    with pytest.raises(FieldError, match=f"algorithm.distillation.path='.*teacher' has {message}"):
        go(tmp_path / "run", distilled(tiny_model, more={"path": str(teacher)}))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_padded_output_layer_is_no_other_vocabulary(tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM

    teacher = tmp_path / "teacher"
    model = AutoModelForCausalLM.from_pretrained(tiny_model("qwen2", 5))
    model.resize_token_embeddings(288)
    model.save_pretrained(teacher)
    load_tokenizer(str(tiny_model("qwen2", 5))).save_pretrained(teacher)
    assert load_config(str(teacher)).vocab_size == 288
    divergence = {"kind": "reverse_kl", "top_k": 259}
    tree = distilled(tiny_model, divergence=divergence, more={"path": str(teacher)}, train__steps=1)
    assert go(tmp_path / "run", tree).status == "done"
    (step,) = steps_of(tmp_path / "run")
    assert step["distillation/teacher_rest"] > 1e-3  # its padding
    tree["algorithm"]["distillation"]["divergence"]["top_k"] = 260
    with pytest.raises(FieldError, match="divergence.top_k=260 must be at most the vocabulary, 259"):
        go(tmp_path / "more", tree)


@pytest.mark.slow
def test_a_teacher_with_a_shorter_context_is_refused(tiny_model, tmp_path):
    teacher = shutil.copytree(tiny_model("qwen2", 5), tmp_path / "teacher")
    facts = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps(facts | {"max_position_embeddings": 64}))
    tree = distilled(tiny_model, more={"path": str(teacher)}, train__steps=1)
    with pytest.raises(FieldError, match="reads at most 64 tokens, and prompt and completion may have 256; set model"):
        go(tmp_path / "run", tree)
    with pytest.MonkeyPatch.context() as elsewhere:  # rank 0 alone knows the context that the servers leave
        elsewhere.setattr(run_data, "is_first", lambda: False)
        run_data.load_run_data(resolve(tree).config)
    tree["model"]["max_length"] = 64
    assert go(tmp_path / "run", tree).status == "done"
