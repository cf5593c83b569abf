"""Where the past of a request lives. Imports only its torch-free half: page numbers."""

from deepinfer.kvcache.blocks import BlockAllocator

__all__ = ["BlockAllocator"]
