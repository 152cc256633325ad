"""Which environments have rows of their own."""

import pytest

from proxima.data import FieldError
from proxima.environment.protocol import Environment
from proxima.rollout.environment_rows import EnvironmentRows


class Table(Environment):
    """Its rows are what the model asks for."""

    def rows(self, first: int) -> str:
        """Show rows.

        Args:
            first: the number of the first.
        """
        return str(first)


def test_a_tool_of_that_name_gives_no_rows():
    task = EnvironmentRows(environment={"kind": f"{__name__}:Table"})
    with pytest.raises(FieldError, match="environment='.*:Table' has no rows of its own"):
        task.rows(0)
