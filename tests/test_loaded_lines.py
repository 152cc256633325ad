"""A quickstart loads what it runs."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MOST_CODE_LINES = 18_500
# What a quickstart does not use. A module stands for those below it.
UNUSED = (
    *("check", "prepare", "lab.simulate", "lab.sweep_file", "runtime.launch.eval_run", "api.evaluation", "api.saved"),
    *("model.routing", "data.routed_experts", "config.mixtures", "config.laid_over", "runtime.state.route_columns"),
    *(
        "train.objectives.router_balance",
        "train.replay_comparison",
        "cli.score",
        "cli.check",
        "cli.list",
        "cli.explain",
        "cli.data",
        "cli.engine",
        "cli.eval",
        "cli.generate",
    ),
    *("engine.http", "engine.serve", "engine.local_process", "engine.supervisor", "engine.shared_weights"),
    *("config.estimate", "config.explanation", "config.memory_size", "config.json_schema"),
    *("config.sections.sft_section", "config.sections.preference_section", "config.sections.reward_model_section"),
    *("train.offline", "runtime.launch.offline_workload", "runtime.loop.offline_loop"),
    *("train.objectives.kto_objective", "train.objectives.reward_objective", "train.objectives.sft_objective"),
    *("core.distillation", "core.preference.divergence_pair", "core.preference.kto", "core.surrogate.whole_batch"),
    *("core.surrogate.weight", "core.surrogate.clip", "core.correction.rejection"),
    *("reward.function", "reward.http", "reward.model_reward", "reward.math.symbolic", "reward.unit_tests"),
    *("reward.reasoning_gym", "reward.workers.pool", "reward.server", "task.gsm8k", "task.mix", "task.hub"),
    *(
        "config.sections.critic_section",
        "config.sections.ranks_section",
        "config.sections.rollouts_section",
        "config.other_names",
        "api.training",
    ),
    *(
        "core.advantage.group_variants",
        "core.advantage.token",
        "core.selection.partial_selection",
        "core.penalty",
        "core.value",
    ),
    *("core.preference", "train.objectives.preference_objective", "train.next_policy", "train.teacher_stage"),
    *("train.critic", "train.run_stage"),
    *("model.adapter_files", "model.lora_layers", "model.scalar_model", "model.demo_model", "engine.general_decoder"),
    *("runtime.launch.teacher", "runtime.launch.critic_weights", "runtime.state.export", "runtime.state.replay"),
    *("runtime.state.pending_files", "runtime.state.rewind", "reward.workers.graders", "cli.completion"),
    *("lab.run_search", "lab.seed_statistics", "api.python_values", "api.resumed_settings"),
    *("evaluate.group_metrics", "evaluate.votes", "evaluate.estimators", "rollout.episodes.figures", "view.terminal"),
    *("task.column_mapping", "model.chat_answer", "model.distribution_figures", "engine.truncation"),
    *("engine.mask_table", "core.proximal", "core.surrogate.dppo", "train.early_stop", "train.checkpoint_restore"),
    *("runtime.placement.on_ray", "runtime.state.stored_completions", "runtime.watch.standstill"),
    *("task.prepared", "rollout.async_collector", "view.live", "view.comparison_page", "view.trackers.wandb"),
    *("view.trackers.tracker_observer", "view.surrogate_plot", "evaluate.suites", "evaluate.question_pairs"),
)


@pytest.fixture(scope="module")
def loaded(tiny_model, tmp_path_factory):
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import loaded_lines
    finally:
        sys.path.pop(0)
    return loaded_lines.loaded_by_quickstart(tiny_model("llama"), tmp_path_factory.mktemp("loaded"))


def test_nothing_that_it_does_not_use(loaded):
    unused = tuple(f"proxima.{name}." for name in UNUSED)
    assert {name: module.importer for name, module in loaded.items() if f"{name}.".startswith(unused)} == {}


def test_few_lines(loaded):
    assert {"proxima.runtime.loop.controller", "proxima.core.surrogate.cppo", "proxima.task.arithmetic"} <= set(loaded)
    assert sum(module.code for module in loaded.values()) <= MOST_CODE_LINES


def test_what_is_unused_exists():
    """A renamed module would pass the test above for nothing."""
    places = [ROOT / "src" / "proxima" / name.replace(".", "/") for name in UNUSED]
    assert [place for place in places if not place.is_dir() and not place.with_suffix(".py").is_file()] == []
