"""Assignment of completions to replicas: the least loaded replica gets a prompt and all its completions."""

from collections import deque
from collections.abc import Callable, Sequence

from proxima.engine.http.generation_job import GenerationJob
from proxima.engine.http.replica import Replica

HOMES = 65_536  # most prompts whose replica is remembered; all are forgotten then


class Router:
    """One queue per replica. A prompt has a home, the replica that was least loaded when it arrived, so that its
    completions share the prefix cache there; a replica with room and an empty queue takes whole prompts from others.

    Args:
        replicas: all replicas, including those out of service; changed by `join` and `remove`.
    """

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = list(replicas)
        self._queues: dict[Replica, deque[GenerationJob]] = {replica: deque() for replica in replicas}
        self._homes: dict[int, Replica] = {}

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def occupancy(self, replica: Replica) -> float:
        """Running and waiting completions as a fraction of the replica's limit."""
        return (replica.assigned + len(self._queues[replica])) / replica.limit

    def add(self, job: GenerationJob, *, first: bool = False) -> None:
        """Queue a completion at its home or, if it failed there, elsewhere.

        Args:
            first: ahead of the others, because it already has tokens.
        """
        queue = self._queues[self._home(job)]
        if first:
            queue.appendleft(job)
        else:
            queue.append(job)

    def _home(self, job: GenerationJob) -> Replica:
        uid = job.request.prompt.uid
        home = self._homes.get(uid)
        if home is not None and home.in_service and home not in job.tried:
            return home
        serving = [replica for replica in self.replicas if replica.in_service]
        untried = [replica for replica in serving if replica not in job.tried]
        choices = untried or serving or self.replicas
        best = min(choices, key=self.occupancy)
        if home is None or not home.in_service:  # the siblings of a completion that failed at home stay there
            if len(self._homes) >= HOMES:
                self._homes.clear()
            self._homes[uid] = best
        return best

    @property
    def jobs(self) -> list[GenerationJob]:
        """The waiting completions."""
        return [job for queue in self._queues.values() for job in queue]

    def next_for(self, replica: Replica, *, only_started: bool = False) -> GenerationJob | None:
        """Return the completion that the replica, which has room, should run next; None: nothing.

        Args:
            only_started: only completions that already have tokens.
        """
        queue = self._queues[replica]
        if not queue:
            self._take_a_prompt(replica)
        if only_started:
            started = next((job for job in self.jobs if job.length), None)
            self.take(lambda job: job is started)
            return started
        return queue.popleft() if queue else None

    def _take_a_prompt(self, replica: Replica) -> None:
        """Move a prompt here from a queue that can't be served now: from a replica out of service, else from a full
        one, longest queue first."""

        def rank(other: Replica) -> tuple[bool, int]:
            return other.in_service, -len(self._queues[other])

        full = [other for other in self.replicas if other is not replica and not other.has_room]
        for other in sorted(full, key=rank):
            queue = self._queues[other]
            movable = [job for job in queue if self._may_run(job, replica)]
            if not movable:
                continue
            uid = movable[0].request.prompt.uid
            moving = [job for job in movable if job.request.prompt.uid == uid]
            self._queues[other] = deque(job for job in queue if job not in moving)
            self._queues[replica].extend(moving)
            self._homes[uid] = replica
            return

    def _may_run(self, job: GenerationJob, replica: Replica) -> bool:
        """Return True if the job has not failed here, or has failed everywhere."""
        return replica not in job.tried or all(other in job.tried for other in self.replicas if other.in_service)

    def take(self, which: Callable[[GenerationJob], bool]) -> list[GenerationJob]:
        """Remove and return the waiting completions selected by `which`."""
        taken = [job for job in self.jobs if which(job)]
        if taken:
            for replica, queue in self._queues.items():
                self._queues[replica] = deque(job for job in queue if not which(job))
        return taken

    def join(self, replica: Replica) -> None:
        """Add a replica."""
        self.replicas.append(replica)
        self._queues[replica] = deque()

    def remove(self, replica: Replica) -> None:
        """Remove a replica that is out of service."""
        self.replicas.remove(replica)
        self.leave(replica)
        del self._queues[replica]

    def leave(self, replica: Replica) -> None:
        """Move the waiting completions of a replica that leaves service to other queues."""
        queue = self._queues[replica]
        self._queues[replica] = deque()
        for job in queue:
            self.add(job)
