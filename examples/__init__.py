"""Runnable examples: each one is a small program that uses deepinfer the way a reader would."""
