"""The DeepSeek-V4.1 network: configuration, formulas, layers.

Each module holds one idea of the model specification; importing this package loads none of them, so
that the torch-free parts (configuration, Engram tables) stay usable without torch.
"""
