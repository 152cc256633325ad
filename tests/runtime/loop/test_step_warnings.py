"""What a run says of a step that taught it nothing, of completions without a score and of what differs; of a sound step
it says nothing."""

from types import SimpleNamespace

import pytest

from proxima.core import SELECTIONS
from proxima.core.correction.guard import MismatchGuard
from proxima.runtime.loop.step_review import StepReview
from tests.training.test_batch_builder import algorithm, group


class Observer:
    """Keeps what it is told."""

    def __init__(self):
        self.warned, self.lasted = [], []

    def warning(self, text):
        self.warned.append(text)

    def lasting(self, text):
        self.lasted.append(text)


def review_of(selection=(), notes=()):
    observer = Observer()
    folder = SimpleNamespace(rollout_file=lambda step: SimpleNamespace(name=f"{step}.parquet"))
    services = SimpleNamespace(store=SimpleNamespace(folder=folder), observer=observer)
    learner = SimpleNamespace(guard=MismatchGuard(), warnings=lambda: list(notes), known_mismatch="")
    return StepReview(services, learner, 3, selection), observer


def after(review, rewards, *, step=4, selection=()):
    """Let the review see a step of one group."""
    groups = [group(0, rewards)]
    batch = algorithm(*selection).step_batch(groups, step)
    record = {"step": step, "reward/invalid": sum(reward is None for reward in rewards), "completions": len(rewards)}
    review.warn(record, SimpleNamespace(generated=groups), batch)


def test_a_sound_step_needs_no_word():
    review, observer = review_of()
    after(review, [0.0, 1.0])
    assert (observer.warned, observer.lasted, review.exhausted) == ([], [], "")


def test_a_step_without_an_update_says_so_until_one_has_an_update_again():
    review, observer = review_of([SELECTIONS["drop_uniform_groups"](metric="reward")])
    after(review, [1.0, 1.0], selection=["drop_uniform_groups"])
    assert observer.warned == [f"step 4: {review.exhausted}"]
    assert review.exhausted.startswith("nothing was left to train on (2 ")
    after(review, [0.0, 1.0], selection=["drop_uniform_groups"])
    assert review.exhausted == "" and len(observer.warned) == 1


@pytest.mark.parametrize(
    ("rewards", "said"),
    [([None, 1.0, 0.0], "1 of 3 completions have no score ("), ([None, None], "step 4: no completion has a score (")],
)
def test_completions_without_a_score_are_counted(rewards, said):
    review, observer = review_of()
    after(review, rewards)
    assert observer.warned[0].startswith(said)
    assert "see `error` in rollouts/4.parquet" in observer.warned[0]
    assert ("The run ends after 3 such steps" in observer.warned[0]) == (set(rewards) == {None})


def test_notes_of_the_learner_are_of_their_step():
    review, observer = review_of(notes=["the loss is large", "and so is its norm"])
    after(review, [0.0, 1.0], step=7)
    assert observer.warned == ["step 7: the loss is large", "step 7: and so is its norm"]


def test_accuracy_that_no_reward_gives_is_missed_once():
    selection = [SELECTIONS["drop_uniform_groups"](metric="accuracy")]
    review, observer = review_of(selection)
    for step in (1, 2):
        after(review, [0.0, 1.0], step=step)
    (said,) = observer.warned
    assert said.startswith("no reward sets `correct`, so algorithm.selection.0 compares rewards")
