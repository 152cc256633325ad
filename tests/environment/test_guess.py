"""The game: found by halving, lost without, the same for one seed."""

from proxima.environment.builtin import Guess


def play(seed, guesses, **arguments):
    game = Guess(**arguments)
    replies = [game.reset({}, seed)]
    for guess in guesses:
        replies.append(game.respond(str(guess)))
        if replies[-1].done:
            break
    return game, replies


def halving(seed, low, high, guesses):
    game = Guess(low, high, guesses)
    game.reset({}, seed)
    while True:
        middle = (low + high) // 2
        reply = game.respond(f"I say {middle}.")
        if reply.done:
            return reply.reward
        low, high = (middle + 1, high) if reply.content == "higher" else (low, middle - 1)


def test_halving_finds_every_number():
    rewards = [halving(seed, 1, 15, 4) for seed in range(200)]
    assert set(rewards) == {1.0, 0.75, 0.5, 0.25}
    assert rewards == [halving(seed, 1, 15, 4) for seed in range(200)]


def test_hints_states_and_the_end():
    seed = next(seed for seed in range(100) if play(seed, [])[0].number == 6)
    _, replies = play(seed, [3, "no idea", "8 or rather 9", -5, 10**30, 1])
    no_number = "Write a number from 1 to 10."
    assert [reply.content for reply in replies[1:]] == ["higher", no_number, "lower", "higher", no_number, ""]
    ranges = [("1-10", 6), ("4-10", 5), ("4-10", 4), ("4-8", 3)]
    assert [r.state for r in replies[:4]] == [f"{between}, {left} guesses left" for between, left in ranges]
    assert replies[-1].done and replies[-1].reward == 0.0
    assert [r.reward for r in play(seed, [1, 6])[1]] == [0.0, 0.0, 1 - 1 / 6]
