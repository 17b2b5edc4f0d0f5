"""Decoder-only language models of today's families, described by a `spec.DecoderSpec`."""
