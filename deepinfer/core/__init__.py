"""The nouns every room shares: requests, results, sequences and step plans. No torch."""
