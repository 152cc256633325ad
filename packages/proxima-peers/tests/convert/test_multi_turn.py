"""Tools, environments and turns of the peers."""

import pytest

from proxima.config import resolve

from .conftest import why

R = "actor_rollout_ref.rollout."
MULTI, LOOP = f"{R}multi_turn.", f"{R}agent.default_agent_loop"
VERL = {"algorithm.adv_estimator": "grpo", "data.max_response_length": 900, f"{MULTI}enable": True}
TRL = {"num_generations": 8, "max_completion_length": 900, "tools": ["my_lab:search"]}
AREAL = {"actor.reward_norm.mean_level": "group", "train_dataset.path": "rows.jsonl"}
UNIRL = {"algorithm._target_": "x.CPPO", "data_source.args.run.data_path": "rows.jsonl"}


def written(done):
    """The recipe's text, its comments unwrapped."""
    return " ".join(line.strip().removeprefix("# ") for line in done.text.splitlines())


def test_verls_calculator(example):
    done, resolved = example("verl_tools.yaml", "verl")
    assert done.problems == () and done.unknown == []
    episode, sampling = resolved.config.episode, resolved.config.sampling
    assert (episode.turns, episode.tokens, sampling.max_tokens) == (5, 4096, 4096)  # 4 answers, and the message after
    assert (episode.tool_format, resolved.config.model.max_length) == ("hermes", 5120)
    assert set(why(done.missing)) == {MULTI + "tool_config_path"}
    assert "  environment: null  # TO FILL IN: " in done.text
    assert done.text.count("environment: null  # TO FILL IN") == 2  # held-out questions are played, too
    messages = why(done.unsupported)
    assert messages[MULTI + "max_parallel_calls"].startswith("2: ")
    assert messages[MULTI + "max_tool_response_length"].startswith("512 characters of an answer, cut at its left; ")
    assert "verl's length has the answers of tools in it" in written(done)
    ignored = why(done.ignored)
    assert {MULTI + "tokenization_sanity_check_mode", "data.return_raw_chat", R + "agent.num_workers"} <= set(ignored)


def test_trls_environment_and_tools(example):
    done, resolved = example("trl_tools.py", "trl")
    assert done.problems == () and done.unsupported == [] and done.unknown == []
    task, episode = resolved.config.task, resolved.config.episode
    assert task.environment == "my_lab.vault:Vault"
    assert task.tools == ("my_lab.tools:search", "my_lab.more:dial", "my_lab.clocks:now", "MODULE:double")
    assert resolved.config.eval.task.tools == task.tools
    assert (episode.turns, episode.tokens, resolved.config.sampling.max_tokens) == (5, 2048, 2048)
    assert done.recipe["reward"] == [{"kind": "environment"}]
    assert why(done.missing)["tools"].startswith("double: put it into a separate file")


@pytest.mark.parametrize(
    ("options", "turns"),
    [
        ({"max_assistant_turns": 3}, 3),
        ({"max_user_turns": 3}, 4),  # the message after the third answer
        ({"max_assistant_turns": 3, "max_user_turns": 3}, 3),
        ({"max_assistant_turns": 5, "max_user_turns": 3}, 4),
        ({"max_assistant_turns": 0, "max_user_turns": None}, 900),  # no limit but the tokens
        ({"max_assistant_turns": "many"}, 900),
    ],
)
def test_verls_turns(converted, options, turns):
    done = converted("verl", VERL | {MULTI + name: value for name, value in options.items()})
    assert done.recipe["episode"]["turns"] == turns
    doubted = any("many" in reason for reason in why(done.missing).values())
    assert doubted is ("many" in options.values())


@pytest.mark.parametrize(("rounds", "turns"), [(0, 1), (1, 2), (7, 8), (None, 900), (-1, 900), ("many", 900)])
def test_trls_rounds_of_calls_have_one_more_message(converted, rounds, turns):
    done = converted("trl", TRL | {"max_tool_calling_iterations": rounds})
    assert resolve(done.recipe).config.episode.turns == turns
    assert ("TO FILL IN: max_tool_calling_iterations" in done.text) is (rounds in (-1, "many"))


@pytest.mark.parametrize(
    ("written", "ours"), [("hermes", "hermes"), (None, "hermes"), ("qwen3_coder", "xml"), ("llama3_json", "llama")]
)
def test_verls_formats(converted, written, ours):
    assert converted("verl", VERL | {MULTI + "format": written}).recipe["episode"]["tool_format"] == ours


def test_a_format_that_nothing_here_reads_is_told(converted):
    done = converted("verl", VERL | {MULTI + "format": "gpt-oss"})
    assert "tool_format" not in done.recipe["episode"] and MULTI + "format" in why(done.unsupported)


def test_the_defaults_of_verls_tools_are_told(converted):
    done = converted("verl", VERL)
    messages = why(done.unsupported)
    assert messages[MULTI + "max_parallel_calls"].startswith("1: ")
    assert "256 characters of an answer, cut at its middle" in messages[MULTI + "max_tool_response_length"]
    assert MULTI + "enable" in why(done.missing)  # which tools, the file does not say
    scored = converted("verl", VERL | {"custom_reward_function.path": "./x.py"})
    assert "solution_str has all turns and answers; here it is the model's last message." in written(scored)


@pytest.mark.parametrize(
    ("peer", "options", "field"),
    [
        ("verl", {MULTI + "function_tool_path": "tools.py"}, "task.tools"),
        ("verl", {MULTI + "tool_config_path": "tools.yaml"}, "task.environment"),
        ("verl", {MULTI + "interaction_config_path": "talk.yaml"}, "task.environment"),
        ("verl", {LOOP: "my_loop"}, "task.environment"),
        ("verl", {R + "agent.agent_loop_config_path": "loops.yaml"}, "task.environment"),
        ("trl", {"tools": None, "rollout_func": "roll"}, "task.environment"),
        ("trl", {"environment_factory": "partial(Vault, 3)"}, "task.environment"),
        ("areal", {"workflow": "my_lab.Workflow"}, "task.environment"),
        ("areal", {"max_turns": 4}, "task.environment"),
        ("unirl", {"rollout.config.max_turns": 4}, "task.environment"),
    ],
)
def test_code_of_episodes_is_to_fill_in_where_it_belongs(converted, peer, options, field):
    done = converted(peer, {"verl": VERL, "trl": TRL, "areal": AREAL, "unirl": UNIRL}[peer] | options)
    name = next(name for name, value in options.items() if value is not None)
    assert why(done.missing)[name].endswith(f"(at {field})")


def test_turns_of_a_workflow_are_kept(converted):
    assert converted("areal", AREAL | {"max_turns": 4}).recipe["episode"] == {"turns": 4}
    assert converted("unirl", UNIRL | {"rollout.config.max_turns": 4}).recipe["episode"] == {"turns": 4}
    assert "episode" not in converted("areal", AREAL | {"max_turns": 1}).recipe
    discount = why(converted("areal", AREAL | {"turn_discount": 0.9}).unsupported)["turn_discount"]
    assert "turn_returns" in discount


def test_without_tools_there_is_no_episode(converted):
    verl = converted("verl", VERL | {MULTI + "enable": False, MULTI + "max_user_turns": 3})
    assert "episode" not in verl.recipe and {MULTI + "enable", MULTI + "max_user_turns"} <= set(why(verl.ignored))
    trl = converted("trl", TRL | {"tools": None, "max_tool_calling_iterations": 3})
    assert "episode" not in trl.recipe and "max_tool_calling_iterations" in why(trl.ignored)


def test_an_environments_own_reward_beside_functions_is_to_fill_in(converted):
    options = TRL | {"environment_factory": "my_lab:Vault", "reward_funcs": ["accuracy_reward"]}
    done = converted("trl", options)
    assert done.recipe["task"]["environment"] == "my_lab:Vault"
    assert "get_reward" in why(done.missing)["environment_factory"] and len(done.recipe["reward"]) == 1
