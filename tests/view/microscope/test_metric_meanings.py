"""Every metric of a step has a group and a meaning, which the page shows, vital ones first."""

from proxima.core.correction.health import HEALTH_CHECKS
from proxima.experiments.cell_statistics import HELD_OUT
from proxima.experiments.metric_names import METRIC_ALIASES
from proxima.view.comparison_page import CHARTS, EXAMPLE_CHARTS
from proxima.view.microscope.trend import VITAL, metric_groups, metric_meanings

CHARTED = {*CHARTS, *EXAMPLE_CHARTS} - {HELD_OUT}  # on the page of a comparison


def test_every_metric_that_is_named_has_a_line_of_its_own():
    """The charts of a comparison, the health check, and what other frameworks' names resolve to."""
    judged = [check.metric for check in HEALTH_CHECKS]
    named = {*CHARTED, *judged, *METRIC_ALIASES.values(), "updates/skipped", "dropped/uniform_group"}
    about = metric_meanings(named)
    assert len(named) > 60
    assert [name for name, (group, meaning) in about.items() if group == "Other" or not meaning] == []


def test_the_vital_dozen_comes_first_and_the_rest_by_group():
    vital = list(metric_groups()[VITAL])
    assert len(vital) == 12
    about = metric_meanings([*sorted(vital), "mismatch/kl", "lr", "my/own", "updates/skipped", "reward/part/format"])
    assert list(about) == [*vital, "reward/part/format", "lr", "updates/skipped", "mismatch/kl", "my/own"]
    assert about["my/own"] == ["Other", "a metric of your own kind"]
    assert about["reward/mean"] == [VITAL, "mean over the valid completions generated in the step, trained or not"]
    assert about["updates/skipped"][1].endswith("left the weights alone (train.on_zero_gradient: skip)")


def test_meanings_are_plain_text_on_the_page_and_each_is_one_line():
    for group in metric_groups().values():
        assert all(len(meaning) <= 260 and "\n" not in meaning for meaning in group.values())
    shown = metric_meanings(names.partition(", ")[0] for group in metric_groups().values() for names in group)
    assert "1 in a replay, whose rewards" in shown["replayed"][1]
    assert not [meaning for _, meaning in shown.values() if set("[]`*") & set(meaning)]
