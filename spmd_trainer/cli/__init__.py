"""The command line: parses the flags, connects the processes of the job, and starts the program of the mode (`--mode`)."""
