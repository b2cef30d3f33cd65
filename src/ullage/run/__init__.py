"""From a config to a running program: assemble the objects, launch the ranks."""
