"""Requests as people send them: OpenAI's and Anthropic's shapes in, the same shapes out."""
