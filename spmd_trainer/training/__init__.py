"""The loops: train, eval, decode. Each reads top to bottom; what they share is in `job`."""
