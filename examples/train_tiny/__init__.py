"""The recipe of the embedded checkpoint: data, training phases, evaluation and export."""
