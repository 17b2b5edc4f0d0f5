"""Where Pax's experiment files look for its tasks: the same module paths, for those files only."""
