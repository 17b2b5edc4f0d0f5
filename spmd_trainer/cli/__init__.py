"""The command line: parses its flags, joins the job's processes, and starts the program of a mode."""
