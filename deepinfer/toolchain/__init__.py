"""Toolchains: which compilers and vendor kits are here, what they build, and what is built."""
