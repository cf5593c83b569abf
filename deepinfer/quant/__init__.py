"""Number formats: packed weights and state records, and the bit-exact codecs to and from floats.

Comes in: float tensors or packed bytes. Goes out: the other one. Must not know which layer uses
which format, nor how bytes are stored on disk.
"""

from deepinfer.quant.formats import Packed

__all__ = ["Packed"]
