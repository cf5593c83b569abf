"""Toolchains: which compilers and vendor kits are here, and what they can build for."""

from deepinfer.toolchain.probe import Probe, probe, problem

__all__ = ["Probe", "probe", "problem"]
