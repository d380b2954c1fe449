"""Model families as segments: (params, tokens, state) -> (hidden, delta)."""
