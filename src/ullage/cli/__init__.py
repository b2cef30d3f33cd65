"""The command line: one file per verb, imported only when its verb is asked for.

A verb `ullage/cli/<verb>.py` offers `HELP` (one line, repeated in the table of `main.py`), `add_arguments(parser)` and
`run(arguments, overrides) -> exit code`. Data goes to stdout, progress to stderr; torch is imported inside `run`.
"""
