"""The client of other servers, of which a stand-in has none."""

from typing import Any

from pydantic import BaseModel


class ServerClient(BaseModel):
    head_server_config: Any
    global_config_dict: Any
