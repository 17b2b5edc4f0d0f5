"""Writing files safely, wherever they are. Start with `files.py`: a file written by it is seen whole or not at all."""
