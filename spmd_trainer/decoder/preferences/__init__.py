"""Training on pairs of answers, one preferred over the other: DPO and related losses, for praxis' language models."""
