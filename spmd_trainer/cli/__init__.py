"""From flags to programs."""
