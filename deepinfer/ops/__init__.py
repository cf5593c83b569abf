"""Ops: what is computed (``specs``), by which implementation (``registry``), one back end a folder.

Comes in: a device and the user's choices. Goes out: a table of callables that the model calls by
name. Must not know the model, the engine or settings; values arrive as arguments.
"""
