"""What a FAKE of SGLang does with new weights over a process group: it really joins over gloo, as torch does it for
`init_weights_update_group`, with torch's deadline of half an hour, and each call blocks a thread.

Faults at a bucket: `killed` closes every connection, `stopped` answers no call any more, `cut` cannot load it.
"""

import asyncio
import copy
import threading
from datetime import timedelta

import httpx
import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo
from torch.distributed.rendezvous import rendezvous

HALF_AN_HOUR = timedelta(minutes=30)


class FakeUpdates:
    """The updates of a server, since its process started."""

    def __init__(self, server):
        self.server, self.session, self.groups = server, False, {}
        self.at, self.fault = None, ""
        self.again = 0  # how often the fault comes back, in the next bucket
        self.life = None  # `killed`, `stopped`; None: healthy
        self.released = threading.Event()
        self.scheduler = threading.Lock()  # it does one thing at a time

    def table(self):
        return {
            ("POST", "/update_weight_version"): self.set_version,
            ("POST", "/begin_weight_update"): self.begin,
            ("POST", "/end_weight_update"): self.end,
            ("POST", "/init_weights_update_group"): self.blocking(self.join),
            ("POST", "/destroy_weights_update_group"): self.blocking(self.leave),
            ("POST", "/update_weights_from_distributed"): self.blocking(self.receive),
        }

    def blocking(self, work):
        async def call(body):
            answers = []

            def run():
                with self.scheduler:
                    try:
                        answers.append(work(body))
                    except SystemExit:
                        return

            thread = threading.Thread(target=run, daemon=True)
            thread.start()
            while thread.is_alive() or self.life is not None:
                await self.alive()
                await asyncio.sleep(0.002)
            return answers[0]

        return call

    async def alive(self):
        while self.life == "stopped":
            await asyncio.sleep(0.01)
        if self.life == "killed":
            raise ConnectionError

    def set_version(self, body):
        assert body["abort_all_requests"] is False
        self.server.version = body["new_version"]
        return {"success": True, "message": "", "new_version": self.server.version}

    def begin(self, _):
        if self.session:
            return refusal("a weight-update session is already open; call end_weight_update() first")
        self.session = True
        self.server.model = copy.deepcopy(self.server.model)
        return success()

    def end(self, _):
        if not self.session:
            return refusal("no weight-update session is open; call begin_weight_update() first")
        self.session = False
        return success()

    def join(self, body):
        name, rank, size = body["group_name"], body["rank_offset"], body["world_size"]
        if name in self.groups:
            return refusal(
                "Failed to initialize custom process group: The specified group name has already been created"
            )
        try:
            address = f"tcp://{body['master_address']}:{body['master_port']}"
            store, rank, size = next(rendezvous(address, rank, size, timeout=HALF_AN_HOUR))
            store.set_timeout(HALF_AN_HOUR)
            for prefix in (name, f"{name}/", "cpu/"):
                store = PrefixStore(prefix, store)
            self.groups[name] = ProcessGroupGloo(store, rank, size, timeout=HALF_AN_HOUR)
        except Exception as error:
            return refusal(f"Failed to initialize custom process group: {error}.")
        return success()

    def leave(self, body):
        if body["group_name"] not in self.groups:
            return refusal("The group to be destroyed does not exist.")
        self.groups.pop(body["group_name"]).abort()
        return success()

    def receive(self, body):
        if not self.session:
            return refusal("update_weights_from_distributed must run between begin_weight_update() and …")
        assert body["load_format"] == "flattened_bucket" and not body["flush_cache"]
        try:
            tensors = self.bucket(body)
        except Exception as error:
            return refusal(f"Failed to receive weights: {error}")
        try:
            self.load(tensors)
        except Exception as error:
            return refusal(f"Failed to update parameter online: {error}. The full weights are partially updated.")
        return success()

    def bucket(self, body):
        if body["group_name"] not in self.groups:
            raise AssertionError(f"Group {body['group_name']} not in {list(self.groups)}")
        places, end = [], 0
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            dtype, start = getattr(torch, dtype), end
            if start % dtype.itemsize:
                raise ValueError(f"Unaligned received tensor {name}")
            end += torch.Size(shape).numel() * dtype.itemsize
            places.append((name, dtype, shape, start, end))
        received = torch.empty(end, dtype=torch.uint8)
        fault = self.breaks()
        if fault in ("killed", "stopped"):
            self.life = fault
            if fault == "killed":
                self.groups.clear()
                raise SystemExit
            self.released.wait(120)
        options = BroadcastOptions()
        options.timeout = HALF_AN_HOUR
        self.groups[body["group_name"]].broadcast([received], options).wait(HALF_AN_HOUR)
        if fault == "cut":
            places[0] = (places[0][0], places[0][1], [7, *places[0][2]], places[0][3], places[0][4])
        return [(name, received[start:end].view(dtype), shape) for name, dtype, shape, start, end in places]

    def breaks(self):
        """The fault of this bucket, if it is the one."""
        if self.at is None:
            return None
        self.at -= 1
        if self.at >= 0:
            return None
        self.at = 0 if self.again else None
        self.again -= bool(self.again)
        return self.fault

    @torch.no_grad()
    def load(self, tensors):
        """A name that the model does not have is ignored, as in SGLang."""
        weights = dict(self.server.model.named_parameters())
        self.server.weights += 1
        self.server._logits.clear()
        for name, value, shape in tensors:
            if name in weights:
                weights[name].copy_(value.view(*shape))


def success():
    return {"success": True, "message": "Success"}


def refusal(message):
    return httpx.Response(400, json={"success": False, "message": message})
