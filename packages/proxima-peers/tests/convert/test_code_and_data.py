"""Options that name code or data and have no field: the recipe does not run until the user has filled them in. Those
that are carried over are in options.yaml."""

import json
from pathlib import Path

import pytest
import yaml

from proxima.cli.main import main
from proxima_peers.convert.conversion import convert
from proxima_peers.convert.known import option_rules

FUNCTION = {"custom_reward_function.path": "./x.py"}

TABLE = yaml.load(Path(__file__).with_name("code_and_data.yaml").read_text(), yaml.CSafeLoader)
BASE, TO_FILL_IN = TABLE["base"], TABLE["to fill in"]


def waiting(text):
    return [line for line in text.splitlines() if "  # TO FILL IN" in line or ": 'TO FILL IN" in line]


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """What waits without further options, for each peer."""
    file = tmp_path_factory.mktemp("plain") / "options.json"
    texts = {}
    for peer, options in BASE.items():
        file.write_text(json.dumps(options))
        texts[peer] = set(waiting(convert(file, peer).text))
    return texts


@pytest.mark.parametrize(
    ("peer", "options"), [(peer, entry) for peer, several in TO_FILL_IN.items() for entry in several]
)
def test_code_and_data_without_a_field_are_to_fill_in(converted, before, peer, options):
    done = converted(peer, BASE[peer] | options)
    added = set(waiting(done.text)) - before[peer]
    assert added and not {entry.name for entry in done.ignored} & set(options)
    name = next(name for name in options if options[name] is not None)
    top = done.text.partition("\n\n")[0]
    functions = options.get("reward_funcs", [])
    assert any(name.partition(".*")[0] in line for line in (*added, top)) or str(functions[0]) in "".join(added)


@pytest.mark.parametrize("peer", BASE)
def test_a_rule_that_waits_has_options_that_are_tried_above(peer):
    """Every option that a table lets wait for a field has a case, by its section."""
    tried = {name.rpartition(".")[0] for options in TO_FILL_IN[peer] for name in options}
    waits = {name for name, rule in option_rules(peer).items() if rule.field}
    assert waits and len({name.rpartition(".")[0] for name in waits} & tried) >= (1 if peer == "trl" else 3)


def test_a_recipe_with_a_value_to_fill_in_is_refused(converted, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("def compute_score(solution_str, ground_truth): return 0.0")
    done = converted("verl", BASE["verl"] | FUNCTION | {"data.custom_cls.path": "./rows.py"})
    (tmp_path / "r.yaml").write_text(done.text)
    assert main(["train", str(tmp_path / "r.yaml")]) == 2
    assert "task.kind=parquet" in (output := capsys.readouterr().err) and "have to fill in" in output


def test_converting_runs_no_function_of_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("raise SystemExit(7)")
    (tmp_path / "run.yaml").write_text(
        "algorithm: {adv_estimator: grpo}\ncustom_reward_function: {path: ./x.py, name: f}\n"
    )
    assert convert(tmp_path / "run.yaml", "verl").recipe["reward"] == [{"kind": "function", "path": "./x.py:f"}]


def test_an_answer_is_written_where_a_reward_compares_with_it(converted):
    alone = converted("trl", BASE["trl"] | {"reward_funcs": ["think_format_reward"]})
    assert "answer" not in alone.recipe["task"] and not waiting(alone.text.partition("reward:")[0])
    both = converted("trl", BASE["trl"] | {"reward_funcs": ["accuracy_reward", "think_format_reward"]})
    assert both.recipe["task"]["answer"] == "solution"


def test_publishing_is_named_as_what_it_is(converted):
    done = converted("trl", BASE["trl"] | {"push_to_hub": True, "hub_model_id": "me/m"})
    why = {entry.name: entry.why for entry in done.ignored}
    assert why["push_to_hub"] == why["hub_model_id"] and "hf upload" in why["push_to_hub"]


SCRIPT = "python3 -m openrlhf.cli.train_ppo_ray --pretrain org/m --remote_rm_url ./reward.py --num_generations 8\n"
OLDER = "deepspeed ../train_dpo.py --pretrain org/m --micro_train_batch_size 4 --zero_stage 3 --beta 0.1\n"


@pytest.mark.parametrize("peer", [None, "openrlhf", "trl", "verl"])
@pytest.mark.parametrize("text", [SCRIPT, OLDER])
def test_openrlhf_is_refused_with_the_page_that_helps(tmp_path, capsys, peer, text):
    (tmp_path / "run.sh").write_text(text)
    assert main(["peers", "convert", str(tmp_path / "run.sh"), *(["--from", peer] if peer else [])]) == 2
    out, err = capsys.readouterr()
    assert (
        out == "" and err.count("\n") == 1 and "OpenRLHF" in err and "packages/proxima-peers/docs/migration.md" in err
    )


def test_a_data_set_of_openrlhfs_authors_is_no_script_of_theirs(converted):
    assert converted("trl", BASE["trl"] | {"dataset_name": "OpenRLHF/math"}).recipe["task"]["path"] == "OpenRLHF/math"


@pytest.mark.parametrize(
    ("made", "waits"),
    [
        ('AutoTokenizer.from_pretrained("org/m")', False),
        ('AutoTokenizer.from_pretrained("org/other")', True),
        ("make_tokenizer()", True),
    ],
)
def test_the_tokenizer_of_a_python_file(tmp_path, made, waits):
    lines = ("args = GRPOConfig(num_generations=8)", f"tok = {made}")
    trainer = 'GRPOTrainer(model="org/m", args=args, processing_class=tok, reward_funcs=accuracy_reward)'
    (tmp_path / "train.py").write_text("\n".join((*lines, trainer)))
    missing = {entry.name for entry in convert(tmp_path / "train.py", "trl").missing}
    assert ("processing_class" in missing) is waits
