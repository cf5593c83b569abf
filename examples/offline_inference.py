"""Continue a few prompts: DEEPINFER_HF_MODEL_DIR=DIR python examples/offline_inference.py

Without the variable the embedded model answers.
"""

from deepinfer import LLM, SamplingParams

PROMPTS = [
    "def fibonacci(n):",
    "import os\n\n\ndef list_files(path):",
    "class Stack:",
]


def main() -> None:
    params = SamplingParams(temperature=0.6, top_p=0.95, max_tokens=64, seed=1)
    with LLM() as llm:
        for prompt, result in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
            print(f"--- {result.finish_reason}, {result.usage.completion_tokens} tokens")
            print(prompt + result.text)


if __name__ == "__main__":
    main()
