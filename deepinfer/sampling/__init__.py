"""From logits to token ids: processing, seeded noise, log-probabilities."""
