"""The `deepinfer` command: parse, call, print. Nothing heavy is imported before a command runs."""
