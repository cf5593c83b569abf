"""Where the past of a request lives. Imports only its torch-free half: page numbers."""

from deepinfer.kvcache.blocks import BlockAllocator
from deepinfer.kvcache.prefix import PrefixCache, Reuse

__all__ = ["BlockAllocator", "PrefixCache", "Reuse"]
