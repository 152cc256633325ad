"""Fixtures of the tests of pages."""

import pytest

from proxima.view import chart


@pytest.fixture
def drawn() -> None:
    """Of a test that looks at the lines of a page's charts."""


@pytest.fixture
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the charts of pages empty, with their axes as attributes: drawing them is most of a page's time."""
    if "drawn" not in request.fixturenames:
        empty = '<svg role="img" {}>{}</svg>'
        monkeypatch.setattr(chart, "_svg_text", lambda figure, attributes, inner="": empty.format(attributes, inner))
