"""Convert the options of another framework to a recipe, or check our mathematics against its numbers.

proxima peers convert grpo.yaml --out mine.yaml  # each value with its origin; nothing is executed
proxima peers verify records.json
proxima peers shadow step.npz  # one step of another trainer: the convention behind each number

verify gives each golden record a verdict. matched: the same numbers. differs: explained by a documented peculiarity of
the peer, named by its id. failed: neither. unsupported: no code of ours computes this. Exit code 1 if any record
failed.

shadow computes a dumped step from its rewards to its gradient. same: as stated. explained: by other conventions, all of
which are named. Exit code 1 if no convention gives some number."""

from proxima_peers.cli.convert import convert_file
from proxima_peers.cli.shadow import shadow_file
from proxima_peers.cli.verify import verify_files

COMMAND = {"convert": convert_file, "verify": verify_files, "shadow": shadow_file}
