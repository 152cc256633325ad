"""Dynamic sampling and allocation in the loop: exact counts, surplus with its age, the clear end, and resumes equal to
an unbroken run."""

import json
import re

import pytest

from proxima.data.flow import Score
from proxima.rollout.prompt_limits import running_acceptance
from proxima.runtime.loop.training_loop import RunEnded
from proxima.runtime.state.pending_files import read_groups
from proxima.runtime.state.rollouts import read_rows
from proxima.training.checkpoint import CARRIED_GROUPS, checkpoints
from proxima.view.report import write_report
from tests.runtime.loop.test_controller import World
from tests.runtime.prompt_rows import consumed_prompts
from tests.runtime.tiny_run import NO_EVAL, assert_same, go, recipe, saved_in, traces

BY = "[{{kind: drop_uniform_groups, metric: {}}}]"
COUNTS = ("prompts_generated", "prompts_used", "prompts_dropped_uniform", "prompts_carried", "gen_batches")


def each(score):
    """Rewards that score completions one by one."""

    async def scores(prompt, completions):
        return [score(prompt, completion) for completion in completions]

    return scores


def refilled(path, *words, every, selection="[drop_uniform_groups]", **settings):
    """A world whose rewards differ within the groups of every `every`-th prompt only; 0: of none."""
    dynamic = f"algorithm.dynamic_sampling={json.dumps(settings)}"
    world = World(path, "train.steps=3", f"algorithm.selection={selection}", dynamic, *words)

    def score(prompt, completion):
        right = bool(every and prompt.uid % every == 0 and completion.sample % 2)
        return Score(value=float(right), correct=right)

    world.rewards.score = each(score)
    return world


def acceptance(world):
    return running_acceptance(world.controller.journal.history())


def counts(world):
    return [tuple(record[name] for name in COUNTS) for record in world.records()]


@pytest.mark.slow
def test_nine_of_ten_groups_are_uniform(tmp_path):
    """3 groups a step, running acceptance (used + 1) / (generated + 1): 3, 4, 8, 6 prompts; then 12 (at most 4
    batches), 12, 8."""
    world = refilled(tmp_path / "run", every=10)
    world.run()
    assert counts(world)[:2] == [(21, 3, 18, 0, 4), (32, 3, 29, 0, 3)]
    first = world.records()[0]  # its mean reward is of all that was generated
    assert first["reward/mean"] == pytest.approx(3 * 0.5 / 21) and first["completions"] == 84 and first["prompts"] == 21
    carried = 0
    for record in world.records():
        assert record["prompts_used"] == 3 and record["age/max"] == 0
        ends = record["prompts_used"] + record["prompts_dropped_uniform"] + record["prompts_carried"]
        assert carried + record["prompts_generated"] == ends
        assert record["dropped/uniform_group"] == 4 * record["prompts_dropped_uniform"]
        carried = record["prompts_carried"]
    for step in (1, 2):
        rows = read_rows(world.folder.rollout_file(step))
        trained = {r["prompt_uid"] for r in rows if r["outcome"] == "trained"}
        assert trained == {30 * step - 30, 30 * step - 20, 30 * step - 10}
        assert {r["outcome"] for r in rows if r["prompt_uid"] % 10} == {"dropped_uniform_group"}
        dropped = sum(len(r["tokens"]) for r in rows if r["prompt_uid"] % 10)
        assert world.records()[step - 1]["tokens/dropped"] == dropped
    reasons = [(e.uid % 10 == 0, e.reason) for e in consumed_prompts(world.journal, 1)]
    assert set(reasons) == {(True, None), (False, "uniform_group")}


@pytest.mark.slow
def test_surplus_is_used_in_the_next_step_with_its_age(tmp_path):
    world = refilled(tmp_path / "run", every=1, oversample=2)
    world.run()
    assert counts(world) == [(6, 3, 0, 3, 1), (0, 3, 0, 0, 0), (6, 3, 0, 3, 1)]
    assert [r["age/mean"] for r in world.records()] == [0, 1, 0]
    assert {v for r in read_rows(world.folder.rollout_file(2)) for v in r["policy_version"]} == {0}
    assert [e.uid for e in consumed_prompts(world.journal, 2)] == [3, 4, 5]
    assert world.journal.counts() == {"consumed": 9, "scored": 3}


@pytest.mark.slow
def test_surplus_that_is_too_far_behind_is_dropped_as_stale(tmp_path):
    world = refilled(tmp_path / "run", every=1, oversample=3)
    world.run()
    assert counts(world) == [(9, 3, 0, 6, 1), (0, 3, 0, 3, 0), (9, 3, 0, 6, 1)]
    assert [r.get("prompts_dropped_stale", 0) for r in world.records()] == [0, 0, 3]
    assert [(e.uid, e.reason) for e in consumed_prompts(world.journal, 3)][:3] == [
        (6, "stale"),
        (7, "stale"),
        (8, "stale"),
    ]


@pytest.mark.slow
def test_surplus_may_be_thrown_away(tmp_path):
    world = refilled(tmp_path / "run", "runtime.max_lag=0", every=1, oversample=2)
    world.run()
    assert counts(world) == [(6, 3, 0, 0, 1)] * 3
    assert [r["prompts_dropped_surplus"] for r in world.records()] == [3, 3, 3]
    assert acceptance(world) == 1.0  # thrown away, but it could have been used


def test_nothing_but_uniform_groups_comes_to_a_clear_end(tmp_path):
    world = refilled(tmp_path / "run", every=0, max_num_gen_batches=4)
    with pytest.raises(RunEnded) as end:
        world.run()
    assert str(end.value) == (
        "step 1: 4 generation batches (max_num_gen_batches) gave 0 of 3 usable groups out of 39 generated (39 "
        "uniform_group; mean reward 0); see rollouts/000001.parquet. Start another run with easier or harder questions "
        "or more completions per prompt, or resume this one (--resume) with a higher "
        "algorithm.dynamic_sampling.max_num_gen_batches or algorithm.dynamic_sampling.exhausted=partial"
    )
    assert len(read_rows(world.folder.rollout_file(1))) == 39 * 4
    assert world.journal.step == 0 and not world.records()


@pytest.mark.parametrize("exhausted", ["stop", "partial"])
def test_uniform_groups_of_another_metric_are_reported_with_their_field(exhausted, tmp_path):
    """A graded reward that also judges: every answer is wrong, but one group of three differs in its rewards."""
    world = refilled(
        tmp_path / "run",
        every=0,
        selection=json.dumps([{"kind": "drop_uniform_groups", "metric": "accuracy"}] * 2),
        max_num_gen_batches=1,
        exhausted=exhausted,
    )

    def graded(prompt, completion):
        return Score(value=0.1 * completion.sample * (prompt.uid % 3 == 1), correct=False)

    world.rewards.score = each(graded)
    with pytest.raises(RunEnded) as end:
        world.run()
    helps = (
        "These groups are uniform in accuracy (algorithm.selection.0.metric), but the rewards differ in {}. To train "
        "on those, set algorithm.selection.0.metric=reward in another run, or resume with it and --accept-changes"
    )
    assert str(end.value).endswith(helps.format("1 of 3" if exhausted == "stop" else "4 of 12"))
    assert "easier or harder" not in str(end.value) and "partial" not in str(end.value)
    assert world.journal.step == {"stop": 0, "partial": 3}[exhausted]
    assert [text.endswith(helps.format("1 of 3")) for text in world.observer.warnings if "step 1:" in text] == [
        True for _ in range(exhausted == "partial")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("exhausted", ["stop", "partial"])
def test_a_run_without_an_update_fails_when_resumed_too_and_reports_why(exhausted, tiny_model, tmp_path):
    changes = {
        "train__steps": 1,
        "reward": [{"kind": "tests.runtime.tiny_run:Even", "constant": 1}],  # the same for all
        "algorithm": {
            "preset": "dapo",
            "dynamic_sampling": {"oversample": 1, "max_num_gen_batches": 1, "exhausted": exhausted},
        },
    }
    tree, folder = recipe(tiny_model("llama"), **SETTINGS | changes | NO_EVAL), tmp_path / "run"
    for resume in (False, True):
        with pytest.raises(RunEnded, match="no step of 1 trained anything|gave 0 of 4 usable groups"):
            go(folder, tree, resume=resume)
    assert (
        json.loads((folder / "summary.json").read_text())["status"]
        == {"stop": "failed", "partial": "untrained"}[exhausted]
    )
    words = " ".join(re.sub("<[^>]*>", " ", write_report(folder).read_text()).split())
    assert "completions 16 " in words
    same = "all completions of the group have the same accuracy (algorithm.selection.0.metric)"
    assert f"dropped: uniform_group 16 100.0 % {same}" in words


@pytest.mark.slow
def test_a_partial_batch_is_trained_on_if_so_configured(tmp_path):
    world = refilled(tmp_path / "run", every=10, max_num_gen_batches=2, exhausted="partial")
    world.run()
    assert counts(world)[0] == (7, 1, 6, 0, 2)
    empty = refilled(tmp_path / "empty", every=0, max_num_gen_batches=1, exhausted="partial")
    before = empty.weights()
    with pytest.raises(RunEnded, match=r"no step of 3 trained anything; in the last one, nothing was left to train on"):
        empty.run()
    assert counts(empty) == [(3, 0, 3, 0, 1), (12, 0, 12, 0, 1), (12, 0, 12, 0, 1)]
    assert all((a == b).all() for a, b in zip(before, empty.weights(), strict=True))
    assert world.stack.updates == empty.stack.updates == 3  # the learning rate moves on as with full batches


@pytest.mark.slow
def test_no_limit_continues_until_the_batch_is_full(tmp_path):
    world = refilled(tmp_path / "run", every=20, max_num_gen_batches=0, oversample=1)
    world.run()
    assert counts(world)[0] == (42, 3, 39, 0, 14) and world.source.cursor.drawn == 162


@pytest.mark.parametrize("metric", ["accuracy", "number"])
def test_a_scorer_that_is_down_costs_its_groups_and_not_the_run(metric, tmp_path):
    """The part that the filter looks at is missing where its scorer failed; those groups are replaced by others."""
    world = refilled(tmp_path / "run", every=1, selection=BY.format(metric))

    def score(prompt, completion):
        if prompt.uid < 3:
            return Score.failed("number: down")
        return Score(
            value=float(completion.sample), correct=completion.sample > 1, parts={"number": float(completion.sample)}
        )

    world.rewards.score = each(score)
    world.run()
    first = world.records()[0]
    assert counts(world) == [(6, 3, 0, 0, 2), (3, 3, 0, 0, 1), (3, 3, 0, 0, 1)]
    assert first["prompts_unscored"] == first["prompts_dropped_invalid"] == 3
    assert acceptance(world) == 1.0  # who was not scored was not judged


@pytest.mark.slow
def test_by_accuracy_where_no_reward_gives_one_the_rewards_are_compared(tmp_path):
    """`dapo` with a float reward: nothing is dropped that differs, and the log says so once."""
    world = refilled(tmp_path / "run", every=1, selection=BY.format("acc"))
    world.rewards.score = each(lambda prompt, completion: Score(value=float(completion.sample * (prompt.uid != 1))))
    world.run()
    assert counts(world) == [(5, 3, 1, 1, 2), (3, 3, 0, 1, 1), (3, 3, 0, 1, 1)]
    (notice,) = [text for text in world.observer.warnings if "algorithm.selection" in text]
    assert notice.startswith("no reward sets `correct`, so algorithm.selection.0 compares rewards")


@pytest.mark.slow
def test_one_judgement_is_enough_for_accuracy(tmp_path):
    world = refilled(tmp_path / "run", every=1, selection=BY.format("acc"))
    judged = (True, False, None, None)
    world.rewards.score = each(lambda prompt, c: Score(value=float(c.sample), correct=judged[c.sample]))
    world.run()
    assert not [text for text in world.observer.warnings if "no reward sets `correct`" in text]


def test_an_unknown_metric_comes_to_the_clear_end(tmp_path):
    world = refilled(tmp_path / "run", every=1, selection=BY.format("nobody"), max_num_gen_batches=1)
    world.rewards.score = each(lambda prompt, completion: Score(value=float(completion.sample)))
    with pytest.raises(RunEnded, match=r"\(3 uniform_group; mean reward 1.5\)"):
        world.run()
    assert {r["outcome"] for r in read_rows(world.folder.rollout_file(1))} == {"dropped_uniform_group"}


@pytest.mark.slow
def test_a_group_that_another_local_selection_empties_is_refilled_too(tmp_path):
    world = refilled(tmp_path / "run", every=1, selection="[drop_truncated]", oversample=1)
    inner = world.engine.generate

    async def cut(requests):
        async for c in inner(requests):
            object.__setattr__(c, "finish_reason", "length" if c.prompt_uid == 1 else "stop")
            yield c

    world.engine.generate = cut
    world.run()
    first = world.records()[0]
    names = ("prompts_generated", "prompts_used", "prompts_dropped_truncated", "prompts_carried")
    assert [first[name] for name in names] == [6, 3, 1, 2]


SETTINGS = {
    "train__steps": 4,
    "reward": [{"kind": "tests.runtime.tiny_run:Even", "constant": 3}],  # a third of the prompts teach nothing
    "algorithm": {
        "preset": "dapo",
        "selection": [{"kind": "drop_uniform_groups"}],
        "dynamic_sampling": {"oversample": 1.6},
    },
}


def test_the_run_that_is_resumed_carries_groups_over(runs):
    """So that there is something to resume with."""
    carried = [r["prompts_carried"] for r in runs.traces("carried groups")["metrics"] if r["kind"] == "train"]
    assert any(carried[:-1])
    for checkpoint in saved_in(runs.finished("carried groups")):
        groups = read_groups(checkpoint.path / CARRIED_GROUPS)
        assert [group.prompt.uid for group in groups] == checkpoint.facts["pending"]


@pytest.mark.slow
def test_the_limits_that_ended_a_run_may_be_changed_to_go_on(tiny_model, tmp_path):
    refill = {"oversample": 1, "max_num_gen_batches": 1}
    changes = {"algorithm__dynamic_sampling": refill, "train__steps": 2, **NO_EVAL}
    tree = recipe(tiny_model("llama"), **SETTINGS | changes)
    with pytest.raises(RunEnded, match="step [12]: 1 generation batches"):
        go(tmp_path / "run", tree)
    tree["algorithm"]["dynamic_sampling"] |= {"exhausted": "partial"}
    assert go(tmp_path / "run", tree, resume=True).steps == 2


def test_without_a_limit_steps_without_scores_go_on(tmp_path):
    world = World(tmp_path / "run", "train.steps=4", "runtime.max_unscored_steps=0")
    refused = Score.failed("http: connection refused")
    third = range(6, 9)  # the prompts of the third step
    world.rewards.score = each(lambda prompt, c: Score(value=float(c.sample)) if prompt.uid in third else refused)
    assert world.run() is True and world.journal.step == 4


def test_remax_has_the_greedy_completion_of_each_prompt_as_baseline(tmp_path):
    """It is the fifth; the third prompt's scorer fails there."""
    world = World(tmp_path / "run", "train.steps=1", "algorithm.advantage=remax")
    failed = Score.failed("no")
    world.rewards.score = each(lambda prompt, c: failed if c.key[:2] == (2, 4) else Score(value=float(c.sample)))
    world.run()
    rows = read_rows(world.folder.rollout_file(1))
    assert [r["advantage"] for r in rows] == [-4.0, -3.0, -2.0, -1.0] * 2 + [0.0] * 4
    assert world.records()[0]["completions"] == 12


@pytest.mark.slow
def test_allocation_is_more_prompts_and_nothing_else(tiny_model, tmp_path):
    """2 prompts a step with half of each group pruned and its places filled: to the bit the run of 4 prompts a step,
    half pruned."""
    for name, prompts, allocate in (("filled", 2, True), ("asked", 4, False)):
        selection = [{"kind": "prune", "rate": 0.5, "allocate": allocate}]
        changes = {
            "train__prompts_per_step": prompts,
            "train__updates_per_step": 2,
            "algorithm": {"preset": "grpo", "selection": selection},
            "train__steps": 2,
            **NO_EVAL,
        }
        go(tmp_path / name, recipe(tiny_model("llama"), **changes))
    assert_same(traces(tmp_path / "filled"), traces(tmp_path / "asked"))


@pytest.mark.slow
def test_a_step_without_an_update_publishes_nothing_and_no_version(tmp_path):
    """Steps 1 and 3 have nothing to train on; ages are counted in published weights, not in steps."""
    words = ("train.steps=4", "checkpoint.every=1", "checkpoint.keep_last=0")
    world = refilled(tmp_path / "run", *words, every=1, max_num_gen_batches=1, oversample=2, exhausted="partial")
    world.rewards.score = each(
        lambda prompt, c: Score(value=float(6 <= prompt.uid < 12 and c.sample % 2), correct=False)
    )
    world.run()
    assert [r["updates"] for r in world.records()] == [0, 1, 1, 0]
    assert [r["policy_version"] for r in world.records()] == [0, 1, 2, 2]
    assert [r["age/max"] for r in world.records()] == [0, 0, 1, 0]
    published = [call for call in world.engine.calls if call not in ("pause", "resume")]
    assert published == [("publish", 0), ("publish", 1), ("publish", 2)]
    assert [c.facts["policy_version"] for c in checkpoints(world.folder.checkpoints)] == [0, 1, 2, 2]
    assert world.journal.version == 2
    world.journal.rewind(2)
    assert (world.journal.step, world.journal.version) == (2, 1)
