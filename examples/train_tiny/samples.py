"""The ten samples of the model card: fresh code prompts, continued by the engine.

    python -m examples.train_tiny.samples [-m DIR]

Comes in: a checkpoint folder. Goes out: Markdown on stdout. Prompts, temperatures and seeds are
fixed, so that the card can be checked.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from deepinfer import LLM, SamplingParams  # noqa: E402

GREEDY = (
    "def read_lines(path):",
    "class Queue:\n    def __init__(self):",
    "import argparse\n\n\ndef main():",
    "def test_parse_date():",
    "for key, value in",
)
SAMPLED = (
    'def merge(left, right):\n    """',
    "class HTTPError(Exception):",
    "# Convert a string to",
    "try:\n    import",
    "async def fetch(url, timeout=",
)


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    a.add_argument("-m", "--model-dir", default=None)
    args = a.parse_args()
    asked = [(prompt, 0.0) for prompt in GREEDY] + [(prompt, 0.6) for prompt in SAMPLED]
    params = [
        SamplingParams(max_tokens=80, temperature=t, top_p=0.95 if t else 1.0, seq_seed=i)
        for i, (_, t) in enumerate(asked)
    ]
    # Coupled: the ids of plain decoding, with drafts or without.
    with LLM(args.model_dir, verify="coupled") as llm:
        results = llm.generate([prompt for prompt, _ in asked], params)
    for i, ((prompt, t), result) in enumerate(zip(asked, results, strict=True)):
        print(f"{i}. temperature {t}\n\n```python\n{prompt}{result.text}\n```\n")


if __name__ == "__main__":
    main()
