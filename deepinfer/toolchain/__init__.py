"""Toolchains: which compilers and vendor kits are here, and what they can build for."""
