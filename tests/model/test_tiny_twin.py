"""A model's tiny twin: what depends on the width of a head shrinks with it."""

import pytest

from proxima.model.tiny_twin import _turns


@pytest.mark.parametrize(
    ("ratio", "sections", "count"), [(1.0, [16, 24, 24], 64), (0.25, [4, 6, 6], 16), (0.01, [1, 1, 1], 1)]
)
def test_position_factors_are_as_many_as_a_narrower_head_needs(ratio, sections, count):
    """At least one of each; whatever else is said of positions stays."""
    factors = [1.0 + place for place in range(64)]
    rope = {"type": "yarn", "factor": 4.0, "mrope_section": [16, 24, 24], "long_factor": factors}
    small = _turns({"outer": rope, "short_factor": factors}, ratio)
    kept = {"type": "yarn", "factor": 4.0, "mrope_section": sections, "long_factor": factors[:count]}
    assert small == {"outer": kept, "short_factor": factors[:count]}
