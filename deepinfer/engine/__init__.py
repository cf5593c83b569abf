"""The loop that knows the other rooms: plan, run, sample, commit.

`deepinfer.LLM` is its public face. Nothing is imported here: `engine.assembly` sizes a run for
`--dry-run` without loading torch.
"""
