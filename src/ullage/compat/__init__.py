"""The Python names of verl and StateSet users: a thin front over the rooms, shown by `ullage`; docs/python_api.md."""
