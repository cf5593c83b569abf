"""How many guesses to make, which to check, which to keep. Imports only its torch-free half."""

from deepinfer.speculative.proposal import Counts
from deepinfer.speculative.schedule import Schedule

__all__ = ["Counts", "Schedule"]
