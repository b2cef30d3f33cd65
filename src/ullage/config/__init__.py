"""The config room: one typed tree of keys, and the loader that fills it from YAML, overrides and verl's names.

`load.load_config` reads a file, `check.require_runnable` says whether a run can start, `keys.key_listing` documents
every key. Nothing is imported here, so that a light command can read its overrides without building the tree.
"""
