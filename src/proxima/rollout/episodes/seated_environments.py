"""Environments with roles: each role has a chat of its own, and the environment says who speaks next."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from proxima.data.flow import Message
from proxima.environment.agents import AgentFailed, AgentJob, AgentReward, AgentsInside
from proxima.environment.concurrent_hosts import AnyHosts
from proxima.environment.hosts import Answer, EnvironmentFailure, Instance, too_slow
from proxima.rollout.episodes.formats.chat import ChatAnswer, ChatMessage, ChatRefused, ChatRequest

T = TypeVar("T")
LIMITS = ("episode_limit", "context_length_exceeded")  # codes of a refusal that ends the episode


class SeatedEnvironments(AgentsInside):
    """Plays environments whose class has `roles`, in this process: `AgentJob.ask` answers.

    Args:
        hosts: run the environments; closed with this.
        seconds: `episode.seconds`.
    """

    def __init__(self, hosts: AnyHosts, seconds: float) -> None:
        self.hosts = hosts
        self.seconds = seconds

    @property
    def roles(self) -> Sequence[str]:
        """The roles of the class."""
        return self.hosts.interface.roles

    def log_to(self, file: Path | None) -> None:
        """See `hosts.Hosts.log_to`."""
        self.hosts.log_to(file)

    async def play(self, job: AgentJob) -> AgentReward:
        """Play an episode until the environment ends it, or a limit does."""
        instance = await self._opened(job)
        try:
            await self._talked(job, instance)
            with job.clock.queued():
                before = instance.seconds
                reward = await instance.end()
            self._charge(job, instance, before)
        except EnvironmentFailure as failure:  # no limit of the episode excuses it
            instance.drop()
            raise AgentFailed(failure.reason, None, unscored=True, collateral=failure.collateral) from None
        except BaseException:
            instance.drop()
            raise
        return reward

    async def _opened(self, job: AgentJob) -> Instance:
        with job.clock.queued():
            instance = await self.hosts.open(job.row, job.seed, f"prompt {job.group} sample {job.sample}")
        self._charge(job, instance, 0.0)
        return instance

    async def _talked(self, job: AgentJob, instance: Instance) -> None:
        """Let the roles speak in the order that the environment gives."""
        row: Sequence[Message] = job.row["messages"]
        system = [_shown(message) for message in row if message["role"] == "system"]
        role = instance.role or self.roles[0]
        opening = row if instance.opening is None else instance.opening
        chats: dict[str, list[ChatMessage]] = {role: [_shown(message) for message in opening]}
        while True:
            chat = chats[role]
            said = await self._said(job, instance, role, chat)
            if said is None:
                return
            chat.append(said.message)
            if said.finish_reason == "length":  # what it says is cut off
                return
            answers = await self._answers(job, instance, said)
            if any(answer.done for answer in answers) or not any(answer.messages for answer in answers):
                return
            for answer in answers:
                role = answer.role or role
                chat = chats.setdefault(role, list(system))
                chat += map(_shown, answer.messages)

    async def _said(
        self, job: AgentJob, instance: Instance, role: str, chat: Sequence[ChatMessage]
    ) -> ChatAnswer | None:
        """What a role says; None: a limit of the episode is reached."""
        request = ChatRequest(messages=tuple(chat), tools=tuple(instance.interface.schemas), model=f"policy/{role}")
        said: ChatAnswer
        try:
            (said,) = await job.ask(request)
        except ChatRefused as refused:
            if refused.code in LIMITS:
                return None
            raise EnvironmentFailure(refused.message) from None
        return said

    async def _answers(self, job: AgentJob, instance: Instance, said: ChatAnswer) -> list[Answer]:
        before = instance.seconds
        with job.clock.queued():
            if said.calls:
                answers = await instance.call(tuple(said.calls.values()))
            else:
                answers = [await instance.respond(said.content)]
        self._charge(job, instance, before)
        reward = sum(answer.reward for answer in answers)
        if reward:
            job.pay(said.turn, reward)
        return answers

    def _charge(self, job: AgentJob, instance: Instance, before: float) -> None:
        """Count a call that has ended: what it took in the worker is the episode's own time, the rest was a wait."""
        job.clock.worked(instance.seconds - before)
        if instance.seconds > self.seconds:
            raise too_slow(self.seconds)

    def close(self) -> None:
        """Stop the processes. May be called twice."""
        self.hosts.close()


def _shown(message: Mapping[str, Any]) -> ChatMessage:
    images = tuple(map(_image, message.get("images", ())))
    return ChatMessage(role=message["role"], content=message["content"], images=images)


def _image(image: str | int) -> bytes | int:
    """The file of an image, which is written in base64; one that has a number is known already."""
    if isinstance(image, str):
        return base64.b64decode(image)
    return image
