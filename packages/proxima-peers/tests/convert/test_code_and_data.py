"""Options that name code or data are carried over, or the recipe does not run until the user has filled them in."""

import pytest

from proxima.cli.main import main
from proxima.config import ConfigError
from proxima_peers.convert.conversion import convert
from proxima_peers.convert.known import option_rules

A, R, M = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
BASE = {
    "verl": {"algorithm.adv_estimator": "grpo", M + "path": "org/m", "data.train_files": "rows.parquet"},
    "trl": {"num_generations": 8, "model_name_or_path": "org/m", "dataset_name": "org/rows"},
    "areal": {"actor.eps_clip": 0.2, "actor.path": "org/m", "train_dataset.path": "rows.jsonl"},
    "unirl": {"algorithm._target_": "unirl.CPPO", "data_source.args.run.data_path": "rows.jsonl"},
}
FUNCTION = {"custom_reward_function.path": "./x.py"}
TO_FILL_IN = {
    "verl": [
        {"reward_model.reward_manager": "prime"},
        {"reward_model.reward_manager": "batch"} | FUNCTION,
        {"reward.reward_manager.name": "mine", "reward.reward_manager.module.path": "./m.py"},
        {"reward_model.reward_loop_module_path": "./m.py", "reward_model.reward_loop_class_name": "Mine"},
        {"data.reward_fn_key": "source"},
        {"data.reward_fn_key": "source"} | FUNCTION,
        {"custom_reward_function.reward_kwargs.scale": 2} | FUNCTION,
        {"custom_reward_function.path": "score"},
        {"reward.custom_reward_function.path": "${oc.env:REWARD}/x.py"},
        {"reward_model.enable": True, "reward_model.model.path": "org/rm"},
        {"reward.reward_model.enable": True, "reward.reward_model.model_path": "org/rm"},
        {"reward_model.sandbox_fusion.url": "http://x"},
        {"reward.sandbox_fusion.url": "http://x"},
        {"data.custom_cls.path": "./rows.py", "data.custom_cls.name": "Mine"},
        {"data.sampler.class_path": "./s.py", "data.sampler.class_name": "Mine"},
        {"data.datagen.path": "./g.py"},
        {"data.tokenizer": "org/t"},
        {"data.val_files": "${data.folder}/val.parquet"},
        {"data.tool_config_path": "tools.yaml"},
        {M + "tokenizer_path": "org/t"},
        {M + "custom_chat_template": "{{ x }}"},
        {M + "external_lib": "my_models"},
        {M + "hf_config_path": "org/config"},
        {M + "lora.adapter_path": "./adapter"},
        {"actor_rollout_ref.ref.model.path": "org/other"},
        {R + "multi_turn.enable": True, R + "multi_turn.tool_config_path": "tools.yaml"},
        {R + "multi_turn.enable": True, R + "multi_turn.interaction_config_path": "i.yaml"},
        {R + "multi_turn.enable": True, R + "multi_turn.completion_callback": "my.Callback"},
        {R + "agent.agent_loop_config_path": "agents.yaml"},
        {R + "agent.default_agent_loop": "tool_agent"},
        {R + "agent.custom_async_server.path": "./server.py"},
        {R + "custom.env": "x"},
        {R + "engine_kwargs.vllm.logits_processors": ["my.Processor"]},
        {A + "fsdp_config.load_checkpoint_path": "/weights"},
        {"trainer.resume_from_path": "/checkpoints/5"},
        {"trainer.checkpoint_callback_class": "my.Callback"},
        {"trainer.v1.sampler.custom_sampler.path": "./s.py"},
        {"distillation.enabled": True},
        {A + "_target_": "my_lab.Config"},
        {"my_lab.reward_file": "score.py"},
    ],
    "trl": [
        {"reward_funcs": ["near"]},
        {"reward_funcs": ["__main__.near"]},
        {"reward_funcs": ["make(3)"]},
        {"reward_processing_classes": "org/t"},
        {"train_dataset": "rows.map(f)"},
        {"eval_dataset": "x"},
        {"eval_strategy": "steps", "dataset_name": None},
        {"datasets": [{"path": "a"}, {"path": "b"}]},
        {"dataset_mixture.datasets": ["a"]},
        {"dataset_configs": ["x"]},
        {"processing_class": "make_tokenizer()"},
        {"tokenizer_name_or_path": "org/t"},
        {"chat_template": "{{ x }}"},
        {"chat_template_path": "t.jinja"},
        {"tools": "[search]"},
        {"environment_factory": "Env"},
        {"rollout_func": "roll"},
        {"callbacks": "[Stop()]"},
        {"compute_metrics": "f"},
        {"data_collator": "f"},
        {"optimizers": "(opt, None)"},
        {"resume_from_checkpoint": "/checkpoints/5"},
        {"peft_config": "make()"},
        {"deepspeed": "ds.json"},
        {"my_file": "rows.jsonl"},
    ],
    "areal": [
        {"reward_fn": "my_lab.score"},
        {"train_dataset.reward_fn": "my_lab.score"},
        {"train_dataset.sources": ["a", "b"]},
        {"train_dataset.dataset_kwargs.x": 1},
        {"valid_dataset.path": "v.jsonl", "valid_dataset.dataset_kwargs": "x"},
        {"scheduler.reward_functioncall_config.x": 1},
        {"scheduler.reward_model_path": "org/rm"},
        {"scheduler.functioncall_service_domain": "http://x"},
        {"workflow": "my_lab.Workflow"},
        {"eval_workflow": "my_lab.Workflow"},
        {"agent_run_args.tools": "x"},
        {"rollout.agent.agent_path": "my_lab.Agent"},
        {"rollout.should_accept_fn": "my_lab.keep"},
        {"dynamic_filter_fn": "my_lab.keep"},
        {"tokenizer_path": "org/t"},
        {"rollout.tokenizer_path": "org/t"},
        {"ref.path": "org/other"},
        {"vllm.model": "org/other"},
        {"teacher.path": "org/teacher"},
        {"critic.path": "org/critic"},
        {"sglang.speculative_algorithm": "EAGLE", "sglang.speculative_draft_model_path": "org/draft"},
        {"train_dataset.path": "${oc.env:DATA}"},
        {"valid_dataset.path": "${oc.env:DATA}"},
    ],
    "unirl": [
        {"reward.backend._target_": "unirl.reward.local.llm_judge.LLMJudgeRewardScorer"},
        {"reward.backend.config.endpoint": "http://x"},
        {"reward._target_": "my_lab.Service"},
        {"data_source._target_": "my_lab.Source"},
        {"data_source.args.run.data_path": "${oc.env:DATA}"},
        {"eval_interval": 5, "data_source.args.run.eval_data_path": "${oc.env:DATA}"},
        {"eval_interval": 5},
        {"data_source.args.run.image_root": "/images"},
        {"rollout._target_": "my_lab.Engine"},
        {"rollout.config.env._target_": "unirl.rollout.env.alfworld.AlfworldEnv"},
        {"rollout.config.env.tools": ["x"]},
        {"bundle._target_": "my_lab.Bundle"},
        {"algorithm.conditions_cls.path": "my_lab.Conditions"},
    ],
}
CARRIED = [  # peer, options, place in the recipe, value
    ("verl", FUNCTION, "reward.0.path", "./x.py:compute_score"),
    ("verl", FUNCTION | {"custom_reward_function.name": "f"}, "reward.0.path", "./x.py:f"),
    ("verl", {"reward.custom_reward_function.path": "a/x.py", "reward.custom_reward_function.name": "f"},
     "reward.0.path", "a/x.py:f"),
    ("verl", {"reward.custom_reward_function.path": "pkg://my_lab.rewards"}, "reward.0.path",
     "my_lab.rewards:compute_score"),
    ("verl", FUNCTION | {"reward_model.reward_manager": "dapo"}, "reward.0.kind", "function"),
    ("verl", FUNCTION | {"data.train_files": "~/data/gsm8k/train.parquet"}, "task.kind", "parquet"),
    ("verl", {"data.train_files": "my_gsm8k_hard.parquet"}, "task.path", "my_gsm8k_hard.parquet"),
    ("verl", {"data.val_files": ["a.parquet", "b.parquet"]}, "eval.task.path", ["a.parquet", "b.parquet"]),
    ("verl", {M + "lora_rank": 8, M + "lora_adapter_path": "./adapter"}, "model.lora.path", "./adapter"),
    ("trl", {"reward_funcs": ["my_lab.rewards.near"]}, "reward.0.path", "my_lab.rewards:near"),
    ("trl", {"reward_funcs": ["org/rm"]}, "reward.0.path", "org/rm"),
    ("trl", {"reward_model_name_or_path": "org/rm"}, "reward.0.kind", "model"),
    ("trl", {"dataset_config": "main", "dataset_train_split": "train[:9]"}, "task.subset", "main"),
    ("trl", {"dataset_train_split": "part"}, "task.split", "part"),
    ("trl", {"eval_strategy": "steps", "dataset_test_split": "held"}, "eval.task.split", "held"),
    ("areal", {"train_dataset.path": "org/rows", "train_dataset.split": "part"}, "task.split", "part"),
    ("areal", {"valid_dataset.path": "v.jsonl"}, "eval.task.path", "v.jsonl"),
    ("unirl", {"reward.backend._target_": "unirl.reward.MathVerifyRewardScorer"}, "reward.0.kind", "math"),
    ("unirl", {"eval_interval": 5, "data_source.args.run.eval_data_path": "v.jsonl"}, "eval.task.path", "v.jsonl"),
]  # fmt: skip


def waiting(text):
    return [line for line in text.splitlines() if "  # TO FILL IN" in line]


@pytest.mark.parametrize(
    ("peer", "options"), [(peer, entry) for peer, several in TO_FILL_IN.items() for entry in several]
)
def test_code_and_data_without_a_field_are_to_fill_in(converted, peer, options):
    done = converted(peer, BASE[peer] | options)
    before = converted(peer, BASE[peer])
    added = set(waiting(done.text)) - set(waiting(before.text))
    assert added and not {entry.name for entry in done.ignored} & set(options)
    name = next(name for name in options if options[name] is not None)
    top = done.text.partition("\n\n")[0]
    functions = options.get("reward_funcs", [])
    assert any(name.partition(".*")[0] in line for line in (*added, top)) or str(functions[0]) in "".join(added)


@pytest.mark.parametrize(("peer", "options", "path", "value"), CARRIED)
def test_code_and_data_that_have_a_field_are_carried_over(converted, peer, options, path, value):
    done = converted(peer, BASE[peer] | options)
    here = done.recipe
    for part in path.split("."):
        here = here[int(part) if part.isdigit() else part]
    assert here == value
    assert not [line for line in waiting(done.text) if f"{path.rpartition('.')[2]}: {value}" in line]


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
    assert why["push_to_hub"] == why["hub_model_id"] and "--to-hub" in why["push_to_hub"]


SCRIPT = "python3 -m openrlhf.cli.train_ppo_ray --pretrain org/m --remote_rm_url ./reward.py --num_generations 8\n"
OLDER = "deepspeed ../train_dpo.py --pretrain org/m --micro_train_batch_size 4 --zero_stage 3 --beta 0.1\n"


@pytest.mark.parametrize("peer", [None, "openrlhf", "trl", "verl"])
@pytest.mark.parametrize("text", [SCRIPT, OLDER])
def test_openrlhf_is_refused_with_the_page_that_helps(tmp_path, capsys, peer, text):
    (tmp_path / "run.sh").write_text(text)
    assert main(["convert", str(tmp_path / "run.sh"), *(["--from", peer] if peer else [])]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "OpenRLHF" in err and "docs/migration.md" in err


def test_a_data_set_of_openrlhfs_authors_is_no_script_of_theirs(converted):
    assert converted("trl", BASE["trl"] | {"dataset_name": "OpenRLHF/math"}).recipe["task"]["path"] == "OpenRLHF/math"


@pytest.mark.parametrize(
    ("made", "waits"),
    [
        ('AutoTokenizer.from_pretrained("org/m")', False),
        ('AutoTokenizer.from_pretrained("org/m", padding_side="left")', False),
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


def test_a_file_that_cannot_be_read_is_a_line(tmp_path):
    with pytest.raises(ConfigError):
        convert(tmp_path / "nothing.yaml", "verl")
