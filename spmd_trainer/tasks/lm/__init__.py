"""Language-model parts under the names that Pax's experiment files import."""
