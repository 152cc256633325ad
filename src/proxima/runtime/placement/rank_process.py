"""The process of a rank: calls the function that its actor names. Started by `process.children`, so that it ends
with the actor, however the actor ends.

Its channel carries one line of JSON: `{"function": "module:name", "arguments": {…}}`. The function's result is the exit
code.
"""

import pkgutil
import signal
import socket
import sys

from proxima.process.messages import LineChannel

if __name__ == "__main__":
    # the raylet blocks SIGINT for all its descendants
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    channel = LineChannel(socket.socket(fileno=int(sys.argv[1])))  # kept open: its end is this process's
    call = channel.receive()
    sys.exit(pkgutil.resolve_name(call["function"])(**call["arguments"]))
