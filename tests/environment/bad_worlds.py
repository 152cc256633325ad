"""Classes and functions that are no environments and no tools."""


class NoTypes:
    def turn(self, way):
        """Turn.

        Args:
            way: where to
        """


class NoDocstring:
    def turn(self, way: str) -> str:
        return way


class NoArgs:
    def turn(self, way: str) -> str:
        """Turn."""


class Unknown:
    def turn(self, way: object) -> str:
        """Turn.

        Args:
            way: where to
        """


class Stars:
    def turn(self, *ways: str) -> str:
        """Turn.

        Args:
            ways: where to
        """


class Nothing:
    def reset(self):
        pass


class Raises:
    def __init__(self):
        raise OSError("no\nboard")


class WrongProperties:
    """As a server of tools may list them."""

    def tools(self):
        parameters = {"type": "object", "properties": ["way"]}
        return [{"function": {"name": "turn", "description": "Turn.", "parameters": parameters}}]

    def call_tool(self, name, arguments):
        return ""


def calculate(expression: str) -> str:
    """Compute.

    Args:
        expression: a sum
    """


def untyped(x):
    return x
