"""Decoder-only language models of today's families, described by a `models.decoder_spec.DecoderSpec`."""
