"""How long the threads of a matrix product spin before they sleep."""

import os

SPINS = 2000
CHOSEN_BY_USER = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def limit_spinning() -> None:
    """Let OpenMP's threads sleep after `SPINS` spins, in this process and in those that it starts.

    A thread that waits for the others of its team spins 300,000 times by libgomp's default. Where other work has the
    cores, it then takes them from the very threads that it waits for: beside two busy loops a run fell to a tenth of
    its speed. `benchmarks/busy_machine` measures what this number costs on a quiet machine and gains on a busy one.
    libgomp reads the variable when torch loads it; later it only reaches processes that are started. A variable that
    the user has set is kept.
    """
    if not any(name in os.environ for name in CHOSEN_BY_USER):
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
