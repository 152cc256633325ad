"""What the claims behind the methods are worth on long answers: tasks and a model made here, designs, results."""
