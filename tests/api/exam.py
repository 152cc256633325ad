"""An environment in a module that a worker process imports at once."""


class Exam:
    """An environment that an answer by a tool ends."""

    done = False

    def submit(self, expression: str) -> str:
        """Give the answer.

        Args:
            expression: the answer
        """
        self.done = True
        return "thanks"

    def get_reward(self) -> float:
        return 0.5


class Hinted(Exam):
    """An exam that adds to the question."""

    def reset(self, seed: int) -> str:
        return " Think first."
