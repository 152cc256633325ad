"""The batch arithmetic, and the table of values."""

from contextlib import suppress

import pytest

from proxima.cli.explanation import facts_of, header_of, source_lines, text_of, values_table
from proxima.cli.prose import laid_out
from proxima.config.batch_arithmetic import batch_of, longest_prompt
from proxima.config.problems import ConfigError
from proxima.config.resolution import resolve
from proxima.config.resolved import dump
from proxima.config.validate import check
from proxima.system.user_files import shipped_recipes
from tests.config.conftest import BASE


def batch(recipe, *overrides, prompt=40):
    return batch_of(resolve(recipe(), list(overrides)).config, prompt)


def test_batch_arithmetic(recipe):
    size = batch(recipe, "sampling.max_tokens=12")
    assert (size.sequences, size.longest, size.micro_batches, size.updates) == (64, 52, 1, 1)
    assert size.tokens == 8 * 40 + 64 * 12
    assert str(size) == "8 prompts × 8 completions = 64 sequences → ≤ 1 micro-batch of ≤ 4,096 tokens → 1 update"
    alone = batch(recipe, "train.prompts_per_step=1", "train.completions_per_prompt=1", "algorithm.advantage=gae")
    assert str(alone).startswith("1 prompt × 1 completion = 1 sequence → ")


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


def test_explain_says_why_a_step_has_more_prompts(recipe):
    notes = facts_of(resolve(recipe(), ["algorithm=cppo_prune_75", "train.completions_per_prompt=16"]))["notes"]
    (note,) = [note for note in notes if "allocate" in note]
    assert note.startswith("train.prompts_per_step=8 becomes 32: `prune` with allocate=true drops completions")
    assert not [note for note in facts_of(resolve(recipe()))["notes"] if "allocate" in note]


REFILL = ["algorithm.selection=[drop_uniform_groups]", "sampling.max_tokens=12"]


def test_dynamic_sampling_in_the_arithmetic(recipe):
    adaptive = batch(recipe, *REFILL, "algorithm.dynamic_sampling.exhausted=partial")
    assert "= 64 sequences, generated until it is full → ≤ 1 micro-batch" in str(adaptive)
    assert adaptive.generated == 64
    fixed = batch(recipe, *REFILL, "algorithm.dynamic_sampling.oversample=3")
    assert "= 64 sequences, 24 prompts at a time until it is full → " in str(fixed)
    assert (fixed.prompts, fixed.sequences, fixed.generated) == (8, 64, 192)


def test_over_sampling_is_on_top_of_allocation(recipe):
    """8 prompts × 16 / 4 = 32 for the update, half as many more generated."""
    prune = "algorithm.selection=[drop_uniform_groups,{kind: prune, rate: 0.75, allocate: true}]"
    size = batch(recipe, prune, "train.completions_per_prompt=16", "algorithm.dynamic_sampling.oversample=1.5")
    assert "32 prompts × 16 completions = 512 sequences, 4 of 16 kept, 48 prompts at a time until it is full" in str(
        size
    )
    assert size.generated == 768


def test_the_greedy_baseline_is_generated_too(recipe):
    size = batch(recipe, "algorithm.advantage=remax", "train.completions_per_prompt=1")
    assert (size.sequences, size.generated) == (8, 16)


@pytest.mark.parametrize(("most", "said"), [(10, "there may be 10"), (0, "there may be any number")])
def test_explain_says_what_the_time_leaves_out(recipe, most, said):
    resolved = resolve(recipe(), [*REFILL, f"algorithm.dynamic_sampling.max_num_gen_batches={most}"])
    assert any(said in note for note in facts_of(resolved)["notes"])
    assert not any("dynamic sampling" in note for note in facts_of(resolve(recipe()))["notes"])


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


def test_longest_prompt_counts_template_and_system(recipe, tiny_model):
    folder = tiny_model("llama")
    config = resolve(recipe(), [f"model.path={folder}"]).config
    assert len(longest_prompt(config, None, config.task.rows(1))) == len(
        "<user\nWhat is 8 + 1?>\n<assistant\n"
    )  # a token a byte, and one for each mark
    longer = resolve(recipe(), [f"model.path={folder}", "data.system=Be brief."]).config
    rows = config.task.rows(1)
    added = len(longest_prompt(longer, None, rows)) - len(longest_prompt(config, None, rows))
    assert added == len("<system\nBe brief.>\n")


def test_what_cannot_be_read_is_said(recipe):
    facts = facts_of(resolve(recipe(BASE.replace("org/model", "nowhere"))))
    assert [note for note in facts["notes"] if note.startswith("prompt length unknown: ")]
    remedy = "with the data and the model's tokenizer on this machine they are counted"
    assert f"assuming that prompts have 128 tokens: {remedy}" in facts["notes"]
    assert facts["batch"]["sequences"] == 64


def test_the_recipes_comment_comes_first(recipe):
    comment = (
        "# yaml-language-server: $schema=x.json\n# A recipe of mine.\n#   Source  a paper\n#\n#   proxima train it\n"
    )
    resolved = resolve(recipe(comment + BASE + "# not this\n"))
    assert header_of(resolved.recipe) == "A recipe of mine.\n  Source  a paper\n\n  proxima train it"
    text = text_of(resolved)
    places = [text.index(word) for word in ("Source", "train    cppo: ", "batch  ", "algorithm.surrogate.kind")]
    assert text.startswith("A recipe of mine.\n") and places == sorted(places)
    assert header_of(resolve(recipe(BASE)).recipe) == ""
    tree = {"model": {"path": "a/b"}, "task": "arithmetic", "reward": "number", "algorithm": "grpo"}
    assert header_of(resolve(tree).recipe) == ""


@pytest.mark.parametrize(
    ("engine", "environment", "says"),
    [
        ("local", "{kind: agent, run: 'm:f'}", "is refused by name: the engine has no grammars"),
        ("vllm", "{kind: agent, run: 'm:f'}", "is kept by the engine's grammar; the tokens of such an answer are not"),
        ("sglang", "{kind: agent, run: 'm:f'}", "is kept by the engine's grammar"),
        ("vllm", "null", ""),
    ],
)
def test_what_becomes_of_a_form_that_agents_ask_for_is_said_before_a_server_is_up(recipe, engine, environment, says):
    words = [f"engine={engine}", f"task={{kind: arithmetic, environment: {environment}}}"]
    text = " ".join(text_of(resolve(recipe(BASE), words)).split())
    assert says in text and ("agents a form that they ask for" in text) == bool(says)


@pytest.mark.parametrize("name", shipped_recipes())
def test_the_comment_of_each_recipe_fits_a_hundred_columns(name):
    assert [line for line in laid_out(header_of(name), 100).splitlines() if len(line) > 100] == []


def test_values_that_differ_from_the_defaults_come_first(recipe, tiny_model):
    words = [f"model.path={tiny_model('llama')}", "train.epochs_per_step=1", "train.steps=7", "sampling.top_k=3"]
    resolved = resolve(recipe(BASE + "seed: 1\ndata: {shuffle: true}\nengine: local\n"), words)
    text = text_of(resolved)
    shown = {line.split()[0]: line.split("  ")[-1].strip() for line in text.splitlines() if "." in line.split(" ")[0]}
    assert shown["sampling.top_k"] == "command line" and shown["train.steps"].startswith("command line")
    assert shown["train.epochs_per_step"] == "command line"  # a default, but somebody typed it
    # defaults, whether the file says them or not
    assert not {"seed", "data.shuffle", "engine.kind", "model.dtype", "algorithm.surrogate.delta"} & set(shown)
    listed = [e for e in resolved.entries if e.path in shown]
    assert f"{len(resolved.entries) - len(listed)} more values have their defaults" in text.splitlines()[-1]
    assert max(map(len, text.splitlines())) <= 100
    everything = text_of(resolved, everything=True)
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


def test_null_is_refused_or_has_a_meaning_in_every_field(recipe):
    paths = {entry.path for entry in resolve(recipe()).entries}
    sections = {path.rpartition(".")[0] for path in paths} - {""}
    read = 0
    for path in sorted(paths | sections):
        with suppress(ConfigError):
            resolved = resolve(recipe(), [f"{path}=null"])
            check(resolved)
            assert text_of(resolved)
            read += 1
    assert 10 < read < len(paths)


@pytest.mark.slow
def test_each_source_of_a_mix_has_a_line_of_how_it_is_played_and_scored():
    numbers = {"kind": "arithmetic", "size": 4}
    tools = ["proxima.environment.builtin:calculate", "proxima.environment.builtin:python"]
    sources = [
        {"name": "sums", "task": numbers, "sampling": {"max_tokens": 5}},
        {"name": "tools", "task": numbers | {"tools": tools}, "episode": {"turns": 4}},
        {
            "name": "game",
            "task": {"kind": "seeds", "count": 4, "environment": {"kind": "guess", "low": 1, "high": 3}},
            "reward": [{"kind": "environment"}, {"kind": "format", "pattern": "x", "weight": 0.5}],
            "sampling": {"temperature": 0.7},
        },
        {"name": "named", "task": numbers | {"environment": "guess"}, "reward": [{"kind": "environment"}]},
    ]
    tree = {"model": {"path": "org/model"}, "task": {"kind": "mix", "tasks": sources}, "reward": [{"kind": "number"}]}
    words = ["algorithm.preset=grpo", "sampling.max_tokens=9", "episode.turns=3"]
    lines = source_lines(resolve(tree, words).config)
    assert lines == [
        "source   sums: answered once, 5 tokens each at temperature 1, rewarded by number",
        f"source   tools: played in {', '.join(tools)}, 4 turns at most, 9 tokens each at temperature 1, "
        "rewarded by number",
        "source   game: played in guess, 3 turns at most, 9 tokens each at temperature 0.7, "
        "rewarded by environment + format",
        "source   named: played in guess, 3 turns at most, 9 tokens each at temperature 1, rewarded by environment",
    ]
    assert source_lines(resolve(tree | {"task": numbers}, words).config) == []
