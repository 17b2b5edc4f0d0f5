"""Vision modules under the names that Pax's experiment files import."""
