"""The batch arithmetic, the memory and the time, and the table of values."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from proxima.cli.explain import text_of, values_table
from proxima.config import dump, resolve
from proxima.config.estimate import Estimates, batch_of, longest_prompt, time_of
from proxima.config.explanation import as_json, header_of
from proxima.config.memory_size import memory_of
from proxima.config.model_size import critic_facts, model_facts
from proxima.engine.protocol import Request, Sampling
from tests.config.conftest import BASE
from tests.engine.helpers import engine, prompt


def batch(recipe, *overrides, prompt=40):
    return batch_of(resolve(recipe(), list(overrides)).config, prompt)


def test_batch_arithmetic(recipe):
    size = batch(recipe, "sampling.max_tokens=12")
    assert (size.sequences, size.longest, size.micro_batches, size.updates) == (64, 52, 1, 1)
    assert size.tokens == 8 * 40 + 64 * 12
    assert str(size) == "8 prompts × 8 completions = 64 sequences → ≤ 1 micro-batch of ≤ 4,096 tokens → 1 update"


def test_pruned_completions_are_generated_and_not_forwarded(recipe):
    size = batch(recipe, "sampling.max_tokens=12", "algorithm=cppo_prune_75", "train.completions_per_prompt=16")
    assert (
        str(size)
        == "32 prompts × 16 completions = 512 sequences, 4 of 16 kept → ≤ 1 micro-batch of ≤ 4,096 tokens → 1 update"
    )
    assert (size.sequences, size.tokens) == (512, 32 * 40 + 128 * 12)
    fewer = batch(
        recipe, "algorithm=cppo_prune_75", "algorithm.selection.0.allocate=false", "algorithm.selection.0.scope=batch"
    )
    assert (fewer.prompts, fewer.sequences, fewer.kept) == (8, 64, 2)


REFILL = ["algorithm.selection=[drop_uniform_groups]", "sampling.max_tokens=12"]


def test_dynamic_sampling_in_the_arithmetic(recipe):
    adaptive = batch(recipe, *REFILL, "algorithm.dynamic_sampling.exhausted=partial")
    assert "= 64 sequences, generated until it is full → ≤ 1 micro-batch" in str(adaptive)
    assert adaptive.generated == (8, 64)
    fixed = batch(recipe, *REFILL, "algorithm.dynamic_sampling.oversample=3")
    assert "= 64 sequences, 24 prompts at a time until it is full → " in str(fixed)
    assert (fixed.prompts, fixed.sequences, fixed.generated) == (8, 64, (24, 192))


def test_over_sampling_is_on_top_of_allocation(recipe):
    """8 prompts × 16 / 4 = 32 for the update, half as many more generated."""
    prune = "algorithm.selection=[drop_uniform_groups,{kind: prune, rate: 0.75, allocate: true}]"
    size = batch(recipe, prune, "train.completions_per_prompt=16", "algorithm.dynamic_sampling.oversample=1.5")
    assert "32 prompts × 16 completions = 512 sequences, 4 of 16 kept, 48 prompts at a time until it is full" in str(
        size
    )
    assert size.generated == (48, 768)


def test_the_greedy_baseline_is_generated_too(recipe):
    size = batch(recipe, "algorithm.advantage=remax", "train.completions_per_prompt=1")
    assert (size.sequences, size.generated) == (8, (8, 16))


def test_time_and_memory_count_what_is_generated(recipe, tiny_model):
    """Generation grows with over-sampling, training does not; the cache holds as many rows as there are slots."""
    facts = model_facts(str(tiny_model("llama")))
    plain, more = (
        resolve(recipe(), [*REFILL, *extra]).config for extra in ([], ["algorithm.dynamic_sampling.oversample=3"])
    )
    once, thrice = (time_of(config, facts, batch_of(config, 40), 1e9) for config in (plain, more))
    assert math.isclose(thrice.generate, 3 * once.generate) and thrice.train == once.train
    small = [
        resolve(recipe(), [*REFILL, "engine.slots=128", *extra]).config
        for extra in ([], ["algorithm.dynamic_sampling.oversample=3"])
    ]
    caches = [memory_of(config, facts, batch_of(config, 40))["KV cache"] for config in small]
    assert caches[1] == 2 * caches[0]  # 64 rows, and 128 of 192


@pytest.mark.parametrize(("most", "said"), [(10, "there may be 10"), (0, "there may be any number")])
def test_explain_says_what_the_time_leaves_out(recipe, most, said):
    resolved = resolve(recipe(), [*REFILL, f"algorithm.dynamic_sampling.max_num_gen_batches={most}"])
    assert any(said in note for note in as_json(resolved, gemm=1e12)["notes"])
    assert not any("dynamic sampling" in note for note in as_json(resolve(recipe()), gemm=1e12)["notes"])


def test_updates_are_counted_over_epochs(recipe):
    size = batch(recipe, "train.updates_per_step=2", "train.epochs_per_step=3", "train.tokens_per_micro_batch=64")
    assert size.updates == 6
    assert str(size).endswith("of ≤ 64 tokens → 6 updates")


@pytest.mark.parametrize(
    ("budget", "share", "micro_batches"),
    [
        (128, True, 8),  # 40 + 8 × 11 = 128: a group each; the last token of a completion is not fed
        (256, True, 4),
        (51, True, 64),
        (10, True, 64),  # over budget: each alone
        (102, False, 32),
        (10_000, False, 1),
    ],
)
def test_micro_batches_are_counted_by_the_trainers_packing(recipe, budget, share, micro_batches):
    size = batch(
        recipe,
        "sampling.max_tokens=12",
        f"train.tokens_per_micro_batch={budget}",
        f"model.share_prompt={str(share).lower()}",
    )
    assert size.micro_batches == micro_batches


def test_model_facts_are_exact(tiny_model):
    from transformers import AutoModelForCausalLM

    for kind in ("llama", "qwen3"):
        folder = str(tiny_model(kind))
        model = AutoModelForCausalLM.from_pretrained(folder)
        facts = model_facts(folder)
        assert facts.parameters == sum(p.numel() for p in model.parameters())
        assert facts.kv_width == model.model.layers[0].self_attn.k_proj.out_features
        assert (facts.layers, facts.vocabulary) == (model.config.num_hidden_layers, model.config.vocab_size)


def test_longest_prompt_counts_template_and_system(recipe, tiny_model):
    folder = tiny_model("llama")
    config = resolve(recipe(), [f"model.path={folder}"]).config
    assert longest_prompt(config) == len(
        "<user\nWhat is 8 + 1?>\n<assistant\n"
    )  # a token a byte, and one for each mark
    longer = resolve(recipe(), [f"model.path={folder}", "data.system=Be brief."]).config
    assert longest_prompt(longer) - longest_prompt(config) == len("<system\nBe brief.>\n")


def test_memory_adds_up(recipe, tiny_model):
    folder = tiny_model("llama")
    overrides = [
        f"model.path={folder}",
        "sampling.max_tokens=12",
        "model.compute_dtype=float32",
        "engine.dtype=float32",
    ]
    config = resolve(recipe(), overrides).config
    facts = model_facts(str(folder))
    memory = memory_of(config, facts, batch_of(config, 40))
    assert memory["weights"] == 4 * facts.parameters
    assert "gradients" not in memory  # an update has one micro-batch: they come as its activations go
    several = resolve(recipe(), [*overrides, "train.tokens_per_micro_batch=60"]).config
    assert memory_of(several, facts, batch_of(several, 40))["gradients"] == 4 * facts.parameters
    assert memory["Adam's two moments"] == 8 * facts.parameters
    assert memory["KV cache"] == 2 * facts.layers * facts.kv_width * 64 * 64 * 4
    assert "reference model" not in memory
    assert "autocast copy of the weights" not in memory
    for kl in ("algorithm.reference_kl=k3", "algorithm.reward_kl.estimator=k3"):
        more = resolve(recipe(), [*overrides, kl]).config
        assert memory_of(more, facts, batch_of(more, 40))["reference model"] == 4 * facts.parameters


@pytest.mark.parametrize("bound", ["model.max_length=100", "episode.tokens=60"])
def test_what_the_engine_keeps_of_earlier_turns_is_in_the_memory(recipe, tiny_model, bound):
    """Two turns of eight conversations, as long as they may be: what is kept is trimmed to the figure."""
    folder = tiny_model("llama")
    played = [f"model.path={folder}", "sampling.max_tokens=12", "engine={kind: local, dtype: float32, slots: 8}"]
    config = resolve(recipe(), [*played, "task={kind: arithmetic, environment: calculator}", bound]).config
    facts = model_facts(str(folder))
    name = "kept KV of earlier turns"
    memory = memory_of(config, facts, batch_of(config, 40))
    assert memory[name] == memory["KV cache"] == 2 * facts.layers * facts.kv_width * 128 * 8 * 4
    assert name not in memory_of(resolve(recipe(), played).config, facts, batch_of(config, 40))
    scheduler = engine(slots=8, max_length=100).scheduler
    for length in (40, 90):
        for uid in range(16):
            asked = Request(prompt=prompt(uid, length), sample=0, sampling=Sampling(max_tokens=12), seed=1)
            scheduler.enqueue([replace(asked, shared=(length,))], lambda completion: None)
        while scheduler.running or scheduler.waiting:
            scheduler.step()
        kept = scheduler.prefixes._kept.values()
        assert 0 < sum(kv.nbytes for kv in kept) <= memory[name]
    assert sum(kv.nbytes for kv in kept) > 0.9 * memory[name]


def test_a_teacher_is_in_memory_and_time(recipe, tiny_model):
    student, teacher = (str(tiny_model(kind)) for kind in ("llama", "qwen2"))
    facts, size = model_facts(student), model_facts(teacher).parameters
    words = [f"model.path={student}", "algorithm=distill", f"algorithm.distillation.path={teacher}"]
    config = resolve(recipe(), words).config
    resolved, without = (Estimates(resolve(recipe(), x), 1e9) for x in (words, words[:1]))
    assert resolved.memory["teacher model"] == 4 * size and "teacher model" not in without.memory
    plain = time_of(config, facts, resolved.batch, 1e9)
    assert math.isclose((resolved.time.train - plain.train) * facts.parameters, plain.train * size / 3)  # 2 of 6 FLOP
    scoring = [*words, "algorithm.distillation.divergence.top_k=0", "algorithm.distillation.engine=local"]
    assert Estimates(resolve(recipe(), scoring), 1e9).memory["teacher model"] == 6 * size  # and a copy in bfloat16


def test_time_is_proportional(recipe, tiny_model):
    facts = model_facts(str(tiny_model("llama")))
    config = resolve(recipe(), ["train.steps=10"]).config
    once, twice = (time_of(config, facts, batch_of(config, 40), gemm) for gemm in (1e9, 2e9))
    assert math.isclose(once.run, 2 * twice.run)
    assert math.isclose(once.run, 10 * once.step)
    assert once.evaluate == 0
    with_eval = resolve(recipe(), ["train.steps=10", "eval.task=tests.config.fakes:Sums", "eval.every=5"]).config
    times = time_of(with_eval, facts, batch_of(with_eval, 40), 1e9)
    assert math.isclose(times.run, 10 * times.step + 3 * times.evaluate)  # before, after step 5, after step 10


def test_the_text_has_values_batch_memory_and_time(recipe, tiny_model):
    resolved = resolve(recipe(), [f"model.path={tiny_model('llama')}", "algorithm.surrogate.delta=0.2"])
    text = text_of(resolved, gemm=1e12, everything=True)
    rows = [line.split("  ") for line in text.splitlines()]
    cells = {row[0].strip(): [cell.strip() for cell in row[1:] if cell.strip()] for row in rows}
    assert cells["algorithm.surrogate.kind"][:2] == ["cppo", "preset cppo, chosen in run.yaml:4"]
    assert cells["algorithm.surrogate.delta"][:2] == ["0.2", "command line, over 0.15 of the preset"]
    assert cells["algorithm.surrogate.delta"][2].startswith("threshold of one token, a probability, > 0")
    assert "8 prompts × 8 completions = 64 sequences" in text
    assert "1,000 GFLOP/s" in text
    assert "memory   about" in text


def test_what_cannot_be_read_is_said(recipe):
    facts = as_json(resolve(recipe(BASE.replace("org/model", "nowhere"))), gemm=1e12)
    assert facts["memory_bytes"] is None
    assert facts["seconds"] is None
    assert [note for note in facts["notes"] if note.startswith("model size unknown: ")]
    assert "prompts are taken to have 128 tokens" in facts["notes"]
    assert facts["batch"]["sequences"] == 64


def test_a_known_model_has_a_size_without_its_config(recipe):
    facts = as_json(resolve(recipe(BASE.replace("org/model", "models/Qwen2.5-32B"))), gemm=1e12)
    assert (facts["parameters"], facts["known_size"]) == (32_763_876_352, True)
    assert facts["memory_bytes"]["weights"] == 4 * 32_763_876_352 and facts["seconds"]["step"] > 0
    assert facts["notes"][0] == "known size: that of Qwen2.5-32B as published; its config.json can't be read here"
    text = text_of(resolve(recipe(BASE.replace("org/model", "models/Qwen2.5-32B"))), gemm=1e12)
    assert "for 32.8 B parameters (known size), all at once" in text


def test_the_recipes_comment_comes_first(recipe):
    comment = (
        "# yaml-language-server: $schema=x.json\n# A recipe of mine.\n#   Source  a paper\n#\n#   proxima train it\n"
    )
    resolved = resolve(recipe(comment + BASE + "# not this\n"))
    assert header_of(resolved) == "A recipe of mine.\n  Source  a paper\n\n  proxima train it"
    text = text_of(resolved, gemm=1e12)
    places = [text.index(word) for word in ("Source", "train    cppo: ", "batch  ", "algorithm.surrogate.kind")]
    assert text.startswith("A recipe of mine.\n") and places == sorted(places)
    assert header_of(resolve(recipe(BASE))) == ""
    tree = {"model": {"path": "a/b"}, "task": "arithmetic", "reward": "number", "algorithm": "grpo"}
    assert header_of(resolve(tree)) == ""


def test_evaluations_that_cannot_be_counted_are_not_in_the_time(recipe, tiny_model):
    path = f"model.path={tiny_model('llama')}"
    without = text_of(resolve(recipe(), [path]), gemm=1e12)
    missing = text_of(
        resolve(recipe(), [path, "eval.task={kind: prepared, path: data/none}", "eval.limit=0"]), gemm=1e12
    )
    with_eval = text_of(resolve(recipe(), [path, "eval.task=tests.config.fakes:Sums"]), gemm=1e12)
    assert ["evaluations are not in the time" in text for text in (without, missing, with_eval)] == [False, True, False]
    assert ["and their evaluations (" in " ".join(text.split()) for text in (without, missing, with_eval)] == [
        False,
        False,
        True,
    ]


def test_a_small_file_is_evaluated_once_through(recipe, tiny_model):
    Path("held.jsonl").write_text('{"question": "?", "answer": 1}\n' * 5)
    words = [f"model.path={tiny_model('llama')}", "eval.task={kind: jsonl, path: held.jsonl}"]
    seconds = []
    for limit in (0, 5, 200, 2):
        time = Estimates(resolve(recipe(), [*words, f"eval.limit={limit}"]), gemm=1e12).time
        assert time is not None
        seconds.append(time.evaluate)
    assert seconds[0] == seconds[1] == seconds[2] == pytest.approx(2.5 * seconds[3])


def test_values_that_differ_from_the_defaults_come_first(recipe, tiny_model):
    words = [f"model.path={tiny_model('llama')}", "train.epochs_per_step=1", "train.steps=7", "sampling.top_k=3"]
    resolved = resolve(recipe(BASE + "seed: 1\ndata: {shuffle: true}\nengine: local\n"), words)
    text = text_of(resolved, gemm=1e12)
    shown = {line.split()[0]: line.split("  ")[-1].strip() for line in text.splitlines() if "." in line.split(" ")[0]}
    assert shown["sampling.top_k"] == "command line" and shown["train.steps"].startswith("command line")
    assert shown["train.epochs_per_step"] == "command line"  # a default, but somebody typed it
    # defaults, whether the file says them or not
    assert not {"seed", "data.shuffle", "engine.kind", "model.dtype", "algorithm.surrogate.delta"} & set(shown)
    listed = [e for e in resolved.entries if e.path in shown]
    assert f"{len(resolved.entries) - len(listed)} more values at their defaults" in text.splitlines()[-1]
    assert max(map(len, text.splitlines())) <= 100
    everything = text_of(resolved, gemm=1e12, everything=True)
    assert all(f"\n{entry.path} " in everything for entry in resolved.entries) and "--all" not in everything


def test_the_config_of_a_run_has_the_same_differences(recipe, tiny_model):
    first = resolve(recipe(), [f"model.path={tiny_model('llama')}", "sampling.top_k=3"])
    again = resolve(recipe(dump(first), "again.yaml"))
    differing = [{e.path for e in entry.entries if not e.is_default} for entry in (first, again)]
    assert differing[0] == differing[1] - {"algorithm.reference_engine"} and "sampling.top_k" in differing[0]


def test_lines_are_cut_at_the_width(recipe):
    lines = values_table(resolve(recipe()).entries, width=80).splitlines()
    assert max(map(len, lines)) == 80
    assert any(line.endswith("…") for line in lines)


def test_the_four_models_of_ppo(recipe, tiny_model):
    """Actor, critic, frozen reference: each with what it holds; a reward model is in its own test."""
    facts = model_facts(str(tiny_model("llama")))
    overrides = ["algorithm=ppo", "algorithm.reference_kl=k3", f"model.path={tiny_model('llama')}"]
    none, head, model = (
        resolve(recipe(), [*overrides, f"critic={kind}", "model.compute_dtype=float32"]).config
        for kind in ("null", "head", "model")
    )
    batch, p = batch_of(model, 40), facts.parameters
    assert critic_facts(none, facts) is critic_facts(head, facts) is None
    memory = memory_of(model, facts, batch, critic=critic_facts(model, facts))
    assert memory["critic's weights"] == memory["reference model"] == memory["weights"] == 4 * p
    assert memory["critic's gradients and Adam's moments"] == 12 * p
    assert "critic's weights" not in memory_of(head, facts, batch, critic=critic_facts(head, facts))
    plain, more = (time_of(model, facts, batch, 1e9, critic=entry) for entry in (None, facts))
    assert more.train - plain.train == pytest.approx(p * 8 * batch.tokens / (0.43 * 1e9))


def test_a_reward_model_that_is_not_there_yet_is_a_note(recipe, tiny_model):
    """The rest is shown; `check` says which field names it."""
    text = BASE.replace("reward: number", "reward: {kind: model, path: models/judge}")
    facts = as_json(resolve(recipe(text), [f"model.path={tiny_model('llama')}"]), gemm=1e12)
    assert facts["memory_bytes"] is None and facts["seconds"]["step"] > 0
    assert [note for note in facts["notes"] if note.startswith("memory unknown: ") and "models/judge" in note]
