"""Decoder-only language models (Llama, Qwen, Gemma, ...), configured by a `models.decoder_spec.DecoderSpec`."""
