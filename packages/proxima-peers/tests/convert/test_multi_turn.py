"""Tools, environments and turns of the peers."""

from .conftest import why

R = "actor_rollout_ref.rollout."
MULTI = f"{R}multi_turn."


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
