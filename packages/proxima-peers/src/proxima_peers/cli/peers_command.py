"""Convert the options of another framework to a recipe, or check our mathematics against its numbers.

proxima peers convert grpo.yaml --out mine.yaml  # each value with its origin; nothing is executed
proxima peers verify records.json

verify gives each golden record a verdict. matched: the same numbers. differs: explained by a documented peculiarity of
the peer, named by its id. failed: neither. unsupported: no code of ours computes this. Exit code 1 if any record
failed."""

from proxima_peers.cli.convert import convert_file
from proxima_peers.cli.verify import verify_files

COMMAND = {"convert": convert_file, "verify": verify_files}
