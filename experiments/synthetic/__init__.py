"""Experiments on made-up data: small, quick, each showing one structure."""
