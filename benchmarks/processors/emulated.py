"""Lesser processors, emulated on this one: what each needs, and the variables by which the libraries keep to it."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass

from proxima.system.machine import CEILINGS, processor_flags


@dataclass(frozen=True)
class Processor:
    """A kind of x86-64 processor.

    Args:
        needs: the feature that a processor must have to emulate this one, by its name in Linux; None: any has it.
        variables: the limits of torch and of the C++ kernels, of oneDNN and, in the last one, of MKL.
    """

    needs: str | None
    variables: Mapping[str, str]


WHOLE = "this processor"
PROCESSORS = {
    WHOLE: Processor(None, {}),
    "AVX512 without bfloat16": Processor(
        "avx512f", {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "MKL_CBWR": "AVX512"}
    ),
    "AVX2": Processor("avx2", {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_CBWR": "AVX2"}),
    "generic": Processor(
        None, {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_CBWR": "COMPATIBLE"}
    ),
}
VARIABLES = frozenset(CEILINGS) | {"MKL_CBWR"}


def why_not(name: str) -> str | None:
    """Say why this machine can't be a processor of this kind; None if it can."""
    needs = PROCESSORS[name].needs
    if sys.platform != "linux":
        return f"{name}: what the processor has is only known on Linux"
    if needs is not None and needs not in processor_flags():
        return f"{name}: this processor has no {needs}"
    return None


def environment(name: str, variables: Mapping[str, str]) -> dict[str, str]:
    """The variables of a process on such a processor: `variables` without limits of their own, and its limits."""
    own = {key: value for key, value in variables.items() if key not in VARIABLES}
    return own | dict(PROCESSORS[name].variables)
