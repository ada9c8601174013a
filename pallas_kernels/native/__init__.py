"""Kernels in C++ for CPUs, called by XLA programs through its foreign function interface.

Nothing is compiled at install. At first use the machine's C++ compiler makes one small library for the best
instruction set that the processor has, kept in the cache directory. Where there is no compiler, or none of
the instruction sets, `find` says why: attention is then plain XLA's, and packed weights are expanded or go
through their plain twin.
"""

from pallas_kernels.native.library import ISAS, find, target

__all__ = ["ISAS", "find", "target"]
